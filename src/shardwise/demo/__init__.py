"""The whole story on real weights: load sharded, train, crash during a save, resume on more ranks, export, use."""
