"""Checkpoints of DeepSpeed ZeRO: the flat partitions that its ranks saved, as whole tensors with their names.

ZeRO 1 and 2 join the parameters of each group to one vector and cut it into a part for each rank. ZeRO 3 cuts every parameter into parts of
equal size, and each rank joins its own. What a rank holds of a tensor is therefore a range of the tensor's elements, made of at most a few boxes.
DeepSpeed's ``utils/zero_to_fp32.py`` has the rules (0.19.8); a load of these boxes reads what it needs and no more.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..dtypes import itemsize
from ..errors import FormatError, IntegrityError, SourceError
from ..limits import brief, check_name, is_count, numel_of
from ..objects import frozen
from ..storage import names_in
from ..storage.records import join
from ..tensors.boxes import boxes_of_range
from .pickles import Record
from .rank_files import RANK_NAMES, Merge
from .records import ZERO_FILE, Catalog, Chunk, StoredFile, StoredTensor
from .torch_files import read_one_file, refuse_overlap

_FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_OPTIMIZER = ("base_optimizer_state", "optimizer_state_dict")
#: What the ranks' files of optimizers must share, and those of a model in ZeRO 3.
_SHARED = ("zero_stage", "partition_count", "param_alignment_paddings", "ds_version")
_SHARED_OF_MODEL = ("param_shapes", "frozen_param_shapes", "buffer_names", "global_steps", "dp_world_size")
_HINT = "Either the files are of different steps or runs, or one is damaged"


@frozen
class ZeroCheckpoint:
    """What the files of one step hold together."""

    catalog: Catalog
    """The model: fp32 master weights by module names, frozen parameters and buffers as they are stored."""
    optimizer: Mapping[str, Any] | None
    """As ``optimizer.state_dict()``, with names in place of numbers; None if there is none, or one of an elastic checkpoint."""
    world_size: int
    step: int | None
    scheduler: Any
    """The state of the scheduler, as in the pickle; None if there was none."""


def read_zero(folder: str) -> ZeroCheckpoint:
    """The checkpoint of one step, from the files of all ranks in ``folder`` (:func:`.zero_folder` finds it).

    Rank-local; reads descriptions and no payload, apart from a few bytes that tell the step. Raises :class:`SourceError` for a rank without a
    file, and for tensor, pipeline or expert parallelism; :class:`FormatError` and :class:`IntegrityError` for files that are damaged or don't
    belong together.
    """
    return _Step(folder).read()


class _Run(NamedTuple):
    """Elements ``begin`` to ``end`` of a parameter: where they are in the flat partition of a rank."""

    begin: int
    end: int
    rank: int
    group: int
    at: int


class _Step:
    """The files of one step, and what they say."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        by_part: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
        for name in sorted(names_in(folder)):
            match = ZERO_FILE.fullmatch(name)
            if match is None and not name.endswith(("_model_states.pt", "_optim_states.pt")):
                continue
            if match is None or int(match["model_rank"]):
                raise SourceError(
                    f"holds {brief(name)}, of DeepSpeed with tensor, pipeline or expert parallelism, which can't be read. Convert it with "
                    f"DeepSpeed's ds_to_universal.py",
                    path=folder,
                )
            ranks = by_part[match["part"]]
            rank = int(match["rank"] or 0)
            if rank in ranks:
                raise FormatError(
                    f"has two files of rank {rank}: {ranks[rank]} and {name}; move one run's files elsewhere",
                    path=folder,
                )
            ranks[rank] = name
        self.is_3 = any(ZERO_FILE.fullmatch(name)["rank"] for name in by_part["model"].values())  # type: ignore[index]
        self.files: list[StoredFile] = []
        self.sums: dict[tuple[str, int], int] = {}
        self.paths = {part: self._of_all_ranks(part, ranks) for part, ranks in by_part.items()}

    def _of_all_ranks(self, part: str, ranks: Mapping[int, str]) -> list[str]:
        missing = sorted({*range(max(ranks, default=0) + 1)} - ranks.keys())
        if missing:
            raise self._without(missing, part)
        return [join(self.folder, ranks[rank]) for rank in sorted(ranks)]

    def _without(self, ranks: Sequence[int], part: str) -> SourceError:
        return SourceError(
            f"has no file of rank(s) {brief(list(ranks))} (*_{part}_states.pt); copy the files of all hosts into one folder",
            path=self.folder,
        )

    def read(self) -> ZeroCheckpoint:
        held = [self._content(path, _of_optimizer) for path in self.paths["optim"]]
        models = [self._content(path, self._of_model) for path in self.paths["model"]]
        model = models[0]
        self.world_size = self._world_size(held, model)
        expected = self.world_size if self.is_3 else 1
        if len(models) != expected:
            raise (
                self._without(range(len(models), expected), "model")
                if len(models) < expected
                else FormatError(
                    f"has files of {len(models)} ranks of the model (*_model_states.pt), but {expected} wrote it",
                    path=self.folder,
                )
            )
        for part, ranks, keys in (("optim", held, _SHARED), ("model", models, _SHARED_OF_MODEL)):
            Merge(self.paths[part], self.sums, _HINT).merged([{k: one[k] for k in keys} for one in ranks])
        self._check_step(model)
        self.shapes = self._shapes(model)
        flats = [self._flat(one["flat"], rank) for rank, one in enumerate(held)]
        layout = self._layout(flats, held[0].get("param_alignment_paddings"), self.shapes)
        self._check_mappings([one.get("param_slice_mappings") for one in held], flats, layout, held[0])
        shapes = {name: shape for group in self.shapes for name, shape in group.items()}
        tensors = {name: _gathered(name, shape, layout[name], flats) for name, shape in shapes.items()}
        tensors |= self._others(models, tensors)
        optimizers = [one["optimizer"] for one in held]
        optimizer = (
            self._optimizer(optimizers, layout) if all(type(one) is dict for one in optimizers) else None
        )
        refuse_overlap(tensors.values(), self.files, self.folder)
        catalog = Catalog("full state", self.folder, tensors, tuple(self.files))
        step = model.get("global_steps")
        return ZeroCheckpoint(
            catalog,
            optimizer,
            self.world_size,
            step if is_count(step) else None,
            model.get("lr_scheduler"),
        )

    # -- the files

    def _content(self, path: str, pick: Any) -> Any:
        content, file, archive = read_one_file(path, pick, RANK_NAMES)
        saved_as, name = archive.saved_as + ".pt", os.path.basename(path)
        if saved_as != name and ZERO_FILE.fullmatch(saved_as):
            raise FormatError(f"was saved as {saved_as}: the files of ranks are mixed up", path=path)
        self.files.append(file)
        self.sums |= {(path, at): crc for at, crc in archive.checksums.items()}
        return content

    def _of_model(self, content: Any) -> dict[str, Any]:
        """Of a file of the model: what describes parameters, and the tensors that aren't in flat partitions."""
        if (
            type(content) is not dict
            or "param_shapes" not in content
            or type(content.get("module")) is not dict
        ):
            raise FormatError("isn't a file of DeepSpeed ZeRO: it has no module or no param_shapes")
        found = {key: _plain(content.get(key)) for key in (*_SHARED_OF_MODEL, "shared_params")}
        found["lr_scheduler"] = content.get("lr_scheduler")
        found["frozen"] = content.get("frozen_param_fragments") or {}
        flat = {name for group in found["param_shapes"] or () for name in group} | {
            *(found["shared_params"] or ())
        }
        wanted = content["module"].keys() - flat - found["frozen"].keys()
        if self.is_3:  # the others are placeholders
            wanted &= {*(found["buffer_names"] or ())}
        return found | {"module": {n: t for n, t in content["module"].items() if n in wanted}}

    def _world_size(self, held: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> int:
        for path, one in zip(self.paths["optim"], held, strict=True):
            counts = one.get("partition_count")
            sizes = {*counts} if type(counts) is list else {counts}
            if len(sizes) != 1 or not is_count(size := sizes.pop()) or not size:
                raise FormatError(
                    f"its groups are cut into {brief(counts)} partitions; only one number can be read, and so no MoE",
                    path=path,
                )
            if size > len(held):
                raise self._without(range(len(held), size), "optim")
            if size != len(held):
                raise FormatError(
                    f"is of a run on {size} ranks, and the folder has files of {len(held)}", path=path
                )
        if not held:
            raise SourceError(
                "has no partitions of ZeRO (*_optim_states.pt); mp_rank_00_model_states.pt may hold the model: give its path",
                path=self.folder,
            )
        if model.get("dp_world_size", len(held)) != len(held):
            raise FormatError(
                f"is of a run on {brief(model['dp_world_size'])} ranks, and the folder has files of {len(held)}",
                path=self.paths["model"][0],
            )
        return len(held)

    def _check_step(self, model: Mapping[str, Any]) -> None:
        named = re.fullmatch(r"global_step(\d{1,12})", os.path.basename(self.folder))
        if named and is_count(step := model.get("global_steps")) and step != int(named[1]):
            raise IntegrityError(
                f"is of step {step}, in the folder of step {named[1]}", path=self.paths["model"][0]
            )

    # -- the layout

    def _shapes(self, model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of each group's parameters."""
        path, groups = self.paths["model"][0], model["param_shapes"]
        if type(groups) is not list or not all(type(group) is dict for group in groups):
            raise FormatError(f"its param_shapes are {brief(groups)}", path=path)
        for group in groups:
            for name, shape in group.items():
                numel_of(shape, brief(check_name(name, "a parameter's name", path)), path)
        names = [name for group in groups for name in group]
        if len({*names}) != len(names):
            raise FormatError("two groups have a parameter of one name", path=path)
        return groups

    def _flat(self, found: Any, rank: int) -> list[StoredTensor]:
        path = self.paths["optim"][rank]
        if type(found) is not list or len(found) != len(self.shapes):
            what = f"{len(found)} flat partitions" if type(found) is list else brief(found)
            raise FormatError(f"has {what} for {len(self.shapes)} groups of parameters", path=path)
        for one in found:
            _check_flat(one, path)
        return found

    def _layout(
        self,
        flats: Sequence[Sequence[StoredTensor]],
        paddings: Any,
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
    ) -> dict[str, list[_Run]]:
        """Where each parameter's elements are."""
        return self._layout_of_3(flats, shapes) if self.is_3 else self._layout_of_2(flats, paddings, shapes)

    def _layout_of_2(
        self,
        flats: Sequence[Sequence[StoredTensor]],
        paddings: Any,
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
    ) -> dict[str, list[_Run]]:
        found: dict[str, list[_Run]] = {}
        for k, group in enumerate(shapes):
            after = (
                paddings[k] if type(paddings) is list and len(paddings) == len(shapes) else [0] * len(group)
            )
            if type(after) is not list or len(after) != len(group) or not all(map(is_count, after)):
                raise FormatError(
                    f"pads {len(group)} parameters by {brief(paddings)}", path=self.paths["optim"][0]
                )
            at = 0
            parts = [flat[k].shape[0] for flat in flats]
            for (name, shape), padding in zip(group.items(), after, strict=True):
                found[name] = list(_runs(at, at + math.prod(shape), k, parts))
                at += math.prod(shape) + padding
            # A partition is cut where the vector ends, or padded to a multiple of twice the number of ranks.
            align = 2 * self.world_size
            if -(-at // align) != -(-sum(parts) // align) or sum(parts) < at - (after[-1] if after else 0):
                raise self._wrong_numel(k, at, parts)
        return found

    def _layout_of_3(
        self, flats: Sequence[Sequence[StoredTensor]], shapes: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> dict[str, list[_Run]]:
        found: dict[str, list[_Run]] = {}
        for k, group in enumerate(shapes):
            at = 0
            for name, shape in group.items():
                numel = math.prod(shape)
                part = -(-numel // self.world_size)
                ranges = [(min(r * part, numel), min((r + 1) * part, numel)) for r in range(self.world_size)]
                found[name] = [_Run(a, b, rank, k, at) for rank, (a, b) in enumerate(ranges) if a < b]
                at += part
            for flat in flats:
                if flat[k].shape[0] != at:
                    raise self._wrong_numel(k, at, [flat[k].shape[0] for flat in flats])
        return found

    def _wrong_numel(self, group: int, numel: int, parts: Sequence[int]) -> FormatError:
        per_rank = "on each rank " if self.is_3 else ""
        return FormatError(
            f"its parameters of group {group} have {per_rank}{numel} elements, and the partitions of the ranks have {brief(list(parts))}. "
            f"{_HINT}, or the optimizer was offloaded to NVMe",
            path=self.folder,
        )

    def _check_mappings(
        self,
        mappings: Sequence[Any],
        flats: Sequence[Sequence[StoredTensor]],
        layout: Mapping[str, Sequence[_Run]],
        held: Mapping[str, Any],
    ) -> None:
        """Compare what each rank's file says of its own partition (``param_slice_mappings``) with the layout."""
        if None in mappings:
            return
        wanted = self._by_rank(layout)
        if mappings == wanted:
            return
        # With round_robin_gradients, DeepSpeed records the order from before it deals a group's parameters out to the ranks.
        n, dealt = self.world_size, []
        for k, group in enumerate(self.shapes):
            before = [*dict.fromkeys(name for rank in mappings for name in _group(rank, k))]
            if sorted(before) != sorted(name for name in group if layout[name]):
                break
            if [name for k in range(n) for name in before[k::n]] == [*group]:
                dealt.append({name: group[name] for name in before})
        if len(dealt) == len(self.shapes) and mappings == self._by_rank(
            self._layout(flats, held.get("param_alignment_paddings"), dealt)
        ):
            return
        rank = next(r for r in range(n) if mappings[r] != wanted[r])
        raise IntegrityError(
            f"its param_slice_mappings say that it holds other parts than the shapes in {os.path.basename(self.paths['model'][0])} give "
            f"rank {rank}. {_HINT}",
            path=self.paths["optim"][rank],
        )

    def _by_rank(self, layout: Mapping[str, Sequence[_Run]]) -> list[list[dict[str, tuple[int, int]]]]:
        """For each rank and group: the start and the number of elements of each parameter in the partition."""
        found: list[list[dict[str, tuple[int, int]]]] = [
            [{} for _ in self.shapes] for _ in range(self.world_size)
        ]
        for name, runs in layout.items():
            for run in runs:
                found[run.rank][run.group][name] = (run.at, run.end - run.begin)
        return found

    # -- tensors

    def _others(
        self, models: Sequence[Mapping[str, Any]], known: Mapping[str, StoredTensor]
    ) -> dict[str, StoredTensor]:
        """What isn't in flat partitions: buffers, frozen parameters, and further names of shared parameters."""
        model, path = models[0], self.paths["model"][0]
        found = {n: t for n, t in model["module"].items() if isinstance(t, StoredTensor)}
        shapes = model["frozen_param_shapes"] or {}
        for name, first in model["frozen"].items():
            parts = [one["frozen"].get(name) for one in models]
            shape = shapes.get(name) if type(shapes) is dict else None
            numel = numel_of(shape, brief(name), path)  # type: ignore[arg-type]
            if not self.is_3 and isinstance(first, StoredTensor) and first.shape == shape:
                found[name] = first
                continue
            part = -(-numel // len(models))
            for one, rank_path in zip(parts, self.paths["model"], strict=True):
                _check_flat(one, rank_path)
                if one.shape[0] != part or one.dtype != parts[0].dtype:
                    raise FormatError(
                        f"holds {brief(list(one.shape))} elements of the frozen {brief(name)}, expected {part} of shape {brief(shape)}",
                        path=rank_path,
                    )
            ranges = [(min(r * part, numel), min((r + 1) * part, numel)) for r in range(len(models))]
            runs = [_Run(a, b, rank, 0, 0) for rank, (a, b) in enumerate(ranges) if a < b]
            found[name] = _gathered(name, shape, runs, [[one] for one in parts])  # type: ignore[arg-type]
        for alias, name in (model["shared_params"] or {}).items():
            if (other := known.get(name) or found.get(name)) is not None:
                found[alias] = other
        return {check_name(n, "a tensor's name", path): replace(t, name=n) for n, t in found.items()}

    # -- the optimizer

    def _optimizer(self, found: Sequence[Any], layout: Mapping[str, Sequence[_Run]]) -> dict[str, Any]:
        paths = self.paths["optim"]
        for one, path in zip(found, paths, strict=True):
            if type(one.get("state")) is not dict or type(one.get("param_groups")) is not list:
                raise FormatError(f"its optimizer is {brief(one)}, not the state dict of one", path=path)
        # A rank's vectors are its own. Everything else is the same on all ranks, the step first of all.
        Merge(paths, self.sums, _HINT).merged([_without_vectors(one) for one in found])
        states: dict[str, dict[str, Any]] = {}
        for k, group in enumerate(self.shapes):
            for key, value in found[0]["state"].get(k, {}).items():
                if is_flat := isinstance(value, StoredTensor) and bool(value.shape):
                    flats = [{k: one["state"][k].get(key)} for one in found]
                    for flat, path in zip(flats, paths, strict=True):
                        _check_flat(flat[k], path)
                for name, shape in group.items():
                    stored = f"{name}.{key}"
                    states.setdefault(name, {})[str(key)] = (
                        _gathered(stored, shape, layout[name], flats) if is_flat else value
                    )
        groups = []
        for group in found[0]["param_groups"]:
            numbers = group.get("params") if type(group) is dict else None
            if type(numbers) is not list or not all(is_count(n) and n < len(self.shapes) for n in numbers):
                raise FormatError(f"its optimizer has a group of {brief(numbers)}", path=paths[0])
            groups.append({**group, "params": [name for n in numbers for name in self.shapes[n]]})
        return {"state": states, "param_groups": groups}


def _of_optimizer(content: Any) -> dict[str, Any]:
    """Of a rank's file: its flat partitions, the optimizer's state, and what describes both."""
    held = content.get("optimizer_state_dict") if type(content) is dict else None
    flat = next((key for key in _FLAT if type(held) is dict and key in held), None)
    if held is None or flat is None:
        raise FormatError("isn't a file of DeepSpeed ZeRO: it has no fp32 partitions")
    mappings = held.get("param_slice_mappings")
    return {
        **{key: _plain(held.get(key)) for key in _SHARED},
        "flat": held[flat],
        "optimizer": next((held[key] for key in _OPTIMIZER if key in held), None),
        "param_slice_mappings": None
        if mappings is None
        else [
            {name: _address(where) for name, where in _group(mappings, k).items()}
            for k in range(len(mappings))
        ],
    }


def _address(found: Any) -> tuple[Any, Any]:
    """The start and the number of elements from DeepSpeed's ``fragment_address``."""
    state = found.state if type(found) is Record else None
    return (state.get("start"), state.get("numel")) if type(state) is dict else (None, None)


def _group(mappings: Any, k: int) -> Mapping[str, Any]:
    found = mappings[k] if type(mappings) is list and k < len(mappings) else None
    if type(found) is not dict:
        raise FormatError(f"its param_slice_mappings are {brief(mappings)}")
    return found


def _plain(value: Any) -> Any:
    """A value of the pickle; of a member of an enum, its value."""
    return value.args[0] if type(value) is Record and len(value.args) == 1 else value


def _without_vectors(found: Any) -> Any:
    if type(found) is dict:
        return {
            k: _without_vectors(v) for k, v in found.items() if not (isinstance(v, StoredTensor) and v.shape)
        }
    return [_without_vectors(one) for one in found] if type(found) is list else found


def _check_flat(found: Any, path: str) -> None:
    if not isinstance(found, StoredTensor) or len(found.shape) != 1:
        what = (
            f"a tensor of shape {brief(list(found.shape))}"
            if isinstance(found, StoredTensor)
            else brief(found)
        )
        raise FormatError(f"has {what} where a flat partition belongs", path=path)


def _runs(begin: int, end: int, group: int, parts: Sequence[int]) -> Sequence[_Run]:
    """The runs of a parameter that is at ``begin`` to ``end`` of a vector, cut into ``parts``."""
    found, start = [], 0
    for rank, numel in enumerate(parts):
        a, b = max(begin, start), min(end, start + numel)
        if a < b:
            found.append(_Run(a - begin, b - begin, rank, group, a - start))
        start += numel
    return found


def _gathered(name: str, shape: tuple[int, ...], runs: Sequence[_Run], flats: Sequence[Any]) -> StoredTensor:
    """A tensor from its runs; ``flats``: of each rank, the flat partition of each group."""
    chunks: list[Chunk] = []
    dtypes = {flats[run.rank][run.group].dtype for run in runs} or {"F32"}  # of an empty tensor
    for run in runs:
        flat = flats[run.rank][run.group]
        if len(dtypes) > 1 or run.at + run.end - run.begin > flat.shape[0]:
            raise FormatError(
                f"{brief(name)} needs elements {run.at} to {run.at + run.end - run.begin} of a partition that has {flat.shape[0]} of {flat.dtype}",
                path=flat.chunks[0].path if flat.chunks else None,
            )
        at = flat.chunks[0].offset_bytes + run.at * itemsize(flat.dtype)
        for box in boxes_of_range(run.begin, run.end, shape):
            chunks.append(Chunk(box, flat.chunks[0].path, at))
            at += box.numel * itemsize(flat.dtype)
    return StoredTensor(name, dtypes.pop(), shape, tuple(chunks))
