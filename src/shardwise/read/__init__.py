"""Reading: positioned reads from files into memory. Counts every byte it asks for."""

from .files import FileReader

__all__ = ["FileReader"]
