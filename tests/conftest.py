"""Options shared by all tests."""

import pytest
from hypothesis import settings

settings.register_profile("attnquant", deadline=None)
settings.load_profile("attnquant")


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "write the goldens anew, and fail so that they are read before use"
    parser.addoption("--regen-goldens", action="store_true", help=help_text)
