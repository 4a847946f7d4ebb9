"""Which sites of a model are meant."""

from collections.abc import Iterable, Sequence

from attnquant.errors import ModelError
from attnquant.site import AttentionSite

Sites = Iterable[str | AttentionSite]


def wanted(sites: Sites | None, found: Sequence[AttentionSite], what: str) -> frozenset[str]:
    """Ids of the chosen sites, all where `sites` is None.

    :raises ModelError: an id that the model does not have.
    """
    known = [site.id for site in found]
    if sites is None:
        return frozenset(known)
    asked = {site if isinstance(site, str) else site.id for site in sites}
    if missing := sorted(asked - set(known)):
        some = ", ".join(repr(item) for item in known[:5])
        msg = f"Site {missing[0]!r}: expected {what} of the model, it has {some or 'none'}. Run `attnquant inspect`."
        raise ModelError(msg)
    return frozenset(asked)
