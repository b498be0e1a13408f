"""The Trainer's place in its data: stored with the RNG states that began the epoch, resumed within the epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from ..checkpoint.stored import decode_documents, read_documents
from ..errors import FormatError
from ..format.manifest import Manifest, read_manifest
from ..internals.torch import version_of
from ..internals.trainers import without_first_batches
from ..limits import brief, inside, is_count
from ..rng import capture_host_rng, preserve_rng, restore_rng
from ..state.beyond import same
from ..state.data import SAFE_SAMPLERS, length_of
from ..state.documents import check_rng
from ..state.parts import (
    all_parts,
    attributes,
    item_generators,
    keeps_workers,
    own_states,
    put_own_states,
    unfit_generators,
)
from ..state.typed_json import Encoded, Places

# ----------------------------------------------------------------------------------------------------
# Recognizes a batch by the digests of its content.

_MOST = 32


class _Batch:
    """A batch that the loop got, to be recognized by its content. Holds references, and copies nothing."""

    def __init__(self, batch: Any) -> None:
        self._held = [(path, leaf, _version(leaf)) for path, leaf in _leaves(batch, "")]

    def digests(self) -> dict[str, str]:
        """Fingerprints by path. A bare tensor has the path ``tensor``; everything that is not a tensor shares ``""``.

        Leaves out tensors that were written to since, and all after the first 32. Copies tensors of a device to the host.
        """
        found: dict[str, str] = {}
        rest = xxhash.xxh3_64()
        for path, leaf, version in self._held:
            if isinstance(leaf, torch.Tensor):
                if _version(leaf) == version and len(found) < _MOST:
                    found[path or "tensor"] = _digest(leaf)
            elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
                rest.update(np.ascontiguousarray(leaf).tobytes())
            elif isinstance(leaf, (str, int, float, bool, bytes, type(None))):
                rest.update(f"{path}={leaf!r};".encode(errors="surrogatepass"))
        return {**found, "": rest.hexdigest()}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for k, one in enumerate(value):
            yield from _leaves(one, f"{path}[{k}]")
    else:
        yield path, value


def _version(leaf: Any) -> int:
    """The tensor's version counter, or -1 if it has none."""
    try:
        return version_of(leaf) if isinstance(leaf, torch.Tensor) else -1
    except RuntimeError:  # made in inference mode
        return -1


def _digest(tensor: torch.Tensor) -> str:
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_64_hexdigest(bits.tobytes())}"


# ----------------------------------------------------------------------------------------------------
# The place of a Trainer in its data: stored with the random states that began the epoch, resumed inside the epoch.
#
# Trainer finds its place by steps: it makes the epoch's loader again and skips the trained batches. A sampler that draws
# from global generators then gives another order, because these have their states from the save. Here the epoch begins
# again under its first random states. Trainer gets the rest of it, after as many stand-ins as it will skip.

_log = logging.getLogger(__name__)
_END = object()
#: Samplers of Trainer, Accelerate and TRL that draw only before their first batch, if at all.
_KNOWN_SAMPLERS = {
    *(cls.__qualname__ for cls in SAFE_SAMPLERS),
    *("BatchRebalanceSampler", "BatchSamplerShard", "LengthGroupedSampler", "RepeatSampler"),
    "SeedableRandomSampler",
}


@dataclass(slots=True)
class _Epoch:
    """One epoch, with the number of batches that the loop got."""

    number: int
    loader: Any
    start: dict[str, Any]
    consumed: int = 0
    ended: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Random states at the requests for the last two batches. Accelerate's loaders read one batch ahead."""
    drew: bool = False
    """Whether random generators moved while a batch after the first was made."""
    last: _Batch | None = None


