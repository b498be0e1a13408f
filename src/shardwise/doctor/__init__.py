"""Says beforehand what will bite: facts of this machine, its storage, its software and given files; and rules over them.

:mod:`.collect` looks and judges nothing. :mod:`.table` holds every rule: each is a pure function over the facts.
"""
