"""Carries a plan out: from files to tensors and back, counting every byte."""

from .files import FileReader
from .readers import SourceReader

__all__ = ["FileReader", "SourceReader"]
