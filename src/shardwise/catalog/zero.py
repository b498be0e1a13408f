"""Checkpoints of DeepSpeed ZeRO: the flat partitions that its ranks saved, as whole tensors with their names.

ZeRO 1 and 2 join the parameters of a group to one vector and cut it into a part for each rank. ZeRO 3 cuts every parameter into parts of equal
size, and each rank joins its own. So a rank's file has a range of a tensor's elements, which is a few boxes. The rules are those of
DeepSpeed's ``utils/zero_to_fp32.py`` (0.19.8).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import itemsize
from ..errors import FormatError, IntegrityError, SourceError
from ..limits import brief, check_name, inside, is_count, numel_of
from ..objects import frozen
from ..storage import is_file, names_in
from ..storage.records import join
from ..tensors.boxes import boxes_of_range, whole
from .pickles import Record
from .quantized import open_file
from .rank_files import RANK_NAMES, Merge
from .records import ZERO_FILE, Catalog, Chunk, StoredFile, StoredTensor
from .torch_files import read_one_file, refuse_overlap

#: What the files of all ranks must share: those with partitions, and those of the model (ZeRO 3).
_SHARED = {
    "optim": ("zero_stage", "partition_count", "param_alignment_paddings", "ds_version"),
    "model": ("param_shapes", "frozen_param_shapes", "buffer_names", "global_steps", "dp_world_size"),
}
_MOST_RANKS = 1_000_000
_MOST_STATES = 64
_NUMBERS = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4"}
_HINT = "Either the files are of different steps or runs, or one is damaged"
Shapes = Mapping[str, tuple[int, ...]]


@frozen
class ZeroCheckpoint:
    """What the files of one step hold together."""

    catalog: Catalog
    """The model by module names: fp32 master weights; frozen parameters and buffers as they are stored."""
    optimizer: Callable[[], Mapping[str, Any]] | None
    """Gives what ``optimizer.state_dict()`` would, with names instead of numbers; None if there is none, or one of an elastic checkpoint.

    Raises :class:`FormatError` or :class:`IntegrityError` for states that aren't one value for each element of a partition.
    """
    scheduler: Any
    """The state of the scheduler, as in the pickle; None if there was none."""
    step: int | None
    world_size: int


def read_zero(folder: str) -> ZeroCheckpoint:
    """The checkpoint in the files of all ranks in ``folder``, that of one step (:func:`.zero_folder` finds it).

    Rank-local; reads descriptions and no payload, apart from bytes that tell the step. Raises :class:`SourceError` for a rank without a file,
    and for tensor, pipeline or expert parallelism; :class:`FormatError` and :class:`IntegrityError` for files that are damaged or don't belong
    together.
    """
    return _Step(folder).read()


class _Run(NamedTuple):
    """Elements ``begin`` to ``end`` of a parameter, and where they are: from ``at`` on in a rank's partition of a group."""

    begin: int
    end: int
    rank: int
    group: int
    at: int


Layout = dict[str, list[_Run]]
Tensors = dict[str, StoredTensor]


