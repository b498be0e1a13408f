"""Real ranks for tests: a pool of persistent workers, and launches of fresh ones that may be killed."""
