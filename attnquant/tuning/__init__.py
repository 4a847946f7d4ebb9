"""Choices by measurement on calibration samples: what to keep float so that a bound on the accuracy or the speed holds."""

from attnquant.tuning.judge import Judge
from attnquant.tuning.parts import Part, parts_of
from attnquant.tuning.search import Kept, Repair, repair, sentence

__all__ = ["Judge", "Kept", "Part", "Repair", "parts_of", "repair", "sentence"]
