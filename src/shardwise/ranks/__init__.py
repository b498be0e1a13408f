"""The ranks that work together: how they agree through the store, and how long they wait for each other."""
