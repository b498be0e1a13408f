"""Layout: per rank, which boxes of every wanted tensor it holds, and where they lie in local storage."""
