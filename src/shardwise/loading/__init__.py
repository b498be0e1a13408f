"""Fills a model from a catalog: load, load_pretrained, initialize, clone, and the plan for ranks that are not there."""
