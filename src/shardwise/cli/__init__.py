"""The command line: parse, call, render. ``main`` is what the command ``shardwise`` runs."""

from .commands import main

__all__ = ["main"]
