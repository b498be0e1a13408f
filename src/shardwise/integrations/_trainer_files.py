"""Files that Trainer and its subclasses write beside the weights, for checkpoints and exports."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from safetensors import safe_open

from ..adapters.names import adapter_tensors
from ..errors import CheckpointError, UnsupportedConversionError
from ..export.hub import export_hf
from ..internals.peft import adapter_configs, peft_model
from ..layout.live import describe
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..store.marks import remove_ours
from ..store.publish import make_temporary

__all__ = [
    "ADAPTER",
    "FULL",
    "adapter_files",
    "add_beside",
    "drop_empty_weights",
    "gathered",
    "into_model",
    "overrides",
    "read_all",
    "save_processing",
    "without_fsdp",
]

_log = logging.getLogger(__name__)
#: Weights in hub format, of either kind.
FULL = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
#: Small files are held in memory on their way into a checkpoint.
MAX_FILES_BYTES = 2 * 1024**3


def overrides(cls: type, base: type, name: str) -> bool:
    """Whether a class after the mixin ``base`` in the method resolution order overrides a method of ``base``'s base."""
    order = cls.__mro__
    behind = order[order.index(base) + 1 :]
    return next(k for k in behind if name in vars(k)) is not next(
        k for k in base.__mro__[1:] if name in vars(k)
    )


@contextmanager
def without_fsdp(trainer: Any) -> Iterator[None]:
    """Hide FSDP from Trainer, which would gather the model for its ``_save``, or not call it. We write the weights."""
    was, trainer.is_fsdp_enabled = trainer.is_fsdp_enabled, False
    try:
        yield
    finally:
        trainer.is_fsdp_enabled = was


def drop_empty_weights(folder: str) -> None:
    """Delete weight files of Trainer's ``_save`` without tensors; files with tensors stay."""
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            if name.endswith(".safetensors") and (FULL.fullmatch(name) or ADAPTER.fullmatch(name)):
                with safe_open(path, "pt") as file:
                    is_empty = not list(file.keys())
                if is_empty:
                    patiently(os.unlink, path)


def read_all(folder: str) -> dict[str, bytes]:
    """Every file below a folder, by relative path. Raises :class:`CheckpointError` above 2 GiB."""
    found: dict[str, bytes] = {}
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    total = sum(map(os.path.getsize, paths))
    if total > MAX_FILES_BYTES:
        raise CheckpointError(
            f"{folder}: save_model or _save wrote {total} bytes next to the weights, the limit is {MAX_FILES_BYTES}: write "
            f"large files in a callback's on_save, elsewhere"
        )
    for path in paths:
        with open(path, "rb") as file:
            found[os.path.relpath(path, folder).replace(os.sep, "/")] = file.read()
    return found


def gathered(ranks: Ranks, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of all ranks on rank 0 (for equal names the lowest rank's); none on other ranks. Collective."""
    found = dict(files) if ranks.rank == 0 else {}
    own = None if ranks.rank == 0 else dict(files)  # rank 0 has its own already
    for of_rank in ranks.gather("files next to the weights", own) or ():
        for name, content in (of_rank or {}).items():
            found.setdefault(name, content)
    return found


def adapter_files(model: Any, run_dir: str | None, ranks: Ranks) -> dict[str, bytes]:
    """The files of a ``PeftModel``'s adapters, as PEFT reads them, on rank 0; none for other models. Collective.

    Gathers them through a temporary folder in ``run_dir``, which all ranks must see; there are none without it, with a warning. Adapters that PEFT computes when it stores them (prompt and
    prefix tuning) have no files, with a warning: the checkpoint holds them as the model does.
    """
    if peft_model(model) is None:
        return {}
    refused = ranks.combine(
        "look at the adapters", lambda: _refused(model), lambda found: next(filter(None, found), None)
    )
    if run_dir is None:
        refused = refused or "no directory is seen by all hosts (local=True); export them by save_model"
    if refused is not None or run_dir is None:
        if ranks.rank == 0:
            _log.warning("the checkpoint has no copy of the adapters for PEFT: %s", refused)
        return {}

    unfinished = ranks.on_first(
        "make room for the adapter", lambda: make_temporary(os.path.join(run_dir, "adapter"), ())
    )
    folder = os.path.join(unfinished, "files")
    try:
        report = export_hf(model, folder)
        with ranks.agree("read adapter"):
            if ranks.rank == 0 and report.total_bytes > MAX_FILES_BYTES:
                _log.warning(
                    "adapters have %d bytes: the checkpoint has no copy for PEFT", report.total_bytes
                )
            elif ranks.rank == 0:
                return read_all(folder)
    finally:
        if ranks.rank == 0:
            remove_ours(unfinished)
    return {}


def _refused(model: Any) -> str | None:
    """Why the adapters have no files for PEFT; None if they have. Rank-local."""
    try:
        live = describe(model)
        for adapter in adapter_configs(model):
            adapter_tensors(live, adapter)
    except UnsupportedConversionError as error:
        return str(error)
    return None


def save_processing(processing: Any) -> dict[str, bytes]:
    """The files that a tokenizer or processor saves, by relative path; none for None."""
    if processing is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        processing.save_pretrained(folder)
        return read_all(folder)


def into_model(folder: str, files: Collection[str]) -> None:
    """Move ``files`` from the top of a checkpoint into its ``model/``, where exports look; the save links them back."""
    for name in files:
        if os.path.isfile(source := os.path.join(folder, name)):
            target = os.path.join(folder, "model", name)
            patiently(os.makedirs, os.path.dirname(target), exist_ok=True)
            patiently(os.replace, source, target)
    for name in sorted({os.path.dirname(name) for name in files} - {""}, reverse=True):
        with contextlib.suppress(OSError):  # another class's files may be there, too
            os.rmdir(os.path.join(folder, name))


def add_beside(folder: str, files: Mapping[str, bytes]) -> None:
    """Add files to an export without replacing its weights, configs and code."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        is_its_own = name.endswith((".py", ".safetensors", ".index.json")) or name in _CONFIGS
        if not (is_its_own and os.path.exists(path)):
            patiently(os.makedirs, os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
