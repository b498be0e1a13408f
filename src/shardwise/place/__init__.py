"""Real tensors for a model: construction on meta, materialising in place, initial values, copying shards."""
