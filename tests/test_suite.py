"""Regression suites: what the file may hold, what counts as worse, the pytest plugin run by pytest, and the command."""

import importlib.metadata
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from attnquant import suite
from attnquant.account import installed_versions
from attnquant.cli import main
from attnquant.errors import DataError, VerificationError
from attnquant.report import render
from attnquant.suite import Entry, Figures, Metric, Pair, Recorded, document, judge, pages
from attnquant.suite.values import short
from tests import tinymodels

pytest_plugins = ["pytester"]
Capture = pytest.CaptureFixture[str]

PAGE = (Path(__file__).parents[1] / "docs" / "suites.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLE, WORDS = (text for language, text in BLOCKS if language == "python")
PLUGIN = ("-p", "attnquant.pytest_plugin", "-p", "no:cacheprovider")


def spoiled(model: onnx.ModelProto, noise: float) -> onnx.ModelProto:
    """The model with noise on its weights: a quantized form of known badness."""
    other, rng = onnx.ModelProto(), np.random.default_rng(3)
    other.CopyFrom(model)
    for tensor in other.graph.initializer:
        array = numpy_helper.to_array(tensor)
        off = noise * rng.standard_normal(array.shape).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array + off, tensor.name))
    return other


def folder_of(path: Path, noise: float = 0.01) -> Path:
    """model.onnx, model.int8.onnx and samples with labels, those of the float model."""
    model = tinymodels.linear()
    onnx.save(model, path / "model.onnx")
    onnx.save(spoiled(model, noise), path / "model.int8.onnx")
    (path / "samples").mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for index in range(3):
        x = rng.standard_normal((4, tinymodels.WIDTH)).astype(np.float32)
        np.savez(path / "samples" / f"{index}.npz", x=x, label=tinymodels.run(model, {"x": x})[0].argmax(-1))
    return path


def snr_by_hand(folder: Path) -> float:
    """10 log10(sum x^2 / sum (x - y)^2) over all samples."""
    signal = error = 0.0
    for file in (folder / "samples").glob("*.npz"):
        x, names = np.load(file)["x"], ("model.onnx", "model.int8.onnx")
        one, two = (tinymodels.run(str(folder / name), {"x": x})[0].astype(float) for name in names)
        signal, error = signal + (one**2).sum(), error + ((one - two) ** 2).sum()
    return float(10 * np.log10(signal / error))


# ---- the plugin ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder_of(pytester.path)
    return pytester


def toml(folder: Path) -> dict[str, dict[str, object]]:
    return tomllib.loads((folder / "attnquant-suite.toml").read_text())


def test_the_example_of_the_page(project: pytest.Pytester, capsys: Capture) -> None:
    """As a reader would: record, pass, run the command; then the quantized model gets worse."""
    project.makepyfile(test_example=EXAMPLE, metrics=EXAMPLE.partition("def test_")[0])
    lines = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    assert [shlex.split(line)[0] for line in lines] == ["pytest", "pytest", "attnquant"]

    first = project.runpytest(*PLUGIN, *shlex.split(lines[0])[1:])
    first.assert_outcomes(passed=1)
    assert first.ret == pytest.ExitCode.TESTS_FAILED, "fails once"
    first.stdout.fnmatch_lines(["*attnquant-suite.toml was rewritten*This run fails once.", "  added: classifier"])
    entry = toml(project.path)["classifier"]
    assert entry["metrics"]["snr_db"]["quantized"] == pytest.approx(snr_by_hand(project.path), abs=1e-3)  # type: ignore[index]
    assert entry["metrics"]["snr_db"]["float"] == 200  # type: ignore[index]
    assert entry["metrics"]["accuracy"]["float"] == 1  # type: ignore[index]
    assert entry["versions"] == installed_versions()
    assert entry["seed"] == 0

    before = (project.path / "attnquant-suite.toml").read_bytes()
    again = project.runpytest(*PLUGIN)
    again.assert_outcomes(passed=1)
    assert again.ret == 0
    assert (project.path / "attnquant-suite.toml").read_bytes() == before

    folder_of(project.path, noise=0.04)
    worse = project.runpytest(*PLUGIN)
    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines([
        "*attnquant-suite.toml: 2 of 2 metrics fail",
        "*quantized * -* 0.5  WORSE",
        "If this is meant: rerun with pytest --attnquant-update*",
    ])  # fmt: skip
    [shown] = (text for language, text in BLOCKS if language == "text")
    printed = [re.sub(r"[-+.\d]+", "0", line).split() for line in worse.stdout.lines]
    for line in shown.splitlines()[2:7]:
        assert re.sub(r"[-+.\d]+", "0", line).split() in printed, f"the page shows {line!r}"
    assert "Traceback" not in worse.stdout.str()


