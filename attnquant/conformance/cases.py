"""The suite: every case by name."""

from functools import cache
from itertools import chain

from attnquant.conformance.case import Case
from attnquant.conformance.cases_contrib import contrib_cases
from attnquant.conformance.cases_grouped import grouped_cases
from attnquant.conformance.cases_standard import standard_cases


@cache
def all_cases() -> dict[str, Case]:
    """{name: case}, in order; the same arrays at every call and in every process."""
    found: dict[str, Case] = {}
    for case in chain(standard_cases(), contrib_cases(), grouped_cases()):
        assert case.name not in found, case.name
        found[case.name] = case
    return found
