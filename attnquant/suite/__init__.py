"""Regression suites: figures of float and quantized models in one TOML, held against what is measured now (docs/suites.md).

`run_suite` is what `attnquant suite run FILE.toml` calls; `attnquant.pytest_plugin` has the fixture `attnquant_suite`.
"""

from attnquant.suite.judge import Row, SuiteReport
from attnquant.suite.run import run_suite
from attnquant.suite.values import Entry, Figures, Metric, Pair, Recorded

__all__ = ["Entry", "Figures", "Metric", "Pair", "Recorded", "Row", "SuiteReport", "run_suite"]
