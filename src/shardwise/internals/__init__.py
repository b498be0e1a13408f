"""Private names of other packages, in small functions: what each is for, the versions it was tried with, what breaks without it.

``torch.py`` modules, tensors, dispatch · ``optim.py`` optimizers, schedulers, scalers · ``fsdp.py`` FSDP2's groups ·
``transformers.py`` · ``accelerate.py`` · ``peft.py`` · ``trl.py``. Importing one imports torch and no other
packages. ``tests/meta/test_internals.py`` holds that private names stand here, and lists what stands elsewhere and why:
first of all the methods that the HF Trainer's integration overrides.
"""
