"""Hands the weights of a live model to other programs, version by version: each receiving rank pulls its own slices."""
