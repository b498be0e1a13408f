"""Storing: writing files, making them durable, publishing a directory all at once, retention."""
