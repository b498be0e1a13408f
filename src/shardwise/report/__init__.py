"""``shardwise report``: a run's steps, ledgers and loss logs as one HTML file that needs nothing else."""
