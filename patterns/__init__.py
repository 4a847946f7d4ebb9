"""Recognition of attention that is written out in operators: the catalogue of patterns and the walks that find them."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from attnquant.patterns.search import find_decomposed as _find
from attnquant.site import AttentionSite, NearMiss

__all__ = ["find_decomposed"]


def find_decomposed(
    model: ir.Model, feeds: Mapping[str, np.ndarray] | None = None
) -> tuple[list[AttentionSite], list[NearMiss]]:
    """Every attention of the model that is made of a product, a normalisation and a product, in graph order.

    The model is not changed. Q/DQ pairs are looked through. Subgraphs and model-local functions are searched too.

    :param feeds: One input set by input name; used, in one run of ONNX Runtime, only where the graph does not say heads,
        head sizes or scale. Without it those stay None.
    :return: The sites, and for every softmax that is no attention the reason.
    """
    return _find(model, feeds)
