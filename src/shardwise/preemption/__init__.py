"""A run that its scheduler stops: signals that only set a flag, and the one call at which all ranks stop together."""
