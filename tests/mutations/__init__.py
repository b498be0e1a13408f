"""Seeded mutations: small realistic errors in ``src/shardwise``, each with tests of ``make test`` that must catch it."""
