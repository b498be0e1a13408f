"""The command line: parse, call, render. The command ``shardwise`` runs ``main``."""

from .commands import main

__all__ = ["main"]
