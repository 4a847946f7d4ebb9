"""Which NNCF releases the seams were written and tested for."""

import importlib.metadata

from attnquant.errors import HostError

SUPPORTED: tuple[tuple[int, int], ...] = ((3, 3), (3, 4))


def installed() -> str:
    """The installed NNCF version.

    :raises HostError: NNCF is not installed.
    """
    try:
        return importlib.metadata.version("nncf")
    except importlib.metadata.PackageNotFoundError as error:
        msg = "NNCF is not installed: expected nncf 3.3 or 3.4. Install it with `pip install 'nncf>=3.3,<3.5'`."
        raise HostError(msg) from error


def require_supported() -> str:
    """The installed NNCF version, if the seams fit it.

    :raises HostError: the version is unknown; nothing has been changed.
    """
    version = installed()
    major_minor = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if major_minor not in SUPPORTED:
        known = " and ".join(".".join(map(str, pair)) for pair in SUPPORTED)
        msg = f"NNCF {version} is not supported: expected {known}. Install one with `pip install 'nncf>=3.3,<3.5'`."
        raise HostError(msg)
    return version
