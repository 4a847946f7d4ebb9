"""`make bench`: what can be measured here, and the command for each."""

import ast
from pathlib import Path


def main() -> None:
    """Print every module of this folder that can be run, with the first line of its docstring."""
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            print(f"python -m benchmarks.{path.stem:<16} {summary}")


if __name__ == "__main__":
    main()
