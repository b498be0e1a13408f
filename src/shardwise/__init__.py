"""Pretrained weights and training state, in and out of sharded (FSDP2/DTensor) PyTorch models.

Package map, from the bottom up::

    errors, dtypes, names, dist, _compat     words that everything else uses
    catalog/   what a source holds            layout/   which boxes each rank wants
    recipe/    how wanted is made of stored   plan/     reads, their cost, proof of cover
    read/      positioned reads               place/    memory and copies into live tensors
    proof/     digests, stored checkpoints    state/    optimizer, RNG, data ↔ named tensors, typed JSON
    store/     write, publish, retain
    groups, planner                           which modules become FSDP2 groups; plans for absent ranks
    loading, pretrained, parallelize, checkpoint, restoring, export, full, cloning    one story per entry point
    cli/, demo/                               on top
"""

from .checkpoint import Checkpointer, restore, save
from .cloning import clone
from .export import export_hf
from .full import iter_full
from .loading import load
from .parallelize import ShardPolicy, shard
from .place.initialize import initialize
from .place.meta_init import meta_init
from .plan.records import IOOptions
from .pretrained import load_pretrained
from .proof.model import digest
from .proof.stored import verify
from .state.data import ResumableLoader
from .state.sampler import ElasticSampler
from .state.train_state import TrainState

__all__ = [
    "Checkpointer",
    "ElasticSampler",
    "IOOptions",
    "ResumableLoader",
    "ShardPolicy",
    "TrainState",
    "clone",
    "digest",
    "export_hf",
    "initialize",
    "iter_full",
    "load",
    "load_pretrained",
    "meta_init",
    "restore",
    "save",
    "shard",
    "verify",
]
