"""Pretrained weights and training state, in and out of sharded (FSDP2/DTensor) PyTorch models.

The rooms of the package, and which may import which: docs/architecture.md.
"""

import typing as _typing

from . import errors as errors

if _typing.TYPE_CHECKING:
    from .checkpoint.checkpointer import Checkpointer, save
    from .checkpoint.verify import verify
    from .digests.live import digest
    from .export.full import iter_full
    from .export.hub import export_hf
    from .loading.clone import clone
    from .loading.initialize import initialize
    from .loading.load import load
    from .loading.pretrained import load_pretrained
    from .models.meta_init import meta_init
    from .plan.records import IOOptions
    from .runs.restore import restore
    from .sharding.fsdp import ShardPolicy, shard
    from .state.data import ResumableLoader
    from .state.sampler import ElasticSampler
    from .state.train_state import TrainState

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "ElasticSampler",
    "IOOptions",
    "ResumableLoader",
    "ShardPolicy",
    "TrainState",
    "__version__",
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


def __getattr__(name: str) -> object:
    """The public names come when the first of them is used: the command line and its help need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(_public())
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _public() -> dict[str, object]:
    from .checkpoint.checkpointer import Checkpointer, save
    from .checkpoint.verify import verify
    from .digests.live import digest
    from .export.full import iter_full
    from .export.hub import export_hf
    from .loading.clone import clone
    from .loading.initialize import initialize
    from .loading.load import load
    from .loading.pretrained import load_pretrained
    from .models.meta_init import meta_init
    from .plan.records import IOOptions
    from .runs.restore import restore
    from .sharding.fsdp import ShardPolicy, shard
    from .state.data import ResumableLoader
    from .state.sampler import ElasticSampler
    from .state.train_state import TrainState

    return dict(locals())
