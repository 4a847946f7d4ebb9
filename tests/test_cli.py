"""The command line: exit codes, what goes to stdout and what to stderr, and files that are only written when all is well."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tinymodels

import attnquant
from attnquant import cli, quantization, recognition, terminal
from attnquant.cli import main
from attnquant.errors import AttnQuantError, ModelError, UnmatchedRuleError, VerificationError
from attnquant.site import NearMiss, Recognition

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    path = tmp_path / "attention.onnx"
    onnx.save(tinymodels.attention(length=8), path)
    return path


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    path = tmp_path / "linear.onnx"
    onnx.save(tinymodels.linear(), path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "samples"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(4):
        np.savez(folder / f"{index}.npz", x=rng.standard_normal((2, 8, tinymodels.WIDTH)).astype(np.float32))
    return folder


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*args: object, **options: object) -> None:
        raise error

    return function


def python(*code_or_arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code_or_arguments], capture_output=True, text=True, check=False, timeout=120, **options
    )


# ---- exit codes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing-of-that-name"],
        ["inspect"],
        ["inspect", "a.onnx", "b.onnx"],
        ["inspect", "a.onnx", "--format", "xml"],
        ["inspect", "a.onnx", "--no-such-option"],
        ["quantize", "a.onnx", "--samples", "0"],
        ["quantize", "a.onnx", "--samples", "many"],
    ],
)
def test_bad_usage_is_1(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage" in captured.err


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["quantize", "--help"]])
def test_help_is_0(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_help_names_the_commands_that_exist(capsys: Capture) -> None:
    main(["--help"])
    listed = re.findall(r"^│ (\w+) ", capsys.readouterr().out.partition("Commands")[2], re.MULTILINE)
    assert listed == ["inspect", "quantize", "check", "verify", "fuse", "expand", "conformance", "suite"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelError("no node 'a'"), 1), (UnmatchedRuleError("rule 'b'"), 2), (VerificationError("does not load"), 3)],
)
def test_our_errors_have_their_codes(
    error: AttnQuantError, code: int, attention: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(recognition, "recognize", raising(error))
    assert main(["inspect", str(attention)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"attnquant: error: {error}\n"


@pytest.mark.parametrize(
    "content", [None, b"", b"not a model", b"\x08\x07" * 9], ids=["missing", "empty", "text", "truncated"]
)
@pytest.mark.parametrize("command", ["inspect", "check", "quantize"])
def test_bad_models_are_1_with_one_message(command: str, content: bytes | None, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad.onnx"
    if content is not None:
        path.write_bytes(content)
    assert main([command, str(path), *(["--dry-run"] if command == "quantize" else [])]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("attnquant: error: ")
    assert "bad.onnx" in captured.err
    assert "Traceback" not in captured.err


def test_the_unexpected_is_reported_without_a_traceback(
    attention: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(recognition, "recognize", raising(ZeroDivisionError("by zero")))
    assert main(["inspect", str(attention)]) == 1
    err = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: by zero" in err
    assert "Please report it" in err
    assert "Traceback" not in err
    assert main(["inspect", str(attention), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_system_errors_are_1(attention: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(recognition, "recognize", raising(PermissionError(13, "Permission denied", "model.data")))
    assert main(["inspect", str(attention)]) == 1
    assert "Permission denied: 'model.data'" in capsys.readouterr().err


def test_an_interrupt_is_130(attention: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(recognition, "recognize", raising(KeyboardInterrupt()))
    assert main(["inspect", str(attention)]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "attnquant: interrupted\n")


def test_a_reader_that_leaves_is_no_error(attention: Path) -> None:
    code = "import sys; from attnquant.cli import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        command = [sys.executable, "-c", code, "inspect", str(attention)]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# ---- inspect ------------------------------------------------------------------------------------------------------------


def test_inspect_json(attention: Path, capsys: Capture) -> None:
    assert main(["inspect", str(attention), "--format", "json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["model"] == str(attention)
    (site,) = document["sites"]
    assert (site["id"], site["form"], site["status"]) == ("/attention", "ai.onnx::Attention@23", "found")
    assert (site["heads"]["q_heads"], site["heads"]["qk_head_dim"]) == (2, 8)
    assert [site["ports"][role]["tensor"] for role in ("query", "key", "value", "context")] == ["q", "k", "v", "a"]
    assert document["linears"] is None


@pytest.mark.parametrize("format", ["rich", "json", "markdown"])
def test_a_model_without_attention_is_2_and_says_so(
    format: str, linear: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    misses = (NearMiss(nodes=("softmax_7",), reason="no product follows"),)
    monkeypatch.setattr(recognition, "recognize", lambda *args, **options: Recognition(sites=(), near_misses=misses))
    assert main(["inspect", str(linear), "--format", format]) == 2
    out = capsys.readouterr().out
    assert "no product follows" in out
    assert "no attention" in out.lower() if format != "json" else json.loads(out)["sites"] == []


def test_inspect_takes_heads_from_data(attention: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def recognize(model: object, *, feeds: Any = None) -> Recognition:
        seen.append(feeds)
        return Recognition(sites=(), near_misses=())

    monkeypatch.setattr(recognition, "recognize", recognize)
    main(["inspect", str(attention), "--data", str(data)])
    main(["inspect", str(attention)])
    assert [None if feeds is None else {name: array.shape for name, array in feeds.items()} for feeds in seen] == [
        {"x": (2, 8, tinymodels.WIDTH)},
        None,
    ]


# ---- stdout and stderr --------------------------------------------------------------------------------------------------


def test_what_libraries_print_does_not_reach_stdout(
    attention: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def recognize(model: object, *, feeds: object = None) -> Recognition:
        print("INFO:nncf:a banner")
        print("WARNING:nncf:look out")
        print("progress ...", end="")
        return Recognition(sites=(), near_misses=())

    monkeypatch.setattr(recognition, "recognize", recognize)
    main(["inspect", str(attention), "--format", "json"])
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert captured.err == "WARNING:nncf:look out\n"


def modules_after(*arguments: str) -> set[str]:
    code = f"""
