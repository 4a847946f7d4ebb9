"""The runtime against the specification: cases of attention operators, oracles in numpy, and who deviates.

`conformance()` runs the suite; `oracle.attention` is the standard it is held to; docs/conformance.md has the results.
"""

from attnquant.conformance.results import CaseResult, ConformanceReport
from attnquant.conformance.run import conformance

__all__ = ["CaseResult", "ConformanceReport", "conformance"]
