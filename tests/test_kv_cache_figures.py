"""The bounds of benchmarks.kv_cache see what they should; binding computes what feeding does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnquant.kvcache import KvCache, KvLayer
from attnquant.verification.decoding import DecodingReport, DecodingStep
from benchmarks import kv_cache_page, runners
from benchmarks.decoding import HEADS, SIZE
from benchmarks.export import SMOLLM2_LAYERS
from benchmarks.kv_cache_page import Row
from benchmarks.profiles import NodeTime
from tests.layeredmodels import DECOMPOSED, decoder, tokens


def cache(width: int, dtype: str) -> KvCache:
    row = KvLayer(
        node="a", past_key="pk", past_value="pv", present_key="k", present_value="v", bits=8, dtype=dtype,
        shape=("batch", HEADS, "positions", width), head_size=SIZE, k_scale=(1.0,), v_scale=(1.0,),
    )  # fmt: skip
    return KvCache(layers=SMOLLM2_LAYERS * (row,), granularity="tensor")


def decoding(float_db: float, quantized_db: float) -> DecodingReport:
    steps = [
        DecodingStep(position=at, float_db=float_db + 9 * (at == -1), quantized_db=quantized_db, error_db=33.0 + at,
                     prefill_error_db=33.0)
        for at in (-2, -1)
    ]  # fmt: skip
    return DecodingReport(steps=tuple(steps), limit_db=60.0)


def took(speedup: float) -> runners.Timing:
    return runners.Timing(float_ms=20.0 * speedup, model_ms=20.0, speedup=speedup, speedup_low=speedup, speedup_high=speedup,
                          work=speedup, pairs=1)  # fmt: skip


def rows() -> list[Row]:
    """Every bound met, hardly."""
    none = Path()
    node = NodeTime(name="n", operator="GroupQueryAttention", ms=7.0, inputs=(), outputs=())
    int8 = Row(
        name="int8 per channel", path=none, cache=cache(SIZE, "int8"), perplexity=20.09, decoding=decoding(90.0, 30.0),
        timings={"float as exported": took(1.5), "float": took(1.0)},
    )  # fmt: skip
    return [
        Row(name="float as exported", path=none),
        Row(name="float", path=none, perplexity=20.0, decoding=decoding(30.0, 90.0), profile=[node]),
        int8,
        Row(name="int4 per channel", path=none, cache=cache(SIZE // 2, "uint8"), perplexity=21.1),
    ]


def test_bounds_that_are_met() -> None:
    assert kv_cache_page.faults(rows()) == []


@pytest.mark.parametrize(
    ("index", "change", "fault"),
    [
        (2, lambda row: replace(row, perplexity=20.11), "int8 per channel: perplexity 1.0055x"),
        (3, lambda row: replace(row, perplexity=21.3), "int4 per channel: perplexity 1.0650x"),
        (3, lambda row: replace(row, perplexity=float("nan")), "int4 per channel: perplexity nan"),
        (1, lambda row: replace(row, decoding=decoding(29.0, 90.0)), "float: a step at 29.0 dB"),
        (2, lambda row: replace(row, decoding=decoding(90.0, 29.0)), "int8 per channel: a step at 29.0 dB"),
        (2, lambda row: replace(row, decoding=None), "int8 per channel: a step at 0.0 dB"),
        (2, lambda row: replace(row, cache=cache(SIZE, "float16")), "int8: 23040 bytes a token, a quarter of 46080"),
        (2, lambda row: replace(row, timings={**row.timings, "float": took(0.9)}), "int8: 0.90x the tokens a second of"),
    ],
)
def test_a_missed_bound_is_named(index: int, change: Callable[[Row], Row], fault: str) -> None:
    found = rows()
    found[index] = change(found[index])
    (sentence,) = kv_cache_page.faults(found)
    assert sentence.startswith(fault)


def test_tables_have_the_figures() -> None:
    text = kv_cache_page.text(rows(), [], windows=20, tokens=10220, context=2048, threads=2)
    lines = text.splitlines()
    assert "| float | 20.000 | 1.0000x | 46,080 | 30.0 |  |" in lines
    assert "| int8 per channel | 20.090 | 1.0045x | 11,520 | 30.0 | 31.0 |" in lines
    assert "| int8 per channel | float as exported | 33.3 | 50.0 | 1.50x (1.50 to 1.50) | 1.50x |" in lines
    assert "| GroupQueryAttention |  | 7.0 (1) |  |  |" in lines


def test_binding_computes_what_feeding_does(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(decoder(DECOMPOSED).SerializeToString())
    feeds, other = tokens(2, past=5, new=1)
    bound = runners.open_bound(path, feeds, threads=1)
    expected = runners.open_onnxruntime(path, threads=1)(feeds)[0]
    for given in (feeds, other, {}):
        (got,) = bound(given)
        np.testing.assert_array_equal(got, expected)
