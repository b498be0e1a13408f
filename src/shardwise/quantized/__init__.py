"""Quantized sources: their formats, found by config and tensors, and decoded by boxes."""
