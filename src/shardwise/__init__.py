"""Pretrained weights and training state, in and out of sharded (FSDP2/DTensor) PyTorch models.

The rooms of the package, and which may import which: docs/architecture.md.
"""

import typing as _typing
from importlib import import_module as _import_module

from . import errors as errors
from .errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    LayoutError,
    LockedError,
    LowSpaceError,
    NoCheckpointError,
    PlanError,
    RankError,
    ShardError,
    ShardwiseError,
    SourceError,
    StateError,
    UnsupportedConversionError,
    VersionError,
)

if _typing.TYPE_CHECKING:
    from .api import *

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "ConvertReport",
    "CopyReport",
    "DiffReport",
    "ElasticSampler",
    "ExportReport",
    "FormatError",
    "IOOptions",
    "IntegrityError",
    "LayoutError",
    "LoadReport",
    "LockedError",
    "LowSpaceError",
    "MemoryTier",
    "NoCheckpointError",
    "PlanError",
    "PlanReport",
    "Progress",
    "RankError",
    "ResumableLoader",
    "ResumeReport",
    "SaveReport",
    "ShardError",
    "ShardPolicy",
    "ShardwiseError",
    "SourceError",
    "StateError",
    "TrainState",
    "Training",
    "UnsupportedConversionError",
    "VerifyReport",
    "VersionError",
    "__version__",
    "clone",
    "convert",
    "copy",
    "diff",
    "digest",
    "export_hf",
    "initialize",
    "iter_full",
    "ledger",
    "load",
    "load_pretrained",
    "meta_init",
    "plan",
    "progress",
    "restore",
    "save",
    "shard",
    "storage_options",
    "verify",
]


#: Where the names of :mod:`.api` are defined. Each is imported when it is first used: a process that only saves doesn't wait for
#: what loads, exports and converts, and the command line and its help need no torch.
_HOMES = {
    "Checkpointer": "checkpoint.checkpointer",
    "MemoryTier": "memory.options",
    "ConvertReport": "runs.convert",
    "CopyReport": "store.copy",
    "DiffReport": "runs.diff",
    "ElasticSampler": "state.sampler",
    "ExportReport": "export.hub",
    "IOOptions": "planning.records",
    "LoadReport": "loading.report",
    "PlanReport": "phases.report",
    "Progress": "operations.records",
    "ResumableLoader": "state.data",
    "ResumeReport": "checkpoint.resume_report",
    "SaveReport": "checkpoint.save",
    "ShardPolicy": "sharding.fsdp",
    "TrainState": "state.train_state",
    "Training": "phases.training",
    "VerifyReport": "checkpoint.verify",
    "clone": "loading.clone",
    "convert": "runs.convert",
    "copy": "store.copy",
    "diff": "runs.diff",
    "digest": "digests.live",
    "export_hf": "export.hub",
    "initialize": "loading.initialize",
    "iter_full": "export.full",
    "ledger": "ledgers.ledger",
    "load": "loading.load",
    "load_pretrained": "loading.pretrained",
    "meta_init": "models.meta_init",
    "plan": "phases.plan",
    "progress": "operations.listeners",
    "restore": "runs.restore",
    "save": "checkpoint.checkpointer",
    "shard": "sharding.fsdp",
    "storage_options": "storage.options",
    "verify": "checkpoint.verify",
}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(_import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
