"""The seams: guarded by version and signature, all or nothing, and undone to the last attribute."""

import dataclasses
import importlib
import importlib.metadata
import inspect
from typing import Any

import pytest

from attnquant import extension
from attnquant.errors import HostError
from attnquant.host import seams as seam_module
from attnquant.host import versions
from attnquant.host.onnx_seams import SEAMS
from attnquant.target import parse_target

ALL_SEAMS = (*SEAMS, extension._entry_seam(parse_target(None)))


def touched(seam: seam_module.Seam) -> Any:
    owner: Any = importlib.import_module(seam.module)
    *parents, last = seam.attribute.split(".")
    for part in parents:
        owner = getattr(owner, part)
    return inspect.getattr_static(owner, last)


@pytest.mark.parametrize("seam", ALL_SEAMS, ids=lambda seam: seam.name)
def test_seam_says_why_and_fits(seam: seam_module.Seam) -> None:
    assert len(seam.why) > 40
    before = touched(seam)
    with seam_module.applied([seam]):
        assert touched(seam) is not before
    assert touched(seam) is before


@pytest.mark.parametrize("seam", ALL_SEAMS, ids=lambda seam: seam.name)
def test_changed_signature_names_the_seam_and_changes_nothing(seam: seam_module.Seam) -> None:
    before = [touched(each) for each in ALL_SEAMS]
    broken = dataclasses.replace(seam, parameters=("self", "something_new"))
    others = [each for each in ALL_SEAMS if each is not seam]
    with pytest.raises(HostError, match=seam.name) as caught, seam_module.applied([*others, broken]):
        pass
    assert "something_new" in str(caught.value)
    assert [touched(each) for each in ALL_SEAMS] == before


def test_missing_attribute_names_the_seam() -> None:
    gone = dataclasses.replace(SEAMS[0], attribute="MinMaxQuantization._not_there")
    with pytest.raises(HostError, match=r"attention ignored scope.*_not_there was not found"), seam_module.applied([gone]):
        pass


@pytest.mark.parametrize("version", ["2.19.0", "3.2.0", "3.5.0", "4.0.0"])
def test_unknown_version_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    before = [touched(each) for each in ALL_SEAMS]
    with pytest.raises(HostError, match=version):
        extension.enable()
    assert [touched(each) for each in ALL_SEAMS] == before


def test_missing_host_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(HostError, match="not installed"):
        versions.require_supported()


def test_disable_leaves_every_attribute_as_it_was() -> None:
    before = [touched(each) for each in ALL_SEAMS]
    extension.enable()
    extension.enable("onnxruntime-cpu")
    assert touched(ALL_SEAMS[-1]) is not before[-1]
    extension.disable()
    extension.disable()
    assert [touched(each) for each in ALL_SEAMS] == before


def test_extended_nests_and_survives_errors() -> None:
    before = touched(ALL_SEAMS[-1])
    with extension.extended():
        assert touched(ALL_SEAMS[-1]) is not before
        with pytest.raises(ZeroDivisionError), extension.extended():
            raise ZeroDivisionError
        assert touched(ALL_SEAMS[-1]) is not before, "leaving an inner block must not end the outer one"
    assert touched(ALL_SEAMS[-1]) is before
