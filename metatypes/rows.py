"""Shorthand for writing rows of the catalogue: ports in published order, numbered as they come."""

from dataclasses import replace

from attnquant.roles import PortRole, PortSpec

QUERY, KEY, VALUE = PortRole.QUERY, PortRole.KEY, PortRole.VALUE
QK = (QUERY, KEY)
"""The roles that the default policy quantizes wherever Q and K have ports of their own."""


def need(name: str, role: PortRole | None = None, *shares: PortRole) -> PortSpec:
    """A required port; `shares` are further roles that the same tensor holds."""
    return PortSpec(index=-1, name=name, role=role, shares=shares)


def may(name: str, role: PortRole | None = None, *shares: PortRole, since: int = 1, release: str = "") -> PortSpec:
    """An optional port; `since` and `release` as in PortSpec."""
    return PortSpec(index=-1, name=name, role=role, shares=shares, since=since, optional=True, release=release)


def ports(*specs: PortSpec) -> tuple[PortSpec, ...]:
    """The ports numbered in the order given, which is the published one."""
    return tuple(replace(spec, index=index) for index, spec in enumerate(specs))
