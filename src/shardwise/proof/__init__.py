"""Proof that what was loaded or stored is what it should be: digests, coverage, reports."""
