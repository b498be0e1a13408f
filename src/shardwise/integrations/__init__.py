"""Load, save and export for models of Accelerate, the HF Trainer, TRL and PEFT."""
