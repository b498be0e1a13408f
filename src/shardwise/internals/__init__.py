"""Private names of other packages that shardwise uses, each with the versions it was tried with."""
