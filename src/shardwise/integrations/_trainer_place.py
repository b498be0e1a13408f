"""Checks the form of a Trainer's place in the data, in a checkpoint, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..checkpoint.stored_documents import decode_documents, read_documents
from ..errors import FormatError
from ..format.manifest import Manifest
from ..limits import brief, inside, is_count
from ..state.documents import check_rng
from ..state.places import Places

__all__ = ["check_place", "trainer_extra"]

_TRAINER, _DATA = "extra.trainer", "extra.data"
_SHARED = ("global_batch_size", "accumulation", "epoch", "batches", "end_is_due", "seeds")


def check_place(path: str, manifest: Manifest, stem: str) -> dict[str, Any]:
    """The decoded documents of the Trainer in a file of the checkpoint at ``path``: ``state``, or a rank's file.

    Raises :class:`FormatError` naming the file if no :class:`ShardwiseTrainer` can have written it; otherwise as
    :func:`read_documents`. Rank-local; reads that file and the tensors beside it.
    """
    stored = read_documents(path, manifest, stem)
    file = inside(path, f"{stem}.json")
    ours = {name: stored[name] for name in (_TRAINER, _DATA) if name in stored}
    found = decode_documents(ours, file, Places())
    if _TRAINER in found:
        _check_trainer(found[_TRAINER], file)
    if _DATA in found:
        _check_data(found[_DATA], file)
    return found


def trainer_extra(path: str, manifest: Manifest) -> dict[str, Any]:
    """The Trainer's state that all ranks share: batch size, epoch, batches, seeds. Raises as :func:`check_place`."""
    found = check_place(path, manifest, "state")
    if _TRAINER not in found:
        raise FormatError(
            f"holds no {_TRAINER}, which checkpoints of a ShardwiseTrainer have; restore it with shardwise.restore",
            path=inside(path, "state.json"),
        )
    return {key: found[_TRAINER][key] for key in _SHARED if key in found[_TRAINER]}


def _check_trainer(value: Any, file: str) -> None:
    _check(value, {"global_batch_size": _is_positive}, _TRAINER, file)
    if "accumulation" in value:  # earlier releases wrote no place
        place = {"accumulation": _is_positive, "epoch": is_count, "batches": is_count, "seeds": _are_seeds}
        _check(value, place, _TRAINER, file)
    if "end_is_due" in value:  # earlier releases did not say
        _check(value, {"end_is_due": _is_bool}, _TRAINER, file)


def _check_data(value: Any, file: str) -> None:
    _check(value, {"epoch": lambda epoch: epoch is None or is_count(epoch)}, _DATA, file)
    if value["epoch"] is None:
        return
    _check(value, _PLACE, _DATA, file)
    _check(
        value["loader"], {"batches": lambda n: n is None or is_count(n), "num_workers": is_count}, _DATA, file
    )
    for name in ("start", "now"):
        _check(value[name], _STATES, f"{_DATA}.{name}", file)
    for where, rng in (
        ("start.rng", value["start"].get("rng")),
        *((f"asked[{k}]", r) for k, r in enumerate(value["asked"])),
    ):
        try:
            check_rng(rng, f"{_DATA}.{where}")
        except FormatError as error:
            raise FormatError(str(error), path=file) from error


def _check(value: Any, form: Mapping[str, Callable[[Any], bool]], where: str, file: str) -> None:
    """Refuse a value that is not a mapping, or lacks a key of ``form`` with a value that its function accepts."""
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a mapping, got {brief(value)}", path=file)
    for key, is_right in form.items():
        if key not in value:
            raise FormatError(f"{where}: holds no {key}", path=file)
        if not is_right(value[key]):
            raise FormatError(f"{where}.{key} is malformed: {brief(value[key])}", path=file)


def _is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _maps(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check for a mapping from text to values that ``is_right`` accepts."""
    return lambda value: (
        isinstance(value, dict) and all(isinstance(key, str) and is_right(one) for key, one in value.items())
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) is int


_are_seeds = _maps(_is_number)
_STATES: Mapping[str, Callable[[Any], bool]] = {
    "generators": _maps(lambda state: isinstance(state, torch.Tensor | dict | tuple)),
    "epochs": _maps(_is_number),
    "seeds": _are_seeds,
    "attributes": _maps(_is_text),
}
#: The form of :meth:`DataPlace.state_dict` within an epoch.
_PLACE: Mapping[str, Callable[[Any], bool]] = {
    "consumed": is_count,
    "start": _maps(lambda _: True),
    "asked": lambda value: isinstance(value, list) and len(value) <= 2,
    "drew": _is_bool,
    "now": _maps(lambda _: True),
    "batch": _maps(_is_text),
    "loader": _maps(lambda _: True),
    "workers_kept": _is_bool,
}
