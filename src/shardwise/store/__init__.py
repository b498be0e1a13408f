"""Durable files: positioned writes, slice files, directories and objects that appear whole; the line of a run; copies and mirrors."""
