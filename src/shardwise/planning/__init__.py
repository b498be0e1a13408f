"""Plans: frozen lists of reads, with their cost and a proof of cover. Pure: no CUDA, no collectives, no payload."""

from .build import build_plan
from .records import IOOptions, Plan, Transfer

__all__ = ["IOOptions", "Plan", "Transfer", "build_plan"]
