"""Training state beside the weights: optimizer, schedulers, scaler, data position, extras.

* ``typed_json``: any state of schedulers, scalers, loaders as plain JSON, with tensors in a separate mapping.
* ``data``: a loader whose position can be stored and resumed in the middle of an epoch; ``replay``: how, in general.
* ``sampler``: a sampler whose order and position do not depend on the number of ranks.
* ``schedulers``: inner schedulers, and the functions that a scheduler's state leaves out.
* ``gradients``: gradients that wait for an optimizer step.
"""
