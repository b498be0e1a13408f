"""Private names of other packages, in small functions: what each is for, its versions, and what breaks without it.

``torch.py`` modules, tensors, dispatch, optimizers, schedulers, scalers · ``fsdp.py`` FSDP2's groups · ``transformers.py`` ·
``peft.py`` · ``low_bit.py`` torchao, bitsandbytes · ``trainers.py`` accelerate, the HF Trainer, TRL. Importing one imports torch and no other
packages. Tried with torch 2.9-2.14, transformers 5.0-5.24, accelerate 1.11-1.15, peft 0.18-0.21, trl 0.29-1.16.
``tests/meta/test_internals.py`` holds that private names stand here, and lists what stands elsewhere and why:
first of all the methods that the HF Trainer's integration overrides.
"""
