"""Real launchers, each run for real: `python -m tests.launchers.table` runs them and prints a table with versions."""
