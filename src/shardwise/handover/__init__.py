"""Hands the weights of a live model to other programs, version by version: each receiving rank pulls its own slices."""

from .receiver import WeightReceiver
from .sender import WeightSender

__all__ = ["WeightReceiver", "WeightSender"]