class DataPlace:
    """The place of a Trainer in its data, as an extra of its training state. Rank-local.

    After :meth:`load_state_dict`, :meth:`open` gives the rest of the stored epoch, bitwise as the saved run would have
    got it. :meth:`differences` lists possible exceptions; ``on_difference`` gets those that show up later.
    """

    def __init__(self, on_difference: Callable[[str], None], reads_again: bool) -> None:
        self._on_difference = on_difference
        self._reads_again = reads_again
        self._epoch: _Epoch | None = None
        self._stored: dict[str, Any] | None = None
        self.sets_rng = False
        """Whether the last opened epoch restores random generators after the batches that it skips."""

    def reached(self) -> tuple[int, int, bool]:
        """Number of the epoch, number of its batches that the loop got, and whether it is known to have no more."""
        epoch = self._epoch
        return (0, 0, False) if epoch is None else (epoch.number, epoch.consumed, epoch.ended)

    def state_dict(self) -> dict[str, Any]:
        """The place, in values that typed JSON can hold. Changes nothing."""
        epoch = self._epoch
        if epoch is None:
            return {"epoch": None}
        return {
            "epoch": epoch.number,
            "consumed": epoch.consumed,
            "start": epoch.start,
            "asked": list(epoch.asked),
            "drew": epoch.drew,
            "now": _states(epoch.loader),
            "batch": epoch.last.digests() if epoch.last is not None else {},
            "loader": _description(epoch.loader),
            "workers_kept": keeps_workers(epoch.loader),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next opened epoch go on at the place of ``state``."""
        self._stored = state

    def differences(self, loader: Any, epoch: int, skipped: int, has_seeds: bool) -> Iterator[str]:
        """Why this loader may not go on exactly from the stored place, one sentence per reason; also if none is stored.

        ``has_seeds``: whether the checkpoint holds the seeds of samplers that seed themselves.
        """
        stored = self._stored
        if stored is None or stored["epoch"] is None:
            if (skipped or not has_seeds) and (why := _order_of(loader, has_seeds)):
                yield f"the data position: {why}: samples in this epoch may be repeated or skipped"
            return
        if stored["loader"]["batches"] != _description(loader)["batches"]:
            was, now = stored["loader"]["batches"], _description(loader)["batches"]
            yield f"the data loader: an epoch had {was} batches when saved, and has {now} now: samples in this epoch may be repeated or skipped"
        was_workers, workers = stored["loader"]["num_workers"], getattr(loader, "num_workers", 0)
        by_index = self._goes_by_index(loader, stored)
        if (was_workers or stored["drew"]) and (was_workers != workers or (skipped and by_index)):
            why = (
                f"num_workers: {was_workers} when saved, {workers} now"
                if was_workers != workers
                else "reads_again"
            )
            yield f"{why}: random draws in items (augmentation) may differ"
        if workers and keeps_workers(loader) and (epoch or skipped):
            yield "persistent_workers: random draws in workers may differ"
        if workers and not getattr(loader, "in_order", True):
            yield "in_order=False: the order of batches may differ"
        if unfit := unfit_generators(loader, stored["start" if skipped else "now"]):
            yield f"the data loader's generators are not those of the saved run ({', '.join(unfit)}): samples may differ"
        if not skipped:
            yield from self._changed(stored["now"], loader, "when it was saved")
            return
        if not stored["drew"]:
            return
        samplers = [p for path, p in all_parts(loader).items() if "sampler" in path]
        unknown = [type(p).__qualname__ for p in samplers if type(p).__qualname__ not in _KNOWN_SAMPLERS]
        if isinstance(getattr(loader, "dataset", None), IterableDataset) and not workers:
            yield "the iterable dataset draws random numbers while it is read: samples may differ"
        elif unknown or not hasattr(loader, "dataset"):
            what = unknown[0] if unknown else type(loader).__qualname__
            yield f"{what}: random numbers were drawn mid-epoch: samples may differ"

    def _changed(self, stored: Mapping[str, Any], loader: Any, when: str) -> Iterator[str]:
        """Lines for an iterable dataset that counts, or goes on reading, between epochs; a new one would start over."""
        live = attributes(loader)
        for name, was in stored["attributes"].items():
            if live.get(name) != was or "being read" in was:
                yield (
                    f"the iterable {name} was {was} {when}, and is {live.get(name)} now: it may keep a position that no "
                    "checkpoint contains, and samples may differ"
                )

    # ------------------------------------------------------------------------------------------ epochs

    def open(self, loader: Any, epoch: int, skipped: int, resumed: bool, rng: dict[str, Any] | None) -> Any:
        """The loader that Trainer iterates for this epoch. Trainer itself skips its first batches.

        Args:
            resumed: whether this is the first epoch after a resume.
            rng: random states at the save, to be restored at the loaded place.
        """
        stored, self._stored, self.sets_rng = (self._stored if resumed else None), None, False
        if stored is not None and stored["epoch"] is not None:
            _set_epoch(loader, epoch)
            if stored["workers_kept"] and keeps_workers(loader):
                _start_workers(loader)
            if skipped and (stored["epoch"], stored["consumed"]) == (epoch, skipped) and rng is not None:
                self.sets_rng = True
                return _after_stand_ins(loader, skipped, lambda: self._go_on(loader, stored, rng))
            if not skipped:
                put_own_states(loader, stored["now"])
        if skipped:
            before = capture_host_rng()  # Trainer would make the loader's iterator now
            return _after_stand_ins(loader, skipped, lambda: self._skip(loader, epoch, skipped, before))
        return _Watched(loader, lambda: self._begin(loader, epoch))

    def _begin(self, loader: Any, number: int) -> Iterator[Any]:
        epoch = self._epoch = _Epoch(number, loader, _start(loader))
        return self._handed(iter(loader), epoch)

    def _skip(self, loader: Any, number: int, skipped: int, rng: dict[str, Any]) -> Iterator[Any]:
        """The rest of an epoch whose first random states are not known, as Trainer itself finds it."""
        restore_rng(rng)
        _set_epoch(loader, number)
        epoch = self._epoch = _Epoch(number, loader, _start(loader), skipped)
        rest = (
            iter(without_first_batches(loader, skipped))
            if _has_index(loader)
            else islice(loader, skipped, None)
        )
        return self._handed(rest, epoch)

    def _go_on(self, loader: Any, stored: dict[str, Any], rng: dict[str, Any]) -> Iterator[Any]:
        """The rest of the stored epoch, which begins again under its first random states."""
        consumed, asked, start = stored["consumed"], stored["asked"], stored["start"]
        for line in self._changed(start, loader, "when its epoch began"):
            self._on_difference(line)
        put_own_states(loader, start, stored["now"])
        restore_rng(start["rng"])
        epoch = self._epoch = _Epoch(
            stored["epoch"], loader, start, consumed, asked=asked, drew=stored["drew"]
        )
        batch: Any = _END
        if self._goes_by_index(loader, stored):
            batches = iter(without_first_batches(loader, consumed - 1))
            batch = next(batches, _END)
        else:
            _log.info("reading %d batches of epoch %d again, to continue after them", consumed, epoch.number)
            batches = iter(loader)
            for k in range(consumed):
                if (before := k - consumed + len(asked)) >= 0:
                    restore_rng(asked[before])
                if (batch := next(batches, _END)) is _END:
                    break
        self._compare(batch, stored, loader)
        restore_rng(rng)
        return self._handed(batches, epoch)

    def _compare(self, batch: Any, stored: dict[str, Any], loader: Any) -> None:
        """The last batch before the place must be the one that the saved run trained on."""
        found = {} if batch is _END else _Batch(batch).digests()
        if batch is _END or any(found.get(k) != was for k, was in stored["batch"].items()):
            self._on_difference(
                f"batch {stored['consumed']} of epoch {stored['epoch']} is not the one that the saved run had: the dataset or "
                "its order is different, and samples in this epoch may be repeated or skipped"
            )
        elif not same(own_states(loader)["generators"], stored["now"]["generators"]):
            self._on_difference(
                "the generators of the data loader's parts are at a different position than in the saved run"
            )

    def _handed(self, batches: Iterator[Any], epoch: _Epoch) -> Iterator[Any]:
        """Count and watch batches on their way to the loop."""
        is_first = not epoch.asked
        while True:
            asked, held = capture_host_rng(), item_generators(epoch.loader)
            batch = next(batches, _END)
            if batch is _END:
                epoch.ended = True
                return
            if not is_first:
                epoch.drew |= not same(asked, capture_host_rng())
                epoch.drew |= not same(held, item_generators(epoch.loader))
            is_first = False
            epoch.asked = [*epoch.asked[-1:], asked]
            epoch.consumed += 1
            epoch.last = _Batch(batch)
            yield batch

    def _goes_by_index(self, loader: Any, stored: dict[str, Any]) -> bool:
        """Whether batches can be skipped unread: their items draw no random numbers and change nothing, or the caller chose so."""
        if not _has_index(loader) or stored["consumed"] < 2:
            return False
        draws = stored["drew"] or stored["loader"]["num_workers"] > 0
        draws |= any(key.startswith(("dataset.", "collate_fn.")) for key in stored["now"].get("orders", ()))
        return not draws or not self._reads_again


def _start(loader: Any) -> dict[str, Any]:
    return {**_states(loader), "rng": capture_host_rng()}


def _states(loader: Any) -> dict[str, Any]:
    return {**own_states(loader), "attributes": attributes(loader)}


def _description(loader: Any) -> dict[str, Any]:
    return {"batches": length_of(loader), "num_workers": getattr(loader, "num_workers", 0)}


def _set_epoch(loader: Any, epoch: int) -> None:
    """As Trainer does before it iterates."""
    inner = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for part in (loader, inner):
        if part is not None and _has_epoch(part):
            part.set_epoch(epoch)


def _start_workers(loader: Any) -> None:
    """Start persistent workers, which draw their seed at that moment. The stored run has made that draw already."""
    own = own_states(loader)
    with preserve_rng():
        iter(getattr(loader, "base_dataloader", loader))
    put_own_states(loader, own, own_states(loader))


def _has_index(loader: Any) -> bool:
    """Whether Accelerate can skip batches of this loader by index. Its dispatcher counts in another way."""
    from accelerate.data_loader import DataLoaderShard

    return (
        type(loader) in (DataLoader, DataLoaderShard)
        and not isinstance(loader.dataset, IterableDataset)
        and not getattr(loader, "use_stateful_dataloader", False)
        and loader.batch_sampler is not None
    )


def _order_of(loader: Any, has_seeds: bool) -> str:
    """Why the order of samples does not follow from the number of the epoch; empty if it does."""
    if has_seeds and isinstance(getattr(loader, "dataset", None), IterableDataset):
        return ""
    batches = getattr(loader, "batch_sampler", None)
    samplers = [part for path, part in all_parts(loader).items() if path.endswith("sampler")]
    if batches is not None and getattr(batches, "sampler", None) is not loader.sampler:
        samplers = [p for p in samplers if p is not loader.sampler]  # torch makes a dummy that is never used
    seeded = has_seeds and any(hasattr(p, "initial_seed") or _has_epoch(p) for p in samplers)
    if seeded or any(type(p) is SequentialSampler for p in samplers):
        return ""
    return (
        "the order of samples was drawn from the RNG states of a different number of ranks"
        if has_seeds
        else "the checkpoint doesn't contain the seed for the sample order, which may differ"
    )


def _has_epoch(part: Any) -> bool:
    return callable(getattr(part, "set_epoch", None))


class _Watched:
    """A loader that reports its batches to the place; in everything else it is the loader."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        self._loader = loader
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._begin()


class _StandIns(IterableDataset[Any]):
    """A ``None`` for each batch that Trainer skips, and then the batches that follow.

    A checkpoint may ask to skip more batches than an epoch has by ``length``, the loader's own (or None). Then the
    loader is asked first whether it has them: the length of the data bounds the time, not the stored number.
    """

    def __init__(self, count: int, length: int | None, rest: Callable[[], Iterator[Any]]) -> None:
        self._count = count
        self._length = count if length is None else min(count, length)
        self._rest = rest

    def __iter__(self) -> Iterator[Any]:
        yield from repeat(None, self._length)
        rest = self._rest()
        if self._length < self._count:
            if (first := next(rest, _END)) is _END:
                return
            yield from repeat(None, self._count - self._length)
            yield first
        yield from rest


def _after_stand_ins(loader: Any, count: int, rest: Callable[[], Iterator[Any]]) -> DataLoader[Any]:
    """A loader of ``count`` placeholder batches, which Trainer skips, followed by the batches of ``rest``."""
    stand_ins = _StandIns(count, length_of(loader), rest)
    return DataLoader(stand_ins, batch_size=None, collate_fn=lambda batch: batch)


# ----------------------------------------------------------------------------------------------------
# Checks the form of a Trainer's place in the data, in a checkpoint, before it is used.

_TRAINER, _DATA = "extra.trainer", "extra.data"
_SHARED = ("global_batch_size", "accumulation", "epoch", "batches", "end_is_due", "seeds")


def check_place(path: str, manifest: Manifest, stem: str) -> dict[str, Any]:
    """The decoded documents of the Trainer in a file of the checkpoint at ``path``: ``state``, or a rank's file.

    Raises :class:`FormatError` naming the file if no :class:`ShardwiseTrainer` can have written it; otherwise as
    :func:`read_documents`. Rank-local; reads that file and the tensors beside it.
    """
    return _decoded(read_documents(path, manifest, stem), inside(path, f"{stem}.json"))


def _decoded(stored: Mapping[str, Encoded], file: str) -> dict[str, Any]:
    ours = {name: stored[name] for name in (_TRAINER, _DATA) if name in stored}
    found = decode_documents(ours, file, Places())
    if _TRAINER in found:
        value = found[_TRAINER]
        _check(value, {"global_batch_size": _is_positive}, _TRAINER, file)
        if "accumulation" in value:  # earlier releases wrote no place
            place = {
                "accumulation": _is_positive,
                "epoch": is_count,
                "batches": is_count,
                "seeds": _are_seeds,
            }
            _check(value, place, _TRAINER, file)
        if "end_is_due" in value:  # earlier releases did not say
            _check(value, {"end_is_due": _is(bool)}, _TRAINER, file)
    if _DATA in found:
        _check_data(found[_DATA], file)
    return found


def contents(path: str) -> dict[str, Any]:
    """The contents of a Trainer's shardwise checkpoint: ``world_size``, its ``documents``, and of the ``trainer`` the state that all ranks
    share (batch size, epoch, batches, seeds). Raises as :func:`check_place`. Rank-local.
    """
    manifest, file = read_manifest(path), inside(path, "state.json")
    stored = read_documents(path, manifest, "state")
    found = _decoded(stored, file)
    if _TRAINER not in found:
        raise FormatError(
            f"contains no {_TRAINER}, which checkpoints of a ShardwiseTrainer have; restore it with shardwise.restore",
            path=file,
        )
    return {
        "world_size": manifest.world_size,
        "documents": sorted({*stored, *manifest.local_documents}),
        "trainer": {key: found[_TRAINER][key] for key in _SHARED if key in found[_TRAINER]},
    }


def _check_data(value: Any, file: str) -> None:
    _check(value, {"epoch": lambda epoch: epoch is None or is_count(epoch)}, _DATA, file)
    if value["epoch"] is None:
        return
    _check(value, _PLACE, _DATA, file)
    for where, rng in (
        ("start.rng", value["start"].get("rng")),
        *((f"asked[{k}]", r) for k, r in enumerate(value["asked"])),
    ):
        try:
            check_rng(rng, f"{_DATA}.{where}")
        except FormatError as error:
            raise FormatError(str(error), path=file) from error


def _check(value: Any, form: Mapping[str, Any], where: str, file: str) -> None:
    """Refuse a value that is not a mapping, or lacks a key of ``form`` with a value of that form, or that its function accepts."""
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a mapping, got {brief(value)}", path=file)
    for key, is_right in form.items():
        if key not in value:
            raise FormatError(f"{where}: contains no {key}", path=file)
        if isinstance(is_right, Mapping):
            _check(value[key], is_right, f"{where}.{key}", file)
        elif not is_right(value[key]):
            raise FormatError(f"{where}.{key} is malformed: {brief(value[key])}", path=file)


def _is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _maps(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check for a mapping from text to values that ``is_right`` accepts."""
    return lambda value: (
        isinstance(value, dict) and all(isinstance(key, str) and is_right(one) for key, one in value.items())
    )


_are_seeds = _maps(_is(int))
_STATES = {
    "generators": _maps(lambda state: isinstance(state, torch.Tensor | dict | tuple)),
    "epochs": _maps(_is(int)),
    "seeds": _are_seeds,
    "attributes": _maps(_is(str)),
}
#: The form of :meth:`DataPlace.state_dict` within an epoch.
_PLACE = {
    "consumed": is_count,
    "start": _STATES,
    "asked": lambda value: isinstance(value, list) and len(value) <= 2,
    "drew": _is(bool),
    "now": _STATES,
    "batch": _maps(_is(str)),
    "loader": {"batches": lambda count: count is None or is_count(count), "num_workers": is_count},
    "workers_kept": _is(bool),
}
