"""Fills a model from a catalog: load, load_pretrained, init_weights, clone, and plans for any number of ranks."""
