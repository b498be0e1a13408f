"""Quantized sources: bitwise against the libraries that wrote them, and what is wrong with a source."""
