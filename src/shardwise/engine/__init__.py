"""Carries a plan out: from files to tensors and back, counting every byte."""
