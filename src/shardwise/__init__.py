"""Pretrained weights and training state, in and out of sharded (FSDP2/DTensor) PyTorch models.

docs/architecture.md describes the package's structure.
"""

import typing as _typing
from importlib import import_module as _import_module

from . import errors as errors

if _typing.TYPE_CHECKING:
    from . import handover as handover
    from . import reports as reports
    from .api import *

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "ElasticSampler",
    "FailurePolicy",
    "IOOptions",
    "InMemoryCheckpoints",
    "PreemptionPolicy",
    "ResumableLoader",
    "ShardPolicy",
    "TrainState",
    "TrainingSpec",
    "__version__",
    "clone",
    "configure_storage",
    "convert",
    "copy_checkpoint",
    "declare_part",
    "diff",
    "digest",
    "export_hf",
    "init_weights",
    "iter_full_tensors",
    "load",
    "load_pipeline",
    "load_pretrained",
    "meta_init",
    "plan",
    "progress",
    "restore",
    "save",
    "shard",
    "verify",
]


#: Where the names of :mod:`.api` are defined. Each is imported when it is first used: a process that only saves doesn't wait for
#: what loads, exports and converts, and the command line and its help need no torch.
_HOMES = {
    "Checkpointer": "checkpoint.checkpointer",
    "ElasticSampler": "state.data",
    "FailurePolicy": "checkpoint.run",
    "IOOptions": "planning.plan",
    "InMemoryCheckpoints": "checkpoint.take",
    "PreemptionPolicy": "ranks.stop",
    "ResumableLoader": "state.data",
    "ShardPolicy": "sharding.fsdp",
    "TrainState": "state.optimizer",
    "TrainingSpec": "fit.records",
    "clone": "loading.initialize",
    "configure_storage": "storage.records",
    "convert": "runs.convert",
    "copy_checkpoint": "publish.copy",
    "declare_part": "sharding.declared",
    "diff": "runs.diff",
    "digest": "digests",
    "export_hf": "export.hub",
    "init_weights": "loading.initialize",
    "iter_full_tensors": "export.hub",
    "load": "loading.load",
    "load_pipeline": "loading.pipelines",
    "load_pretrained": "loading.pretrained",
    "meta_init": "models.meta",
    "plan": "fit.plan",
    "progress": "operations.operation",
    "restore": "runs.run",
    "save": "checkpoint.checkpointer",
    "shard": "sharding.fsdp",
    "verify": "checkpoint.verify",
}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used."""
    if name in ("handover", "reports"):
        return _import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(_import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
