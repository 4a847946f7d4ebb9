"""ONNX Runtime and NNCF in other versions, each in a folder of its own in the cache, for a subprocess's PYTHONPATH.

    python -m benchmarks.runtimes            # fetches all of them
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.assets import AssetError, cache_root

ONNXRUNTIMES = ("1.24.4", "1.27.0", "1.29.0", "1.31.1", "1.32.0")
NNCFS = ("3.3.0", "3.4.0")


def runtime_folder(version: str, package: str = "onnxruntime") -> Path:
    """The folder with one version of a package, without its dependencies, installed now if it isn't there.

    Raises:
        AssetError: pip could not install it.
    """
    folder = cache_root().parent / "runtimes" / f"{package}-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made)]
    run = subprocess.run([*pip, f"{package}=={version}"], capture_output=True, text=True, check=False)
    if run.returncode:
        shutil.rmtree(made, ignore_errors=True)
        msg = f"expected pip to install {package}=={version}, got: {run.stderr.strip()[-500:]}"
        raise AssetError(msg)
    made.rename(folder)
    return folder


def environment(*folders: Path) -> dict[str, str]:
    """The environment of a subprocess in which these folders come before everything installed, but behind this checkout."""
    root = Path(__file__).resolve().parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, *folders))), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    for _version in ONNXRUNTIMES:
        print(runtime_folder(_version))
    for _version in NNCFS:
        print(runtime_folder(_version, "nncf"))
