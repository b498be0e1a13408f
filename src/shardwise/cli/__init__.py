"""The command line: parse, call, render. The command ``shardwise`` runs ``main``."""

from . import doctor as doctor  # adds its command
from .commands import main

__all__ = ["main"]