import sys
from attnquant.cli import main
code = main({list(arguments)!r})
print(*{{name.partition('.')[0] for name in sys.modules}}, code)
"""
    return set(python("-c", code).stdout.splitlines()[-1].split())


def test_help_and_inspect_are_quick(attention: Path) -> None:
    slow = {"nncf", "torch", "onnxruntime", "openvino", "transformers"}
    assert not modules_after("--help") & slow
    assert not modules_after("inspect", str(attention)) & slow
    assert "onnx" in modules_after("inspect", str(attention))


def test_entry_points(attention: Path) -> None:
    assert python("-m", "attnquant", "--version").stdout == f"attnquant {attnquant.__version__}\n"
    done = python("-m", "attnquant", "inspect", str(attention.with_name("none.onnx")))
    assert done.returncode == 1


def test_files_and_pipes_get_plain_text(attention: Path) -> None:
    done = python("-m", "attnquant", "inspect", str(attention), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 10 * len(str(attention))


@pytest.mark.parametrize(("changes", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_a_terminal_gets_its_width_and_colours(changes: dict[str, str], coloured: bool, attention: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "LINES", "FORCE_COLOR")}
    environment.update({"TERM": "xterm-256color", "COLUMNS": "50", **changes})
    command = [sys.executable, "-m", "attnquant", "inspect", str(attention)]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        text = b""
        while chunk := _read(ours):
            text += chunk
        assert process.wait(timeout=120) == 0
    os.close(ours)
    assert (b"\x1b[" in text) == coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.decode())
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 50
    assert "form Attention@23, kind self" in plain


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux: the other end is closed
        return b""


# ---- quantize and check -------------------------------------------------------------------------------------------------


def test_quantize_writes_a_model_that_check_passes(attention: Path, data: Path, tmp_path: Path, capsys: Capture) -> None:
    before, output = attention.read_bytes(), tmp_path / "int8.onnx"
    assert main(["quantize", str(attention), "--data", str(data), "-o", str(output), "--format", "json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    (site,) = document["sites"]
    assert site["status"] == "quantized"
    assert {role: bool(port["quantized"]) for role, port in site["ports"].items() if role in ("query", "key", "value")} == {
        "query": True,
        "key": True,
        "value": False,
    }
    assert (document["linears"]["int8"], document["linears"]["total"]) == (4, 4)
    assert "attnquant: calibrating" in captured.err
    assert attention.read_bytes() == before

    sample = {"x": np.load(data / "0.npz")["x"]}
    (expected,), (got,) = tinymodels.run(str(attention), sample), tinymodels.run(str(output), sample)
    assert 10 * np.log10(np.sum(expected**2) / np.sum((expected - got) ** 2)) > 25

    assert main(["check", str(output), "--format", "json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in checked["sites"]] == ["quantized"]


def test_check_fails_with_3_on_a_float_model(attention: Path, capsys: Capture) -> None:
    assert main(["check", str(attention)]) == 3
    assert "violates" in capsys.readouterr().out


def test_dry_run_needs_no_data_and_writes_nothing(attention: Path, tmp_path: Path, capsys: Capture) -> None:
    files = set(tmp_path.iterdir())
    assert main(["quantize", str(attention), "--dry-run", "-o", str(tmp_path / "int8.onnx"), "--format", "json"]) == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert (site["status"], site["ports"]["key"]["quantized"]["dtype"]) == ("quantized", "int8")
    assert set(tmp_path.iterdir()) == files


def test_a_model_without_attention_is_quantized_and_the_report_says_so(
    linear: Path, tmp_path: Path, capsys: Capture
) -> None:
    sample, output = tmp_path / "one.npz", tmp_path / "int8.onnx"
    np.savez(sample, x=np.random.default_rng(0).standard_normal((4, tinymodels.WIDTH)).astype(np.float32))
    assert main(["quantize", str(linear), "--data", str(sample), "-o", str(output)]) == 0
    out = capsys.readouterr().out
    assert "No attention was found" in out
    assert "Linears: 1 of 1 int8." in out
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(output).graph.node)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs calibration data"),
        (["--data", "{data}"], "needs a file to write"),
        (["--data", "{data}", "-o", "{model}"], "is the model itself"),
        (["--data", "{data}", "-o", "{data}"], "is read by this command and never changed"),
        (["--data", "{data}", "--recipe", "{recipe}", "-o", "{recipe}"], "is read by this command and never changed"),
        (["--data", "{data}", "-o", "{data}/0.npz"], "is read by this command and never changed"),
        (["--data", "{data}", "-o", "{folder}"], "expected a regular file or a new name, got a folder"),
        (["--data", "{data}", "-o", "{folder}/none/int8.onnx"], "expected an existing folder"),
        (["--data", "{data}", "--max-drop", "top1=2", "-o", "{folder}/int8.onnx"], "a top1 from 0 to 1, got 'top1=2'"),
        (["--data", "{data}", "--images", "{folder}", "-o", "{folder}/int8.onnx"], "expected one source"),
        (["--data", "{data}", "--mean", "0.5", "-o", "{folder}/int8.onnx"], "--mean is for --images"),
        (["--data", "{data}", "--tokenizer", "t", "-o", "{folder}/int8.onnx"], "--tokenizer is for --text"),
        (["--text", "t.txt", "-o", "{folder}/int8.onnx"], "needs --tokenizer"),
        (["--data", "{folder}/none.npz", "-o", "{folder}/int8.onnx"], "none.npz"),
        (["--data", "{data}", "--recipe", "int7", "-o", "{folder}/int8.onnx"], "int7"),
        (["--data", "{data}", "--target", "tpu", "-o", "{folder}/int8.onnx"], "tpu"),
    ],
)
def test_bad_requests_are_1_and_write_nothing(
    arguments: list[str], message: str, attention: Path, data: Path, tmp_path: Path, capsys: Capture
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "int8"\n')
    before, files = attention.read_bytes(), contents(tmp_path)
    filled = [text.format(data=data, model=attention, folder=tmp_path, recipe=recipe) for text in arguments]
    assert main(["quantize", str(attention), *filled]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in " ".join(captured.err.replace("│", "").split())
    assert "calibrating" not in captured.err
    assert (attention.read_bytes(), contents(tmp_path)) == (before, files)


def contents(folder: Path) -> dict[Path, bytes | None]:
    """{path: content} of everything in a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_options_reach_the_library(attention: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def quantize(model: object, feeds: Any, **options: Any) -> None:
        seen.update(options, count=len(list(feeds)))
        raise VerificationError("enough")

    monkeypatch.setattr(quantization, "quantize", quantize)
    asked = ["--recipe", "r.toml", "--target", "openvino@2025.2", "--samples", "7"]
    assert main(["quantize", str(attention), "--data", str(data), "-o", str(tmp_path / "q.onnx"), *asked]) == 3
    assert {name: seen[name] for name in ("recipe", "target", "samples", "count")} == {
        "recipe": "r.toml",
        "target": "openvino@2025.2",
        "samples": 7,
        "count": 4,
    }


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """--images gives what the model takes: its size, layout and name; mean and deviation as asked."""
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    value = onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, ["n", 3, 4, 6])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3, 4, 6])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["pixels"], ["y"], name="relu")], "g", [value], [result])
    onnx.save(tinymodels.made(graph, 17), tmp_path / "m.onnx")
    (tmp_path / "photos").mkdir()
    image.new("RGB", (12, 8), (255, 0, 51)).save(tmp_path / "photos" / "a.png")
    seen: list[dict[str, np.ndarray]] = []

    def quantize(model: object, feeds: Any, **options: object) -> None:
        seen.extend(feeds)
        raise VerificationError("enough")

    monkeypatch.setattr(quantization, "quantize", quantize)
    common = ["quantize", str(tmp_path / "m.onnx"), "--images", str(tmp_path / "photos"), "-o", str(tmp_path / "q.onnx")]
    assert main([*common, "--mean", "0.5", "--std", "0.5,0.25,0.2"]) == 3
    (sample,) = seen
    assert sample["pixels"].shape == (1, 3, 4, 6)
    np.testing.assert_allclose(sample["pixels"][0, :, 0, 0], [1.0, -2.0, -1.5], rtol=1e-6)
    assert main([*common, "--mean", "0.5,0.5"]) == 1
    assert main([*common, "--image-size", "8"]) == 1
    assert "takes 4 x 6 pixels" in capsys.readouterr().err


