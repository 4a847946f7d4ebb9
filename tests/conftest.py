"""Options shared by all tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "write the goldens anew, and fail so that they are read before use"
    parser.addoption("--regen-goldens", action="store_true", help=help_text)
