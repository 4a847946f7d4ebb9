"""Attention from any form to an operator (`fuse`) and back to plain operators (`expand`)."""

from attnquant.rewrite.expansion import expand
from attnquant.rewrite.fusion import fuse
from attnquant.rewrite.result import RewriteResult, RewriteRow

__all__ = ["RewriteResult", "RewriteRow", "expand", "fuse"]