class _Step:
    """The files of one step, and what they say."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        names: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
        self.is_3 = False
        for name in sorted(names_in(folder)):
            if not name.endswith(("_model_states.pt", "_optim_states.pt")):
                continue
            match = ZERO_FILE.fullmatch(name)
            if match is None or int(match["model_rank"]):
                raise SourceError(
                    f"holds {brief(name)}, of DeepSpeed with tensor, pipeline or expert parallelism, and only ZeRO can be read. "
                    f"Export the model with the program that trained it",
                    path=folder,
                )
            of_ranks, rank = names[match["part"]], int(match["rank"] or 0)
            if rank in of_ranks:
                raise FormatError(
                    f"has two files of rank {rank}, {of_ranks[rank]} and {name}; move those of one run elsewhere",
                    path=folder,
                )
            of_ranks[rank] = name
            self.is_3 |= match["part"] == "model" and match["rank"] is not None
        self.paths = {
            part: [join(folder, of_ranks[rank]) for rank in sorted(of_ranks)]
            for part, of_ranks in names.items()
        }
        self.files: list[StoredFile] = []
        self.sums: dict[tuple[str, int], int] = {}
        self.is_universal = not names["optim"]
        for part, of_ranks in names.items():
            if of_ranks or part == "model":
                self._complete(part, of_ranks, max(of_ranks, default=0) + 1)

    def read(self) -> ZeroCheckpoint:
        held = [self._content(path, _of_partitions) for path in self.paths["optim"]]
        models = [self._content(path, self._of_model) for path in self.paths["model"]]
        self.world_size = self._world_size(held, models)
        for part, ranks in (("optim", held), ("model", models)) if held else (("model", models),):
            self._check_same(part, [{key: one[key] for key in _SHARED[part]} for one in ranks])
        model, step = models[0], models[0]["global_steps"]
        self._check_step([one["optimizer"] for one in held], step, model["skipped_steps"])
        groups = self._groups(model["param_shapes"])
        tensors, optimizer = self._universal(groups) if self.is_universal else self._partitioned(groups, held)
        tensors |= self._others(models, tensors)
        refuse_overlap(tensors.values(), self.files, self.folder)
        catalog = Catalog("full state", self.folder, tensors, tuple(self.files))
        return ZeroCheckpoint(
            catalog, optimizer, model["lr_scheduler"], step if is_count(step) else None, self.world_size
        )

    def _partitioned(
        self, groups: Sequence[Shapes], held: Sequence[Mapping[str, Any]]
    ) -> tuple[Tensors, Any]:
        """The parameters, and the optimizer, in flat partitions."""
        flats = [
            self._flat(one["flat"], len(groups), path)
            for one, path in zip(held, self.paths["optim"], strict=True)
        ]
        self.numels = [[flat.shape[0] for flat in rank] for rank in flats]
        self.paddings = held[0]["param_alignment_paddings"]
        layout = self._layout(groups)
        self._check_mappings([one["mappings"] for one in held], groups, layout)
        tensors = {
            name: _gathered(name, shape, layout[name], flats)
            for group in groups
            for name, shape in group.items()
        }
        optimizers = [one["optimizer"] for one in held]
        is_whole = all(type(one) is dict for one in optimizers)
        return tensors, partial(self._optimizer, optimizers, groups, layout) if is_whole else None

    def _check_step(self, optimizers: Sequence[Any], step: Any, skipped: Any) -> None:
        """Compare the optimizers' steps with each other and with the model's. The name of the folder alone proves nothing: the caller chose it."""
        if not optimizers:
            return
        steps = [_steps_of(one) for one in optimizers]
        self._check_same("optim", steps)
        made = next((n for n in map(_number, steps[0]["state"].values()) if n is not None), None)
        if made is None or not is_count(step):
            return
        named = re.fullmatch(r"global_step(\d{1,12})", os.path.basename(self.folder))
        is_other = named and step != int(named[1]) and made != step - (skipped if is_count(skipped) else 0)
        if made > step or is_other:
            raise IntegrityError(
                f"is of step {step}, and the partitions in its folder {os.path.basename(self.folder)} are of step {made:g}. {_HINT}",
                path=self.paths["model"][0],
            )

    def _universal(self, groups: Sequence[Shapes]) -> tuple[Tensors, Any]:
        """The same for a universal checkpoint (``checkpoint/ds_to_universal.py``), which has a file for each state of a parameter."""
        root = join(self.folder, "zero")
        common = self._content(join(root, "optimizer_state.pt"), _of_universal)
        tensors: Tensors = {}
        states: dict[str, dict[str, Any]] = {}
        for k, (name, shape) in ((k, pair) for k, group in enumerate(groups) for pair in group.items()):
            folder = inside(root, name)
            if not is_file(join(folder, "fp32.pt")):
                raise SourceError(f"has no fp32.pt of {brief(name)}", path=folder)
            # ZeRO 3 has no step.pt, only the step of each group.
            states[name] = {key: value for key, value in common["states"].get(k, {}).items() if key == "step"}
            for file in sorted(file for file in names_in(folder) if file.endswith(".pt")):
                key, path = file.removesuffix(".pt"), join(folder, file)
                value = self._content(
                    path, lambda found: found["param"] if type(found) is dict and "param" in found else found
                )
                if isinstance(value, StoredTensor) and key != "step":
                    if value.shape not in (shape, (math.prod(shape),)):
                        raise FormatError(f"has shape {list(value.shape)}, expected {list(shape)}", path=path)
                    chunks = tuple(replace(chunk, box=whole(shape)) for chunk in value.chunks)
                    value = StoredTensor(f"{name}.{key}", value.dtype, shape, chunks)
                states[name][key] = value
            fp32 = states[name].pop("fp32")
            if not isinstance(fp32, StoredTensor):
                raise FormatError("holds no tensor", path=join(folder, "fp32.pt"))
            tensors[name] = replace(fp32, name=name)
        named = partial(_named_groups, common["param_groups"], groups, root)
        return tensors, lambda: {"state": states, "param_groups": named()}

    # -- the files

    def _content(self, path: str, pick: Callable[[Any], Any]) -> Any:
        content, file, archive = read_one_file(path, pick, RANK_NAMES)
        saved_as = f"{archive.saved_as}.pt"
        if saved_as != os.path.basename(path) and ZERO_FILE.fullmatch(saved_as):
            raise FormatError(f"was saved as {saved_as}: the files of ranks are mixed up", path=path)
        self.files.append(file)
        self.sums |= {(path, at): crc for at, crc in archive.checksums.items()}
        return content

    def _complete(self, part: str, ranks: Mapping[int, Any], expected: int) -> None:
        if missing := [rank for rank in range(expected) if rank not in ranks]:
            raise SourceError(
                f"has no file of rank(s) {brief(missing)} of {expected} (*_{part}_states.pt); copy the files of all hosts into one folder",
                path=self.folder,
            )

    def _of_model(self, content: Any) -> dict[str, Any]:
        """What a model's file says about parameters, and its tensors that aren't in flat partitions."""
        module = content.get("module") if type(content) is dict else None
        if type(module) is not dict or type(content.get("param_shapes")) is not list:
            raise FormatError("isn't a model's file of DeepSpeed ZeRO: it has no module, or no param_shapes")
        found = {key: content.get(key) for key in (*_SHARED["model"], "lr_scheduler", "skipped_steps")}
        for key in ("shared_params", "frozen_param_shapes", "frozen_param_fragments"):
            found[key] = content.get(key) or {}
            if type(found[key]) is not dict:
                raise FormatError(f"its {key} are {brief(found[key])}, expected a dict")
        names = found["buffer_names"] if type(found["buffer_names"]) is list else []
        buffers = {name for name in names if type(name) is str}
        # As pairs, so that the order, which decides where parameters are, is compared, too.
        found["param_shapes"] = [[*group.items()] for group in found["param_shapes"] if type(group) is dict]
        flat = {name for group in found["param_shapes"] for name, _ in group}
        # In ZeRO 3 the module has empty tensors in place of parameters. In ZeRO 1 it alone has the frozen ones.
        wanted = buffers if self.is_3 else module.keys() - flat - found["shared_params"].keys()
        return found | {"module": {name: value for name, value in module.items() if name in wanted}}

    def _world_size(self, held: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]) -> int:
        """The number of ranks, which is the same in all files."""
        found = models[0]["dp_world_size"] if self.is_universal else len(held)
        if not is_count(found) or not 0 < found <= _MOST_RANKS:
            raise FormatError(f"is of a run on {brief(found)} ranks", path=self.paths["model"][0])
        said: dict[str, Any] = {}
        for path, one in zip(self.paths["optim"], held, strict=True):
            sizes = one["partition_count"]
            sizes = sizes if type(sizes) is list else [sizes]
            if not sizes or not all(is_count(size) and size == sizes[0] for size in sizes):
                raise FormatError(
                    f"its groups are cut into {brief(sizes)} partitions; expected the same number for each group (MoE isn't supported)",
                    path=path,
                )
            self._complete("optim", dict(enumerate(held)), min(sizes[0], _MOST_RANKS))
            said[path] = sizes[0]
        self._complete("model", dict(enumerate(models)), found if self.is_3 else 1)
        said |= {path: one["dp_world_size"] for path, one in zip(self.paths["model"], models, strict=True)}
        for path, size in said.items():
            if size not in (None, found):
                raise FormatError(
                    f"is of a run on {brief(size)} ranks, and the folder has partitions of {found}", path=path
                )
        return int(found)

    def _check_same(self, part: str, values: Sequence[Any]) -> None:
        Merge(self.paths[part], self.sums, _HINT).merged(values)

    # -- the layout

    def _groups(self, found: Sequence[Any]) -> list[Shapes]:
        """The shapes of each group's parameters."""
        path = self.paths["model"][0]
        for name, shape in (pair for group in found for pair in group):
            numel_of(shape, check_name(name, "the name of a parameter", path), path)
        if len({name for group in found for name, _ in group}) != sum(map(len, found)):
            raise FormatError("two groups have a parameter of the same name", path=path)
        return [{name: tuple(shape) for name, shape in group} for group in found]

    def _flat(self, found: Any, groups: int, path: str) -> list[StoredTensor]:
        if type(found) is not list or len(found) != groups:
            what = len(found) if type(found) is list else brief(found)
            raise FormatError(f"has {what} partitions of {groups} groups of parameters. {_HINT}", path=path)
        return [_vector(one, path) for one in found]

    def _layout(self, groups: Sequence[Shapes]) -> Layout:
        """Where each parameter's elements are. Raises :class:`FormatError` if the partitions don't fit."""
        found: Layout = {}
        for k, group in enumerate(groups):
            at, parts, after = 0, [rank[k] for rank in self.numels], [0] * len(group)
            if type(self.paddings) is list and k < len(self.paddings):
                after = self.paddings[k]
            if type(after) is not list or len(after) != len(group) or not all(map(is_count, after)):
                raise FormatError(
                    f"pads {len(group)} parameters by {brief(after)}", path=self.paths["optim"][0]
                )
            for (name, shape), padding in zip(group.items(), after, strict=True):
                numel = math.prod(shape)
                if self.is_3:
                    found[name] = list(_of_equal_parts(numel, len(parts), k, at))
                    at += -(-numel // len(parts))
                else:
                    found[name] = list(_of_vector(at, at + numel, k, parts))
                    at += numel + padding
            # The last partitions of a vector may be cut where it ends, or padded to a multiple of twice the number of ranks.
            unit = 2 * len(parts)
            fits = (
                parts == [at] * len(parts)
                if self.is_3
                else sum(parts) >= at and -(-at // unit) == -(-sum(parts) // unit)
            )
            if not fits:
                raise FormatError(
                    f"the parameters of its group {k} have {at} elements{' on each rank' * self.is_3}, and the ranks' partitions "
                    f"{brief(parts)}. {_HINT}, or the optimizer was offloaded to NVMe",
                    path=self.folder,
                )
        return found

    def _check_mappings(self, mappings: Sequence[Any], groups: Sequence[Shapes], layout: Layout) -> None:
        """Compare what each rank's file says of its own partitions (``param_slice_mappings``, before ZeRO 3) with the layout."""
        n = len(mappings)
        wanted = _mappings(layout, len(groups), n)
        if None in mappings or mappings == wanted:
            return
        # With round_robin_gradients, DeepSpeed describes the order that a group had before it was dealt out to the ranks.
        dealt = []
        for k, group in enumerate(groups):
            before = [*dict.fromkeys(name for one in mappings for name in (one[k] if k < len(one) else ()))]
            if [name for r in range(n) for name in before[r::n]] == [*group]:
                dealt.append({name: group[name] for name in before})
        if len(dealt) == len(groups) and mappings == _mappings(self._layout(dealt), len(groups), n):
            return
        rank = next(rank for rank, one in enumerate(mappings) if one != wanted[rank])
        raise IntegrityError(
            f"its param_slice_mappings describe other parts than those of rank {rank} by the shapes in "
            f"{os.path.basename(self.paths['model'][0])}. {_HINT}",
            path=self.paths["optim"][rank],
        )

    # -- tensors

    def _others(
        self, models: Sequence[Mapping[str, Any]], known: Mapping[str, StoredTensor]
    ) -> dict[str, StoredTensor]:
        """What isn't in flat partitions: buffers, frozen parameters, and the other names of shared parameters."""
        model, paths = models[0], self.paths["model"]
        found = {name: one for name, one in model["module"].items() if isinstance(one, StoredTensor)}
        for name, one in model["frozen_param_fragments"].items():
            shape = model["frozen_param_shapes"].get(name)
            numel, shape = numel_of(shape, brief(name), paths[0]), tuple(shape)
            if not self.is_3:
                if not isinstance(one, StoredTensor) or one.shape != shape:
                    raise FormatError(
                        f"holds {brief(name)} in another shape than {brief(shape)}", path=paths[0]
                    )
                found[name] = one
                continue
            parts = [
                [_vector(model["frozen_param_fragments"].get(name), path)]
                for model, path in zip(models, paths, strict=True)
            ]
            found[name] = _gathered(name, shape, list(_of_equal_parts(numel, len(parts), 0, 0)), parts)
        for alias, name in model["shared_params"].items():
            if type(name) is str and (one := known.get(name) or found.get(name)) is not None:
                found[alias] = one
        return {
            check_name(name, "the name of a tensor", paths[0]): replace(one, name=name)
            for name, one in found.items()
        }

    def _optimizer(self, found: Sequence[Any], groups: Sequence[Shapes], layout: Layout) -> dict[str, Any]:
        paths = self.paths["optim"]
        # Vectors are a rank's own; the step, other values and settings are the same on all ranks.
        self._check_same("optim", [_without_vectors(one) for one in found])
        state, settings = (found[0].get(key) for key in ("state", "param_groups"))
        if type(state) is not dict:
            raise FormatError("its optimizer isn't stored as a state dict", path=paths[0])
        states: dict[str, dict[str, Any]] = {name: {} for group in groups for name in group}
        for k, group in enumerate(groups):
            own = state.get(k)
            if type(own) is dict and len(own) > _MOST_STATES:
                raise FormatError(
                    f"has {len(own)} states of each parameter, the limit is {_MOST_STATES}", path=paths[0]
                )
            for key, value in own.items() if type(own) is dict else ():
                is_vector = isinstance(value, StoredTensor) and bool(value.shape)
                flats = [
                    {k: self._of_elements(one["state"][k].get(key), key, rank, k)}
                    for rank, one in enumerate(found)
                    if is_vector
                ]
                for name, shape in group.items():
                    states[name][str(key)] = (
                        _gathered(f"{name}.{key}", shape, layout[name], flats) if is_vector else value
                    )
        named = _named_groups(settings, groups, paths[0])
        return {"state": {name: one for name, one in states.items() if one}, "param_groups": named}

    def _of_elements(self, found: Any, key: Any, rank: int, group: int) -> StoredTensor:
        """A state of a rank's partition, which has a value for each element; the padding at the end may be left out, or added."""
        path = self.paths["optim"][rank]
        vector, numel = _vector(found, path), self.numels[rank][group]
        if abs(vector.shape[0] - numel) >= 2 * self.world_size:
            raise FormatError(
                f"the optimizer's state {brief(key)} has {vector.shape[0]} values, and its partition {numel} elements: only optimizers with one "
                f"value for each element can be restored. Load the model, and begin with a new optimizer",
                path=path,
            )
        return vector


def _of_partitions(content: Any) -> dict[str, Any]:
    """The flat partitions in a rank's file, the optimizer's state, and what describes both."""
    held = content.get("optimizer_state_dict") if type(content) is dict else None
    held = held if type(held) is dict else {}
    mappings = held.get("param_slice_mappings")
    mappings = mappings if mappings is None or type(mappings) is list else [mappings]
    flat = held.get("single_partition_of_fp32_groups", held.get("fp32_flat_groups"))  # of ZeRO 3
    if flat is None:
        raise FormatError("isn't a rank's file of DeepSpeed ZeRO: it has no fp32 partitions")
    return {
        **{key: _plain(held.get(key)) for key in _SHARED["optim"]},
        "flat": flat,
        "optimizer": held.get("base_optimizer_state", held.get("optimizer_state_dict")),
        "mappings": mappings and [*map(_addresses, mappings)],
    }


def _of_universal(content: Any) -> dict[str, Any]:
    """What parameters share: the optimizer's groups, and with ZeRO 3 the state of a rank."""
    found = content if type(content) is dict else {}
    inner = found.get("optimizer_state_dict")
    states = inner.get("state") if type(inner) is dict else None
    own = {k: one for k, one in states.items() if type(one) is dict} if type(states) is dict else {}
    return {"param_groups": found.get("param_groups"), "states": own}


def _named_groups(found: Any, groups: Sequence[Shapes], path: str) -> list[dict[str, Any]]:
    """The optimizer's groups with names for the numbers of flat partitions."""
    if type(found) is not list:
        raise FormatError("its optimizer isn't stored as a state dict", path=path)
    named, seen = [], 0
    for one in found:
        numbers = one.get("params") if type(one) is dict else None
        if type(numbers) is not list or not all(is_count(k) and k < len(groups) for k in numbers):
            raise FormatError(f"its optimizer has a group of {brief(numbers)}", path=path)
        if (seen := seen + len(numbers)) > len(groups):
            raise FormatError(f"its optimizer has a partition of {brief(numbers)} twice", path=path)
        of_group = {
            key: value for key, value in one.items() if key != "param_names"
        }  # torch's, for flat partitions
        named.append({**of_group, "params": [name for k in numbers for name in groups[k]]})
    return named


def _steps_of(found: Any) -> dict[str, Any]:
    """The steps of each partition and group in an optimizer's state. In an elastic checkpoint, the state is a list."""
    state, groups = (found.get("state"), found.get("param_groups")) if type(found) is dict else (found, None)
    of_each = state if type(state) is dict else dict(enumerate(state)) if type(state) is list else {}
    return {
        "state": {
            k: {"step": one["step"]} for k, one in of_each.items() if type(one) is dict and "step" in one
        },
        "param_groups": [one.get("step") for one in groups if type(one) is dict]
        if type(groups) is list
        else [],
    }


def _number(found: Mapping[str, Any]) -> float | None:
    """The step in a state; None if it isn't a number."""
    step = found["step"]
    if not isinstance(step, StoredTensor):
        return step if is_count(step) else None
    if step.shape or step.dtype not in _NUMBERS or not step.chunks:
        return None
    with open_file(step.chunks[0].path) as file:
        return float(
            np.frombuffer(file.read(step.chunks[0].offset_bytes, step.nbytes), _NUMBERS[step.dtype])[0]
        )


def _plain(value: Any) -> Any:
    """A value from a pickle; for a member of an enum, its value."""
    return value.args[0] if type(value) is Record and len(value.args) == 1 else value


def _addresses(found: Any) -> dict[Any, tuple[Any, Any]]:
    """The start and the number of elements of each parameter in a partition, from DeepSpeed's ``fragment_address``."""
    states = (
        {name: where.state for name, where in found.items() if type(where) is Record}
        if type(found) is dict
        else {}
    )
    return {name: (s.get("start"), s.get("numel")) for name, s in states.items() if type(s) is dict}


def _mappings(layout: Layout, groups: int, ranks: int) -> list[list[dict[Any, tuple[Any, Any]]]]:
    """What :func:`_addresses` would find for each rank and group."""
    found: list[list[dict[Any, tuple[Any, Any]]]] = [[{} for _ in range(groups)] for _ in range(ranks)]
    for name, runs in layout.items():
        for run in runs:
            found[run.rank][run.group][name] = run.at, run.end - run.begin
    return found


def _without_vectors(found: Any) -> Any:
    if type(found) is dict:
        own = {k: v for k, v in found.items() if not isinstance(v, StoredTensor) or not v.shape}
        return {key: _without_vectors(value) for key, value in own.items()}
    return found


def _vector(found: Any, path: str) -> StoredTensor:
    if not isinstance(found, StoredTensor) or len(found.shape) != 1:
        raise FormatError(
            f"has {brief(getattr(found, 'shape', found))} where the elements of a partition belong, in one dim",
            path=path,
        )
    return found


def _of_vector(begin: int, end: int, group: int, parts: Sequence[int]) -> Iterator[_Run]:
    """The runs of elements ``begin`` to ``end`` of a vector whose consecutive ``parts`` the ranks hold."""
    for rank, (stop, numel) in enumerate(zip(accumulate(parts), parts, strict=True)):
        first, last = max(begin, stop - numel), min(end, stop)
        if first < last:
            yield _Run(first - begin, last - begin, rank, group, first - (stop - numel))


def _of_equal_parts(numel: int, ranks: int, group: int, at: int) -> Iterator[_Run]:
    """The runs of a tensor that is cut into a part for each rank; the last ones may be shorter, or empty."""
    part = -(-numel // ranks)
    for rank in range(ranks):
        if rank * part < numel:
            yield _Run(rank * part, min(numel, (rank + 1) * part), rank, group, at)


def _gathered(name: str, shape: tuple[int, ...], runs: Sequence[_Run], flats: Sequence[Any]) -> StoredTensor:
    """A tensor from its runs in ``flats``: by rank and group."""
    chunks: list[Chunk] = []
    dtypes = {flats[run.rank][run.group].dtype for run in runs} or {"F32"}
    for run in runs:
        flat = flats[run.rank][run.group]
        numel = run.end - run.begin
        if len(dtypes) > 1 or flat.shape[0] < run.at + numel:
            raise FormatError(
                f"{brief(name)} needs elements {run.at} to {run.at + numel} of a partition that has {flat.shape[0]} ({', '.join(sorted(dtypes))})",
                path=flat.chunks[0].path if flat.chunks else None,
            )
        at = flat.chunks[0].offset_bytes + run.at * itemsize(flat.dtype)
        for box in boxes_of_range(run.begin, run.end, shape):
            chunks.append(Chunk(box, flat.chunks[0].path, at))
            at += box.numel * itemsize(flat.dtype)
    return StoredTensor(name, dtypes.pop(), shape, tuple(chunks))
