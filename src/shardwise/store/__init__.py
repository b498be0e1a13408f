"""Durable files: positioned writes, slice files, locks, directories that appear whole."""
