"""FSDP2 over a model: which modules become groups, and the gradients of parameters that FSDP2 can't shard."""
