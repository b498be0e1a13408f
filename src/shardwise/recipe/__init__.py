"""Recipes: how every wanted tensor is made of stored ones."""
