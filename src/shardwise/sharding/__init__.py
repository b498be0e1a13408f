"""FSDP2 over a model: which modules become groups, and gradients of what FSDP2 can't shard."""
