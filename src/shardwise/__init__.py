"""shardwise."""
