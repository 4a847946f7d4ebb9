"""Errors of attnquant: each says what was expected, what was got, where, and what to do.

Every error that a user can meet derives from :class:`AttnQuantError`; `exit_code` is what the command line returns for it.
"""

from typing import ClassVar


class AttnQuantError(Exception):
    """Base of every error that attnquant raises on purpose."""

    exit_code: ClassVar[int] = 1


class ModelError(AttnQuantError):
    """The model is broken, inconsistent or not supported; the message names the node or tensor."""


class DataError(AttnQuantError):
    """The calibration or test data do not fit the model."""


class RecipeError(AttnQuantError):
    """The recipe does not parse or asks for something unknown."""


class UnmatchedRuleError(RecipeError):
    """A rule of the recipe matched nothing in this model."""

    exit_code: ClassVar[int] = 2


class PlacementError(AttnQuantError):
    """A quantizer can't be placed where the recipe and the target want it."""


class HostError(AttnQuantError):
    """The installed NNCF, ONNX Runtime or another host does not fit; the message names the seam and the remedy."""


class VerificationError(AttnQuantError):
    """A check of the result failed: it does not load, run, or keep its placement or accuracy."""

    exit_code: ClassVar[int] = 3
