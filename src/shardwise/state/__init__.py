"""Training state beside the weights: typed JSON, random generators, data position.

* ``typed_json``: any state of schedulers, scalers, loaders as plain JSON, with tensors kept aside.
* ``rng``: capture, restore and derive the state of every random generator.
* ``data``: a loader whose position can be stored and resumed in the middle of an epoch; ``replay``: how, in general.
* ``sampler``: a sampler whose order and position do not depend on the number of ranks.
* ``schedulers``: what they leave out of their state.
* ``gradients``: those that wait for an optimizer step.
"""