def test_the_command_on_what_the_page_records(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """With the function by name the entry is complete, and needs no test."""
    text = EXAMPLE.replace("function=accuracy", 'function="metrics.py:accuracy"')
    project.makepyfile(test_example=text, metrics=EXAMPLE.partition("def test_")[0])
    assert project.runpytest(*PLUGIN, "--attnquant-update").ret == 1
    entry = toml(project.path)["classifier"]
    [page] = (tomllib.loads(block) for language, block in BLOCKS if language == "toml")
    assert {key: entry[key] for key in ("float", "quantized", "data", "samples", "provider", "seed")} == {
        key: page["classifier"][key] for key in ("float", "quantized", "data", "samples", "provider", "seed")
    }
    assert entry["metrics"]["accuracy"]["function"] == "metrics.py:accuracy"  # type: ignore[index]
    monkeypatch.chdir(project.path)
    [command] = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines() if "suite run" in line]
    assert main(shlex.split(command)[1:]) == 0
    assert "none worse" in capsys.readouterr().out
    folder_of(project.path, noise=0.04)
    assert main(shlex.split(command)[1:]) == 3
    assert "WORSE" in capsys.readouterr().out


def test_the_other_example_of_the_page(project: pytest.Pytester) -> None:
    project.makepyfile(WORDS)
    assert project.runpytest(*PLUGIN, "--attnquant-update").ret == 1
    assert toml(project.path)["recogniser"]["metrics"] == {
        "word errors": {"float": 0.081, "quantized": 0.084, "tolerance": 0.002, "better": "lower"}
    }
    assert project.runpytest(*PLUGIN).ret == 0
    project.makepyfile(WORDS.replace("0.084", "0.0861"))
    project.runpytest(*PLUGIN).assert_outcomes(failed=1)
    project.makepyfile(WORDS.replace("0.081,", "0.0831,"))
    project.runpytest(*PLUGIN).assert_outcomes(failed=1)  # the float model fell behind


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("quantized_value=0.084", "quantized_value=0.0859", None),
        ("quantized_value=0.084", "quantized_value=0.01", None),
        ("quantized_value=0.084", "quantized_value=float('nan')", "WORSE"),
        ("tolerance=0.002", "tolerance=0.5", "tolerance 0.5 instead of 0.002"),
        ('better="lower"', 'better="higher"', "better 'higher' instead of 'lower'"),
        ('better="lower"', 'better="lower", seed=7', "seed 7 instead of 0"),
        ('"word errors"', '"letters"', "not recorded yet"),
        ('"word errors"', '"letters"', "not measured any more"),
        ('"recogniser"', '"another"', "not recorded yet"),
    ],
)
def test_what_fails_against_a_record(project: pytest.Pytester, old: str, new: str, words: str | None) -> None:
    project.makepyfile(WORDS)
    project.runpytest(*PLUGIN, "--attnquant-update")
    assert old in WORDS
    project.makepyfile(WORDS.replace(old, new))
    result = project.runpytest(*PLUGIN)
    result.assert_outcomes(**({"passed": 1} if words is None else {"failed": 1}))
    assert words is None or words in result.stdout.str()


