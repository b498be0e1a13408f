"""Fuzzing of everything that reads files, or what other hosts and stores send: ``make fuzz``, or ``python -m tests.fuzz --help``.

Inputs are real files with mutations that know their structure (JSON values, pickle opcodes, zip members, headers), made
from a seed, a target's name and a number, so that any of them can be made again. They run in process, in a forked child
that a parent watches: see :mod:`tests.fuzz.guard` for what counts as a finding.
"""
