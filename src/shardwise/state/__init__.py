"""Training state other than weights: optimizers, schedulers, scalers, data positions and extras."""
