"""Fingerprints of content, the same under every sharding: of bytes, and of live models."""