def test_without_a_record_the_test_fails_and_nothing_is_written(project: pytest.Pytester) -> None:
    project.makepyfile(WORDS)
    result = project.runpytest(*PLUGIN)
    result.assert_outcomes(failed=1)
    assert "not recorded yet" in result.stdout.str()
    assert not (project.path / "attnquant-suite.toml").exists()


def test_updating_keeps_other_entries_and_skips_failed_tests(project: pytest.Pytester) -> None:
    call = 'attnquant_suite.record("{0}", "m", float_value=1, quantized_value={1}, tolerance=0)'
    lines = [f"def test_{name}(attnquant_suite):\n    {call.format(name, 1)}" for name in "abc"]
    project.makepyfile("\n".join(lines))
    project.runpytest(*PLUGIN, "--attnquant-update")
    lines = [f"def test_{name}(attnquant_suite):\n    {call.format(name, 2)}" for name in "abc"]
    project.makepyfile("\n".join([*lines, "    assert False"]))
    result = project.runpytest(*PLUGIN, "--attnquant-update", "-k", "test_a or test_c")
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    found = {name: entry["metrics"]["m"]["quantized"] for name, entry in toml(project.path).items()}  # type: ignore[index]
    assert found == {"a": 2, "b": 1, "c": 1}
    result.stdout.fnmatch_lines(["  replaced: a"])


def test_a_failing_test_says_its_own_failure(project: pytest.Pytester) -> None:
    project.makepyfile(f"{WORDS}    assert 1 == 2, 'its own'\n")
    result = project.runpytest(*PLUGIN)
    result.assert_outcomes(failed=1)
    assert "its own" in result.stdout.str()
    assert "not recorded yet" not in result.stdout.str()


def test_names_are_unique(project: pytest.Pytester) -> None:
    project.makepyfile(f"{WORDS}\n{WORDS.replace('test_words', 'test_again')}")
    result = project.runpytest(*PLUGIN, "--attnquant-update")
    result.assert_outcomes(passed=1, failed=1)
    assert "an entry 'recogniser' already, of test_names_are_unique.py::test_words" in result.stdout.str()


def test_figures_that_are_no_numbers_are_not_recorded(project: pytest.Pytester) -> None:
    project.makepyfile(WORDS.replace("0.084", "float('inf')"))
    result = project.runpytest(*PLUGIN, "--attnquant-update")
    result.assert_outcomes(failed=1)
    assert "the quantized figure is inf" in result.stdout.str()
    assert not (project.path / "attnquant-suite.toml").exists()


def test_models_in_memory_and_data_by_seed(project: pytest.Pytester) -> None:
    """Nothing names them, so only this test can measure them; several metrics of one entry may be recorded beside."""
    project.makepyfile("""
        import numpy as np, onnx

        def samples(seed):
            assert seed == 5
            rng = np.random.default_rng(seed)
            return [{"x": rng.standard_normal((2, 16)).astype(np.float32)} for _ in range(2)]

        def test_it(attnquant_suite):
            one, two = onnx.load("model.onnx"), onnx.load("model.int8.onnx")
            metrics = {"max_abs": 0.1, "cosine": 0.01, "top1": 0.1, "kl": 1}
            attnquant_suite.compare("pair", one, two, samples, metrics=metrics, seed=5)
            attnquant_suite.record("pair", "seconds", float_value=2, quantized_value=1, tolerance=1, better="lower", seed=5)
    """)
    assert project.runpytest(*PLUGIN, "--attnquant-update").ret == 1
    entry = toml(project.path)["pair"]
    assert entry["seed"] == 5
    assert not {"float", "quantized", "data"} & entry.keys()
    metrics: Mapping[str, Mapping[str, object]] = entry["metrics"]  # type: ignore[assignment]
    assert {name: (item["float"], item["better"]) for name, item in metrics.items()} == {
        "max_abs": (0, "lower"), "cosine": (1, "higher"), "top1": (1, "higher"), "kl": (0, "lower"), "seconds": (2, "lower"),
    }  # fmt: skip
    assert project.runpytest(*PLUGIN).ret == 0
    with pytest.raises(DataError, match="Models that a test makes are measured by pytest alone"):
        suite.run_suite(project.path / "attnquant-suite.toml", workers=0)


