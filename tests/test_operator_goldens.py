"""One golden an attention operator: a model in ONNX text, under comments that say what is recognised in it.

A new operator needs its row in metatypes/ and tests/golden/operators/DOMAIN.OP.onnxtxt with a model in which the operator is
node "attn"; `pytest --regen-goldens` adds the comments, to be read before they are committed.
"""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from attnquant.metatypes import CATALOGUE
from attnquant.recognition import recognize
from attnquant.site import AttentionSite

FOLDER = Path(__file__).parent / "golden" / "operators"
ROWS = {f"{row.domain}.{row.op_type}": row for row in CATALOGUE.values() if row.family == "attention"}


def model_of(text: str) -> onnx.ModelProto:
    """The model of a golden; what it declares and does not make is a weight of zeros."""
    model = onnx.parser.parse_model(text)
    made = {name for node in model.graph.node for name in node.output} | {value.name for value in model.graph.input}
    for value in [value for value in model.graph.value_info if value.name not in made]:
        kind = value.type.tensor_type
        zeros = np.zeros([dim.dim_value for dim in kind.shape.dim], helper.tensor_dtype_to_np_dtype(kind.elem_type))
        model.graph.initializer.append(numpy_helper.from_array(zeros, value.name))
        model.graph.value_info.remove(value)
    return model


def described(site: AttentionSite) -> list[str]:
    """Every field of a site that has not its default, one comment a line; ports by role."""
    lines = []
    for field in dataclasses.fields(site):
        value = getattr(site, field.name)
        if value == field.default:
            continue
        if field.name in ("ports", "branch"):
            edges = sorted(value.items())
            lines += [f"# {field.name}.{role} = {port.node}[{port.index}] {port.tensor}" for role, port in edges]
        else:
            lines.append(f"# {field.name} = {value!r}")
    return lines


def body_of(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"


@pytest.mark.parametrize("name", ROWS)
def test_operator_is_recognised_as_its_golden_says(name: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{name}.onnxtxt"
    text = path.read_text()
    recognition = recognize(model_of(text))
    assert [(site.node, site.form.partition("@")[0]) for site in recognition.sites] == [("attn", name_to_form(name))]
    assert recognition.near_misses == ()
    made = "\n".join([*described(recognition.sites[0]), body_of(text)])
    if request.config.getoption("--regen-goldens") and made != text:
        path.write_text(made)
        pytest.fail(f"{path} is written anew: read it, then run again without --regen-goldens")
    assert text == made


def name_to_form(name: str) -> str:
    domain, _, op_type = name.rpartition(".")
    return f"{domain}::{op_type}"


def test_every_golden_belongs_to_a_row() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(ROWS)
