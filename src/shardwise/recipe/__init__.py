"""Recipes: how each wanted tensor is made from stored tensors."""
