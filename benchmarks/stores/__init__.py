"""Parts of ``benchmarks/store.py``: the store, and saves into it."""
