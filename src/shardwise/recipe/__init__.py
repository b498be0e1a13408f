"""Recipes: how every wanted tensor is made from stored ones."""
