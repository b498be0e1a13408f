"""Stored runs, our own and those of other programs: their contents, restore, convert, diff."""
