"""PEFT's adapters in sharded models: their names, their files, their initial values."""
