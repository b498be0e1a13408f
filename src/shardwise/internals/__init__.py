"""What shardwise uses of other packages that those packages keep private, each with the versions it was tried with."""
