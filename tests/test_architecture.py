"""The one-way order of imports, read from the source: function-level imports count too."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each line may import what stands below it, and what stands on it as long as there is no circle.
ORDER = """
__main__
cli pytest_plugin
report
suite
sources
conformance
seq2seq
verification
check
audit
account
bridge extension
quantization
settling choosing
building
kvcache existing
tuning outliers
host
moments rewrite
emission
validity
account
placement
deviations
recognition
operators
patterns
probe
metatypes
target
exporting
data images text feeds
providers timing measures
pace
dtypes schemas opset runtime
model
arity border collector saving wire protocheck externaldata tensors files executors
recipe
bounds
graph
site
roles
errors terminal markup
"""
RANK = {name: -line for line, names in enumerate(ORDER.split("\n")) for name in names.split()}
PUBLIC = ""  # attnquant/__init__.py names the public API, which is loaded on first use

NNCF_HOME = "host"
RUNTIME_HOMES = {"runtime", "schemas", "conformance", "host"}
OPTIONAL = {"PIL", "nncf", "onnxruntime", "openvino", "ray", "timm", "tokenizers", "torch", "torchvision", "transformers"}
TORCH = {"timm", "torch", "torchvision", "transformers"}
TEXT = {"rich", "typer"}
TEXT_HOMES = {"cli", "report", "terminal"}


def sources() -> dict[str, Path]:
    """{module name: file} of everything that is installed."""
    found = {}
    homes = {"attnquant": "attnquant", "metatypes": "attnquant.metatypes", "patterns": "attnquant.patterns"}
    for folder, package in homes.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder != "attnquant" or parts[0] not in ("metatypes", "patterns"):  # there they are symlinks
                found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def area(module: str) -> str:
    """The name in ORDER: "host" of attnquant.host.run, "" of attnquant itself."""
    return module.partition(".")[2].partition(".")[0]


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at module level) of every import in a file, those for type checkers and in functions included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or _for_type_checkers(function)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node not in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in known else node.module or "", node.lineno, node not in inner


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


SOURCES = sources()
IMPORTS = {module: list(imports(path, SOURCES)) for module, path in SOURCES.items()}


def test_every_module_has_its_place() -> None:
    unplaced = {area(module) for module in SOURCES} - RANK.keys() - {PUBLIC, "recipes"}
    assert not unplaced, f"give these a line in ORDER: {sorted(unplaced)}"


def test_imports_go_one_way() -> None:
    wrong = [
        f"{module}:{line} imports {imported}"
        for module, found in IMPORTS.items()
        for imported, line, _ in found
        if imported.startswith("attnquant.") and area(module) != PUBLIC
        and RANK.get(area(imported), 0) > RANK.get(area(module), 0)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circles() -> None:
    graph = {
        module: {imported for imported, _, _ in found if imported in SOURCES and imported != module}
        for module, found in IMPORTS.items()
        if area(module) != PUBLIC
    }
    for module in graph:
        # A package's own __init__ may name its modules; they import it only implicitly.
        graph[module] -= {module.rpartition(".")[0]}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("packages", "homes"),
    [({"nncf"}, {NNCF_HOME}), ({"onnxruntime"}, RUNTIME_HOMES), (TEXT, TEXT_HOMES), ({"ray"}, {"executors"})],
    ids=["nncf", "onnxruntime", "text", "ray"],
)
def test_packages_stay_in_their_homes(packages: set[str], homes: set[str]) -> None:
    wrong = [
        f"{module}:{line} imports {imported}"
        for module, found in IMPORTS.items()
        for imported, line, _ in found
        if imported.partition(".")[0] in packages and area(module) not in homes
    ]
    assert not wrong, "\n".join(wrong)


def test_optional_and_slow_packages_are_imported_when_needed() -> None:
    """NNCF at the top of a host module is fine: the host's modules are themselves imported when needed."""
    wrong = [
        f"{module}:{line} imports {imported} at module level"
        for module, found in IMPORTS.items()
        for imported, line, top in found
        if top and (package := imported.partition(".")[0]) in OPTIONAL
        and not (area(module) == NNCF_HOME and (package == "nncf" or (package in TORCH and "torch" in module)))
    ]
    assert not wrong, "\n".join(wrong)


def test_bare_catalogues_are_never_imported() -> None:
    assert not [
        (module, imported)
        for module, found in IMPORTS.items()
        for imported, _, _ in found
        if imported.partition(".")[0] in ("metatypes", "patterns")
    ]


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    text = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_nothing_slow() -> None:
    assert not loaded_after("import attnquant; dir(attnquant)") & (OPTIONAL | TEXT | {"numpy", "onnx", "onnx_ir"})


def test_recognition_needs_neither_nncf_nor_a_runtime() -> None:
    assert not loaded_after("import attnquant; attnquant.recognize") & OPTIONAL


def test_importing_the_pipeline_does_not_load_nncf() -> None:
    assert not loaded_after("import attnquant; attnquant.quantize; attnquant.extended") & OPTIONAL


def test_public_names_are_what_they_say() -> None:
    code = """
        import attnquant
        import attnquant.check  # importing a module would hide the function of the same name
        assert callable(attnquant.check), attnquant.check
        for name in attnquant.__all__:
            getattr(attnquant, name)
        assert set(attnquant.__all__) <= set(dir(attnquant))
        try:
            attnquant.nothing_of_that_name
        except AttributeError as error:
            assert "nothing_of_that_name" in str(error)
        else:
            raise AssertionError
    """
    loaded_after("\n".join(line.removeprefix("        ") for line in code.splitlines()))
