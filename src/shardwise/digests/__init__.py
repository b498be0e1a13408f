"""Fingerprints of bytes and of live models, the same under every sharding."""
