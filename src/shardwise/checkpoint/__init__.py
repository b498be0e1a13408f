"""One training state in and out of one directory: save, restore, verify, and the Checkpointer of a run."""
