"""What is installed is what is here: a wheel built from a copy of the source, read file by file."""

import configparser
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "build", "out", "*.egg-info", ".*_cache", ".hypothesis", "__pycache__", "tests", "*.data"
)
EXTRAS = {
    "cpu": "onnxruntime", "gpu": "onnxruntime-gpu", "torch": "torch", "images": "pillow", "text": "tokenizers", "ray": "ray",
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: a build leaves folders behind, and nobody edits the copy meanwhile."""
    copy = tmp_path_factory.mktemp("source") / "attnquant"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_SOURCE)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building a wheel needs pip and setuptools")
    if int(importlib.metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip(f"building needs setuptools 77, got {importlib.metadata.version('setuptools')}")
    built = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-qq"]
    command = [*pip, "-w", str(built), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = built.glob("attnquant-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode())


def expected_files(source: Path) -> dict[str, Path]:
    """{name in the wheel: file here}; the catalogues lie at the top and are installed inside the package."""
    found = {}
    for folder in ("attnquant", "metatypes", "patterns"):
        home = "attnquant" if folder == "attnquant" else f"attnquant/{folder}"
        for path in (source / folder).rglob("*"):
            relative = path.relative_to(source / folder)
            linked = folder == "attnquant" and relative.parts[0] in ("metatypes", "patterns")
            if not linked and "__pycache__" not in relative.parts and path.suffix in (".py", ".toml", ".typed", ".md"):
                found[f"{home}/{relative.as_posix()}"] = path
    return found


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: zipfile.ZipFile, source: Path) -> None:
    expected = expected_files(source)
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected.keys()
    assert {"attnquant/py.typed", "attnquant/recipes/int8.toml"} <= held
    assert all(wheel.read(name) == path.read_bytes() for name, path in expected.items())


def test_every_folder_of_modules_is_a_listed_package(source: Path) -> None:
    config = configparser.ConfigParser()
    config.read(source / "setup.cfg")
    listed = {name.replace(".", "/") for name in config["options"]["packages"].split()}
    assert {name.rpartition("/")[0] for name in expected_files(source) if name.endswith(".py")} == listed


def test_extras(metadata: Message) -> None:
    requires = metadata.get_all("Requires-Dist") or []
    for extra, package in EXTRAS.items():
        assert any(line.startswith(package) and f'extra == "{extra}"' in line.replace("'", '"') for line in requires), extra
    plain = [line for line in requires if "extra ==" not in line]
    assert not [line for line in plain if line.startswith(("onnxruntime", "torch", "pillow"))]


def test_metadata(metadata: Message, wheel: zipfile.ZipFile) -> None:
    import attnquant

    assert metadata["Version"] == attnquant.__version__
    assert "Apache-2.0" in (metadata["License-Expression"], metadata["License"])
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert metadata["Requires-Python"].replace(" ", "") in (">=3.11,<3.14", "<3.14,>=3.11")
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "attnquant = attnquant.cli:main" in wheel.read(entry).decode()
    assert "[pytest11]\nattnquant = attnquant.pytest_plugin" in wheel.read(entry).decode()


def test_the_catalogues_are_the_same_modules_in_source_and_wheel() -> None:
    """The symlinks make the source tree look as installed, and `metatypes` alone is not importable as a second copy."""
    for name in ("metatypes", "patterns"):
        link = ROOT / "attnquant" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name
