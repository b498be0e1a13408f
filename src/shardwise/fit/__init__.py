"""What each phase of a run takes, for any number of ranks: load, step, save, resume, export; and whether it fits.

Numbers come from the groups that FSDP2 would make, from the tensors that each rank would hold, and from a run of the model on
tensors without memory. No weights, no GPU and no process group are needed.
"""
