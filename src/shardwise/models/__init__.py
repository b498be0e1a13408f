"""A model without its weights: hub ids, config and class, construction on meta, memory in place, initial values."""
