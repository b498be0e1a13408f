"""Finds known problems before a run: facts about the machine, storage, software and given files, and rules over them."""