def test_the_file_may_lie_elsewhere(project: pytest.Pytester) -> None:
    project.makeini("[pytest]\nattnquant_suite_file = figures/quality.toml\n")
    project.mkdir("figures")
    project.makepyfile(WORDS)
    project.runpytest(*PLUGIN, "--attnquant-update")
    assert "recogniser" in (project.path / "figures" / "quality.toml").read_text()


def test_pytest_finds_the_plugin_by_itself(pytester: pytest.Pytester) -> None:
    names = {point.value for package in importlib.metadata.distributions() for point in package.entry_points}
    if "attnquant.pytest_plugin" not in names:
        pytest.skip("attnquant is not installed, or was before it had the plugin")
    result = pytester.runpytest_subprocess("--help")
    result.stdout.fnmatch_lines(["*--attnquant-update*", "*attnquant_suite_file*"])


def test_the_plugin_loads_nothing_heavy(project: pytest.Pytester) -> None:
    project.makepyfile("""
        import sys

        def test_loaded():
            assert not {"numpy", "onnx", "onnxruntime", "nncf", "torch", "typer", "rich"} & sys.modules.keys()
    """)
    project.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)


# ---- the file -----------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(short)
FIGURES = st.builds(Figures, float_value=NUMBERS, quantized_value=NUMBERS)
BETTER = st.sampled_from(["higher", "lower"])
METRICS = st.builds(Metric, tolerance=st.floats(0, 1e9), better=BETTER, function=st.none() | NAMES)
RECORDED = st.builds(Recorded, metric=METRICS, figures=st.none() | FIGURES)
PAIRS = st.builds(Pair, float_model=NAMES, quantized_model=NAMES, data=NAMES, samples=st.integers(1, 9), provider=NAMES)
ENTRIES = st.builds(
    Entry, name=NAMES, seed=st.integers(-9, 9), metrics=st.dictionaries(NAMES, RECORDED, min_size=1, max_size=3),
    pair=st.none() | PAIRS, versions=st.dictionaries(NAMES, NAMES, max_size=2),
)  # fmt: skip


@given(st.lists(ENTRIES, max_size=3, unique_by=lambda entry: entry.name))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]) -> None:
    file = tmp_path_factory.mktemp("suite") / "suite.toml"
    document.write(file, entries)
    assert document.read(file) == {entry.name: entry for entry in entries}


