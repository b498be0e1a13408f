"""Pretrained weights and training state, in and out of sharded (FSDP2/DTensor) PyTorch models.

The rooms of the package, and which may import which: docs/architecture.md.
"""

import typing as _typing

from . import errors as errors
from .errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    LayoutError,
    LockedError,
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
    "NoCheckpointError",
    "PlanError",
    "PlanReport",
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
    "load",
    "load_pretrained",
    "meta_init",
    "plan",
    "restore",
    "save",
    "shard",
    "storage_options",
    "verify",
]


def __getattr__(name: str) -> object:
    """Imports all public names when one of them is first used: the command line and its help need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    globals().update({public: getattr(api, public) for public in __all__ if hasattr(api, public)})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
