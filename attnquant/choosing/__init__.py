"""Ranges by measurement: the range estimator and SmoothQuant's strength that bring a model closest to the float one."""

from attnquant.choosing.choice import Choice, choose
from attnquant.choosing.search import Outcome, Setting, Trial, search
from attnquant.choosing.words import sentence

__all__ = ["Choice", "Outcome", "Setting", "Trial", "choose", "search", "sentence"]
