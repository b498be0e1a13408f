"""The ranks that load or save together: how they agree through the store, and how long they wait for each other."""