def test_two_runtimes_at_once_are_explained(
    attention: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(quantization, "quantize", raising(VerificationError("enough")))
    monkeypatch.setattr(cli.quantizing, "installed_versions", lambda: {"onnxruntime": "1", "onnxruntime-gpu": "1"})
    main(["quantize", str(attention), "--data", str(data), "-o", str(tmp_path / "q.onnx")])
    assert "onnxruntime and onnxruntime-gpu are both installed" in capsys.readouterr().err
    monkeypatch.setattr(cli.quantizing, "installed_versions", lambda: {"onnxruntime": "1"})
    main(["quantize", str(attention), "--data", str(data), "-o", str(tmp_path / "q.onnx")])
    assert "both installed" not in capsys.readouterr().err


def test_terminal_of_a_stream_without_encoding() -> None:
    class Stream:
        def isatty(self) -> bool:
            return False

    assert not terminal.detect(Stream()).unicode  # type: ignore[arg-type]


# ---- a bound on the accuracy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "code", "said"),
    [
        ("snr_db=20", 0, "nothing had to stay float"),
        ("snr_db>=60", 0, "times as long"),
        ("snr_db=1000", 3, "at best"),
        ("speed=2", 1, "expected a bound METRIC=VALUE"),
        ("ppl=1.02", 1, "expected an input 'input_ids'"),
    ],
)
def test_max_drop(attention: Path, data: Path, capsys: Capture, bound: str, code: int, said: str) -> None:
    written = attention.with_name("int8.onnx")
    arguments = ["quantize", str(attention), "--data", str(data), "-o", str(written), "--max-drop", bound]
    assert main([*arguments, "--format", "json"]) == code
    captured = capsys.readouterr()
    assert said in " ".join((captured.out + captured.err).split())
    assert written.exists() == (code == 0)
