"""Fills a model from a catalog: load, load_pretrained, initialize, clone, and plans for any number of ranks."""