GOOD = '[a]\nseed = 0\nfloat = "m"\nquantized = "q"\ndata = "d"\n[a.metrics.snr_db]\ntolerance = 1\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a", "TOMLDecodeError"),
        ("a = 1", "expected a table, got 1"),
        (GOOD.replace("seed = 0\n", ""), "expected seed"),
        (GOOD.replace("seed = 0", "seed = 1.5"), "seed: expected a whole number, got 1.5"),
        (GOOD.replace("seed = 0", "seed = true"), "seed: expected a whole number, got True"),
        (GOOD.replace('data = "d"\n', ""), "expected all of float, quantized, data"),
        (GOOD.replace("seed = 0", "seed = 0\nsamples = 0"), "samples: expected 1 or more, got 0"),
        (GOOD.replace("seed = 0", "seed = 0\ncolour = 1"), "unknown key 'colour'"),
        (GOOD.replace("tolerance = 1", "better = 'higher'"), "expected a tolerance of 0 or more, got None"),
        (GOOD.replace("tolerance = 1", "tolerance = -1"), "expected a tolerance of 0 or more, got -1"),
        (GOOD.replace("tolerance = 1", "tolerance = nan"), "expected a tolerance of 0 or more, got nan"),
        (GOOD.replace("tolerance = 1", "tolerance = 1\nfloat = 1.0"), "expected both of float and quantized"),
        (GOOD.replace("snr_db", "mine"), 'expected "higher" or "lower", got None'),
        (GOOD.partition("[a.metrics")[0], "at least one"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(DataError, match=re.escape(words)):
        document.read(tmp_path / "suite.toml")


# ---- the command --------------------------------------------------------------------------------------------------------


def test_written_by_hand_and_filled(tmp_path: Path, capsys: Capture) -> None:
    folder_of(tmp_path)
    file = tmp_path / "suite.toml"
    file.write_text(GOOD.replace('"m"', '"model.onnx"').replace('"q"', '"model.int8.onnx"').replace('"d"', '"samples"'))
    assert main(["suite", "run", str(file), "--format", "json"]) == 3
    content = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in content["rows"]] == ["new"]
    assert content["rows"][0]["recorded"] is None
    assert main(["suite", "run", str(file), "--update", "--workers", "0", "--format", "markdown"]) == 3
    assert "was rewritten: 1 metrics" in capsys.readouterr().out
    assert main(["suite", "run", str(file), "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is True
    assert content["rows"][0]["recorded"] == content["rows"][0]["measured"]
    kept = document.read(file)
    document.write(file, [*kept.values(), entry(0.5)])
    assert main(["suite", "run", str(file), "--update", "--workers", "0"]) == 3, "fails once, though nothing is worse"
    assert "measured by pytest alone: e" in capsys.readouterr().out
    assert document.read(file) == {**kept, "e": entry(0.5)}
    assert content["rows"][0]["measured"]["quantized"] == pytest.approx(snr_by_hand(tmp_path), abs=1e-3)


FATAL = """
import os, signal
def accuracy(run, samples): return 1
def fatal(run, samples): os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lost_worker_costs_its_entry_alone(tmp_path: Path, capsys: Capture) -> None:
    folder_of(tmp_path)
    (tmp_path / "metrics.py").write_text(FATAL)
    one = GOOD.replace('"m"', '"model.onnx"').replace('"q"', '"model.int8.onnx"').replace('"d"', '"samples"')
    one = one.replace("snr_db]", "accuracy]") + 'better = "higher"\nfunction = "metrics.py:accuracy"\n'
    file = tmp_path / "suite.toml"
    other = one.replace("[a", "[b").replace(":accuracy", ":fatal")
    file.write_text(one.replace("tolerance", "float = 1.0\nquantized = 1.0\ntolerance") + "\n" + other)
    assert main(["suite", "run", str(file), "--workers", "2", "--format", "json"]) == 3
    rows = {row["entry"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["a"]["status"] == "ok"
    assert rows["b"]["status"] == "missing"
    assert "the worker process ended before it was done" in rows["b"]["remark"]
    text = file.read_text()
    assert main(["suite", "run", str(file), "--update"]) == 3
    assert document.read(file)["b"].metrics["accuracy"].figures is None, "what was lost is not recorded"
    assert text != file.read_text()


def test_ray_gives_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install attnquant[ray])")
    folder_of(tmp_path)
    file = tmp_path / "suite.toml"
    one = GOOD.replace('"m"', '"model.onnx"').replace('"q"', '"model.int8.onnx"').replace('"d"', '"samples"')
    file.write_text(one + "\n" + one.replace("[a", "[b").replace("snr_db", "cosine"))
    found = [suite.run_suite(file, executor=name, workers=2) for name in ("local", "ray")]
    assert found[0].rows == found[1].rows
    assert [row.entry for row in found[0].rows] == ["a", "b"]


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/hostname", "", "link.onnx", "absent.onnx"])
@pytest.mark.parametrize("key", ["m", "q", "d"])
def test_paths_stay_in_the_folder(tmp_path: Path, key: str, name: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    folder_of(folder)
    folder_of(tmp_path)
    (folder / "link.onnx").symlink_to(tmp_path / "model.onnx")
    names = {"m": "model.onnx", "q": "model.int8.onnx", "d": "samples"} | {key: name}
    text = GOOD
    for letter, path in names.items():
        text = text.replace(f'"{letter}"', json.dumps(path))
    (folder / "suite.toml").write_text(text)
    with pytest.raises(DataError, match="does not exist" if name == "absent.onnx" else "inside the folder"):
        suite.run_suite(folder / "suite.toml", workers=0)


def test_absolute_paths_are_refused_inside_the_folder_too(tmp_path: Path) -> None:
    folder_of(tmp_path)
    text = GOOD.replace('"m"', json.dumps(str(tmp_path / "model.onnx")))
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(DataError, match="inside the folder"):
        suite.run_suite(tmp_path / "suite.toml", workers=0)


@pytest.mark.parametrize(("metric", "worst"), [("snr_db", min), ("cosine", min), ("max_abs", max)])
def test_the_worst_output_counts(tmp_path: Path, metric: str, worst: Callable[[list[float]], float]) -> None:
    """y has noise, z is the same in both models; in either order."""
    folder_of(tmp_path)
    for name in ("model.onnx", "model.int8.onnx"):
        model = onnx.load(tmp_path / name)
        model.graph.node.append(onnx.helper.make_node("Identity", ["x"], ["z"]))
        shape = ["batch", tinymodels.WIDTH]
        model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, shape))
        for order in ("yz", "zy"):
            outputs = {output.name: output for output in model.graph.output}
            del model.graph.output[:]
            model.graph.output.extend(outputs[letter] for letter in order)
            onnx.save(model, tmp_path / f"{order}.{name}")
    found = []
    for order in ("yz", "zy"):
        text = GOOD.replace('"m"', f'"{order}.model.onnx"').replace('"q"', f'"{order}.model.int8.onnx"')
        (tmp_path / "suite.toml").write_text(text.replace('"d"', '"samples"').replace("snr_db", metric))
        [row] = suite.run_suite(tmp_path / "suite.toml", workers=0).rows
        assert row.measured is not None
        found.append(row.measured.quantized_value)
    perfect = {"snr_db": 200.0, "cosine": 1.0, "max_abs": 0.0}[metric]
    assert found[0] == found[1] == worst([found[0], perfect]) != perfect


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("../metrics.py:accuracy", "inside the folder"),
        ("os:system", r"expected FILE\.py:function"),
        ("metrics.py", r"expected FILE\.py:function"),
        ("metrics.py:absent", "AttributeError"),
        ("metrics.py:NUMBER", "expected a function"),
        ("metrics.py:words", "to return a number, got 'many'"),
        ("broken.py:accuracy", "SyntaxError"),
    ],
)
def test_functions_are_found_beside_the_file(tmp_path: Path, spec: str, words: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    folder_of(folder)
    for place in (tmp_path, folder):
        functions = "def accuracy(run, samples): return 1\ndef words(run, samples): return 'many'\n"
        (place / "metrics.py").write_text(f"NUMBER = 1\n{functions}")
    (folder / "broken.py").write_text("def (")
    text = GOOD.replace('"m"', '"model.onnx"').replace('"q"', '"model.int8.onnx"').replace('"d"', '"samples"')
    (folder / "suite.toml").write_text(text + f'function = "{spec}"\n')
    with pytest.raises(DataError, match=words):
        suite.run_suite(folder / "suite.toml", workers=0)


def test_data_functions_get_the_seed(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "made.py").write_text(
        "import numpy as np\n"
        "def samples(seed): return [{'x': np.random.default_rng(seed).standard_normal((1, 16)).astype('float32')}]\n"
        "def first(run, samples): return next(iter(samples))['x'][0, 0]\n"
    )
    text = GOOD.replace('"m"', '"model.onnx"').replace('"q"', '"model.int8.onnx"').replace('"d"', '"made.py:samples"')
    (tmp_path / "suite.toml").write_text(text.replace("seed = 0", "seed = 4") + 'function = "made.py:first"\n')
    [row] = suite.run_suite(tmp_path / "suite.toml", workers=0).rows
    assert row.measured is not None
    assert row.measured.float_value == pytest.approx(np.random.default_rng(4).standard_normal(), rel=1e-5)


@pytest.mark.parametrize(
    ("metric", "words"),
    [("equal", "no output has 'equal'"), ("mine", "expected a function"), ("kl", "expected better = 'lower'")],
)
def test_metrics_that_do_not_fit(tmp_path: Path, metric: str, words: str) -> None:
    folder_of(tmp_path)
    text = GOOD.replace('"m"', '"model.onnx"').replace('"q"', '"model.int8.onnx"').replace('"d"', '"samples"')
    (tmp_path / "suite.toml").write_text(text.replace("snr_db", metric) + 'better = "higher"\n')
    with pytest.raises(DataError, match=words):
        suite.run_suite(tmp_path / "suite.toml", workers=0)


# ---- judging ------------------------------------------------------------------------------------------------------------


def entry(quantized: float, *, float_value: float = 1.0, tolerance: float = 0.1, better: judge.Any = "higher") -> Entry:
    figures = Figures(float_value=float_value, quantized_value=quantized)
    metric = Metric(tolerance=tolerance, better=better)
    return Entry(name="e", seed=0, metrics={"m": Recorded(metric=metric, figures=figures)}, versions={"onnx": "1.22"})


@pytest.mark.parametrize(
    ("before", "now", "better", "status"),
    [
        (0.4, 0.3, "higher", "ok"),  # exactly the tolerance: 0.4 - 0.3 is a little more than 0.1 in binary
        (0.9, 0.7999, "higher", "worse"),
        (0.9, 1.0, "higher", "ok"),
        (0.9, 1.01, "higher", "better"),
        (0.9, 1.01, "lower", "worse"),
        (0.9, 0.7, "lower", "better"),
        (0.9, math.nan, "lower", "worse"),
        (0.9, -math.inf, "lower", "worse"),
    ],
)
def test_worse_and_better(before: float, now: float, better: str, status: str) -> None:
    [row] = judge.judged(entry(before, better=better), entry(now, better=better))
    assert row.status == status


def test_a_tolerance_of_zero_holds_for_the_digits_of_the_file() -> None:
    [row] = judge.judged(entry(short(1 / 3), tolerance=0), entry(1 / 3, tolerance=0))
    assert row.status == "ok"


def test_the_float_model_may_not_fall_behind_either() -> None:
    [row] = judge.judged(entry(0.9), entry(0.9, float_value=0.5))
    assert (row.status, row.worse("float"), row.worse("quantized")) == ("worse", True, False)


def test_reports_say_what_changed() -> None:
    rows = judge.judged(entry(0.9), entry(0.5))
    report = suite.SuiteReport(
        file="suite.toml", rows=rows, skipped=("made",), recorded_versions={"onnxruntime": "1.31.1", "onnx": "1.23"},
        versions={"onnxruntime": "1.32.0", "onnx": "1.23"},
    )  # fmt: skip
    assert not report.ok
    for text in (render(report), render(report, "markdown"), pages.difference(report, "x")):
        said = "onnxruntime 1.31.1 -> 1.32.0", "measured by pytest alone: made"
        for words in ("1 of 1 metrics fail", "WORSE", "-0.4", *said):
            assert words in text.replace("\\", ""), text
        assert "onnx 1.23 ->" not in text
    content = json.loads(render(report, "json"))
    assert content["rows"][0] == {
        "entry": "e", "metric": "m", "status": "worse", "recorded": {"float": 1.0, "quantized": 0.9},
        "measured": {"float": 1.0, "quantized": 0.5}, "tolerance": 0.1, "better": "higher", "remark": "",
    }  # fmt: skip
    broken = suite.SuiteReport(file="suite.toml", rows=judge.judged(entry(0.9), entry(math.nan)))
    assert json.loads(render(broken, "json"))["rows"][0]["measured"] == {"float": 1.0, "quantized": None}
    with pytest.raises(ValueError, match="'html'"):
        render(report, "html")


def test_figures_are_checked_before_they_are_kept() -> None:
    with pytest.raises(VerificationError, match="the float figure is nan"):
        Figures(float_value=math.nan, quantized_value=1).rounded("here")
    kept = Figures(float_value=1 / 3, quantized_value=2).rounded("here")
    assert (kept.float_value, kept.quantized_value) == (0.333333, 2)
