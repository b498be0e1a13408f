"""The parts of ``benchmarks/load.py``: models, cases, one run, rounds, contracts, output."""
