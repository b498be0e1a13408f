"""Hub directories and full tensors out of sharded models and stored checkpoints."""
