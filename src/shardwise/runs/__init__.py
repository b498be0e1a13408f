"""Stored runs, whoever wrote them: what they hold, restore, convert, diff."""
