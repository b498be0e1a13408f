"""Charts of the site: what they show is measured and committed, and `python -m benchmarks.charts` draws them from it."""
