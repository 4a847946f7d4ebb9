"""The vocabulary of attention ports. No third-party import: everything else may depend on it."""

from enum import StrEnum


class PortRole(StrEnum):
    """What a tensor means to an attention; the same words are used in Python, TOML and JSON."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    SCORES = "scores"
    """Q K^T, scaled, before mask and softmax."""
    PROBABILITIES = "probabilities"
    """Softmax output P."""
    CONTEXT = "context"
    """P V, the attention's result."""
    MASK = "mask"
    PAST_KEY = "past_key"
    PAST_VALUE = "past_value"
    PRESENT_KEY = "present_key"
    PRESENT_VALUE = "present_value"
