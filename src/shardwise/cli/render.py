"""Renders tables and trees for people. Text from files is shown as plain text, never as markup."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..catalog.checkpoint import catalog_of_manifest
from ..catalog.open import open_catalog
from ..catalog.pipelines import Component, Pipeline, pipeline_at
from ..catalog.records import Catalog
from ..catalog.weights import Choice
from ..dtypes import itemsize
from ..engine.files import shares_memory
from ..errors import PlanError, ShardwiseError, SourceError, UnsupportedConversionError
from ..fit.pipelines import GATHERED_GROUPS, PipelinePlan, PipelineProof
from ..fit.plan import PlanReport, format_text
from ..format.manifest import (
    MANIFEST_NAME,
    Manifest,
    absent_places,
    describe_part,
    files_by_place,
    ranks_text,
    read_manifest,
)
from ..limits import inside
from ..objects import frozen
from ..operations.host_budget import HostBudget, host_budget
from ..operations.operation import size
from ..operations.printed import Printed, some
from ..quantized.open import Dequantized, dequantized, described
from ..runs.history import RootContents, is_root, steps_below
from ..storage import absolute, is_file, looking_once, stat_of_expected
from ..storage.records import Stat, is_url
from ..tensors.boxes import TensorSpec
from .phases import planned_lines
from .program import Node, tree_of

if TYPE_CHECKING:
    from ..fit.verdict import Search

# ----------------------------------------------------------------------------------------------------
# Describes a path as records: a source, a checkpoint, or a directory of steps. Reads headers and manifests only.


@frozen(kw_only=True)
class SourceContents:
    """The contents of a source."""

    kind: str
    path: str
    files: int
    file_bytes: int
    ignored_files: tuple[str, ...]
    ignored_entries: tuple[str, ...]
    """What a file has next to the model, and isn't read."""
    tensors: int
    tensor_bytes: int
    dtypes: Mapping[str, int]
    """Bytes by stored dtype, largest first."""
    quantized: tuple[Dequantized, ...]
    """Formats of tensors that are stored as codes and scales. A load dequantizes them."""
    quantized_problems: tuple[str, ...]
    """Why a load would refuse them."""
    tree: tuple[Node, ...]


@frozen(kw_only=True)
class GeometryUse:
    """A way of spreading tensors over ranks, and the number of tensors spread in this way."""

    axis_sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    cuts: tuple[str, ...]
    ranks: int
    tensors: int


@frozen(kw_only=True)
class OptimizerState:
    """A kind of optimizer state over all parameters."""

    optimizer: str
    name: str
    dtypes: tuple[str, ...]
    parameters: int
    state_bytes: int


@frozen(kw_only=True)
class PartOfStep:
    """A host's part of a checkpoint that ``Checkpointer(local=True)`` saved."""

    host: str
    place: str
    """The id of the host's directory."""
    ranks: tuple[int, ...]
    files: int
    file_bytes: int
    is_here: bool


@frozen(kw_only=True)
class CheckpointContents:
    """The contents of a checkpoint beyond those of every source."""

    source: SourceContents
    step: int
    run_id: str
    parent_step: int | None
    world_size: int
    geometries: tuple[GeometryUse, ...]
    optimizer_states: tuple[OptimizerState, ...]
    software: Mapping[str, str]
    problems: tuple[str, ...]
    """Files that are lost, or whose size differs from the manifest's."""
    parts: tuple[PartOfStep, ...] = ()
    """Where hosts have saved it to directories of their own."""
    part: str | None = None
    """Of a directory that lacks some of the parts: which are here, and where the others are. It is not damaged."""
    referred: int = 0
    """Frozen tensors of which it holds only digests."""


@frozen(kw_only=True)
class ComponentContents:
    """A component of a pipeline, in one variant of its weights."""

    name: str
    library: str
    class_name: str
    variant: str | None
    files: int
    """Files of weights; 0 for a component without weights, such as a tokenizer."""
    tensors: int
    tensor_bytes: int
    dtypes: Mapping[str, int]
    """Bytes by stored dtype, largest first."""
    problem: str
    """Why it can't be read; empty if it can."""


@frozen(kw_only=True)
class PipelineContents:
    """The contents of a diffusers pipeline."""

    kind: str = "diffusers pipeline"
    path: str
    class_name: str
    components: tuple[ComponentContents, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What can't be read, by component."""
        return tuple(f"{one.name}: {one.problem}" for one in self.components if one.problem)


Inspection = SourceContents | CheckpointContents | RootContents | PipelineContents


def contents_of(path: str) -> Inspection:
    """Describe ``path``, or the model with this id in the hub's cache. Raises :class:`SourceError` if it can't be read
    or has no known form.
    """
    path = _local(path)
    with looking_once(path):
        if is_root(path):
            return steps_below(path)
        if is_file(os.path.join(path, MANIFEST_NAME)):
            return _checkpoint(path)
        if (pipeline := pipeline_at(path)) is not None:
            return _pipeline(path, pipeline)
        try:
            catalog = open_catalog(path)
        except SourceError as error:
            if below := _roots_below(path):
                raise SourceError(
                    f"contains directories of checkpoints, but isn't a model or a checkpoint itself; give one of them: {', '.join(below)}",
                    path=path,
                ) from error
            raise
        return _source(catalog, path, len(catalog.files), sum(f.nbytes for f in catalog.files))


def _roots_below(path: str) -> list[str]:
    """The directories of checkpoints in a local directory, the first few."""
    if is_url(path) or not os.path.isdir(path):
        return []
    below = (os.path.join(path, name) for name in sorted(os.listdir(path))[:1000])
    return list(itertools.islice((one for one in below if os.path.isdir(one) and is_root(one)), 5))


def _local(path: str) -> str:
    """The path itself, or the snapshot in the hub's cache if it can only be an id."""
    if is_url(path):
        return absolute(path)
    if os.path.lexists(path):
        return path
    from ..models.hub import HubOptions, find_model, pipeline_on_hub
    from ..ranks.ranks import Ranks

    options = HubOptions(local_files_only=True)
    pipeline = pipeline_on_hub(path, options)
    return find_model(path, options, Ranks()) if pipeline is None else pipeline[0]


def to_json(contents: Inspection) -> dict[str, Any]:
    """The contents as plain JSON values; a checkpoint's source fields and its own side by side."""
    document = asdict(contents)
    return {**document.pop("source", {}), **document}


def _source(catalog: Catalog, path: str, files: int, file_bytes: int) -> SourceContents:
    formats, problems = tuple[Dequantized, ...](), tuple[str, ...]()
    try:
        formats = described(dequantized(catalog).coded.values())
    except PlanError as error:
        problems = error.problems or (str(error),)
    except UnsupportedConversionError as error:
        problems = (str(error),)
    return SourceContents(
        kind=catalog.kind,
        path=path,
        files=files,
        file_bytes=file_bytes,
        ignored_files=catalog.ignored_files,
        ignored_entries=catalog.ignored_entries,
        tensors=len(catalog.tensors),
        tensor_bytes=catalog.nbytes,
        dtypes=_dtypes(catalog),
        quantized=formats,
        quantized_problems=problems,
        tree=tree_of(catalog.tensors.values()),
    )


def _dtypes(catalog: Catalog) -> dict[str, int]:
    """Bytes by stored dtype, largest first."""
    found: dict[str, int] = {}
    for tensor in catalog.tensors.values():
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _pipeline(path: str, pipeline: Pipeline) -> PipelineContents:
    components = [
        _component(one, variant)
        for one in pipeline.components.values()
        for variant in one.variants or (None,)
    ]
    return PipelineContents(path=path, class_name=pipeline.class_name, components=tuple(components))


def _component(one: Component, variant: str | None) -> ComponentContents:
    catalog, problem = None, "" if one.is_here else "lost: there is no such folder"
    if one.variants:
        try:
            catalog = open_catalog(one.folder, choice=Choice(variant=variant))
        except ShardwiseError as error:
            problem = str(error)
    return ComponentContents(
        name=one.name,
        library=one.library,
        class_name=one.class_name,
        variant=variant,
        files=0 if catalog is None else len(catalog.files),
        tensors=0 if catalog is None else len(catalog.tensors),
        tensor_bytes=0 if catalog is None else catalog.nbytes,
        dtypes={} if catalog is None else _dtypes(catalog),
        problem=problem,
    )


# ----------------------------------------------------------------------------------------------------
# Checkpoints


#: A cut in words, by its kind.
_CUTS = {
    "replicate": "replicate",
    "shard": "shard dim {0.dim}",
    "strided": "shard dim {0.dim} in {0.split_factor}",
}


def _checkpoint(path: str) -> CheckpointContents:
    manifest = read_manifest(path)
    absent, names_of = absent_places(path, manifest), files_by_place(manifest)
    parts = tuple(
        PartOfStep(
            host=place.host,
            place=place.id,
            ranks=place.ranks,
            files=len(names),
            file_bytes=sum(manifest.files[name].nbytes for name in names),
            is_here=number not in absent,
        )
        for number, (place, names) in enumerate(zip(manifest.places, names_of, strict=False))
    )
    uses = [t.geometry for tensors in manifest.models.values() for t in tensors.values()]
    geometries = tuple(
        GeometryUse(
            axis_sizes=geometry.axis_sizes,
            axis_names=geometry.axis_names,
            cuts=tuple(_CUTS[cut.kind].format(cut) for cut in geometry.cuts),
            ranks=len(geometry.ranks),
            tensors=uses.count(index),
        )
        for index, geometry in enumerate(manifest.geometries)
    )
    file_bytes = sum(f.nbytes for f in manifest.files.values())
    return CheckpointContents(
        source=_source(_models(path, manifest), path, len(manifest.files), file_bytes),
        step=manifest.step,
        run_id=manifest.run_id,
        parent_step=manifest.parent_step,
        world_size=manifest.world_size,
        geometries=geometries,
        optimizer_states=tuple(_optimizer_states(manifest)),
        software=dict(manifest.software),
        problems=tuple(_wrong_files(path, manifest)),
        parts=parts,
        part=describe_part(path, manifest),
        referred=sum(t.refers for tensors in manifest.models.values() for t in tensors.values()),
    )


def _models(path: str, manifest: Manifest) -> Catalog:
    """The tensors of every model; with several models, under the model's name."""
    catalogs = {name: catalog_of_manifest(path, manifest, name) for name in manifest.models}
    first, *others = catalogs.values()
    if not others:
        return first
    tensors = {
        f"{model}.{t.name}": replace(t, name=f"{model}.{t.name}")
        for model, catalog in catalogs.items()
        for t in catalog.tensors.values()
    }
    return replace(first, tensors=tensors)


def _optimizer_states(manifest: Manifest) -> Iterable[OptimizerState]:
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for tensors in manifest.models.values():
        for t in tensors.values():
            for optimizer, states in t.states.items():
                for name, state in states.items():
                    shape = t.shape_of(state) if state.packed is None else ()
                    one = TensorSpec(state.dtype, shape).nbytes
                    found.setdefault((optimizer, name), []).append((state.dtype, one))
    for (optimizer, name), held in sorted(found.items()):
        yield OptimizerState(
            optimizer=optimizer,
            name=name,
            dtypes=tuple(sorted({dtype for dtype, _ in held}, key=lambda d: (-itemsize(d), d))),
            parameters=len(held),
            state_bytes=sum(nbytes for _, nbytes in held),
        )


def _wrong_files(path: str, manifest: Manifest) -> Iterable[str]:
    absent, names_of = set(absent_places(path, manifest)), files_by_place(manifest)
    if len(absent) == len(names_of):
        yield f"none of its files are here; it {describe_part(path, manifest)}"
        return
    for name in [name for number, names in enumerate(names_of) if number not in absent for name in names]:
        entry, file = manifest.files[name], inside(path, name)
        try:
            found = stat_of_expected(file) if is_url(file) else Stat(os.stat(file).st_size)
        except OSError as error:
            yield f"{name}: lost ({error.strerror})"
            continue
        if found is None:
            yield f"{name}: lost"
        elif found.nbytes != entry.nbytes:
            yield f"{name}: {found.nbytes} bytes, expected {entry.nbytes}: truncated or overwritten"


# ----------------------------------------------------------------------------------------------------

_GREEN, _YELLOW, _RED = "green", "yellow", "bold red"


# ----------------------------------------------------------------------------------------------------
# inspect


def show_contents(out: Console, contents: Inspection) -> None:
    """Print the result of ``inspect``."""
    if isinstance(contents, RootContents):
        _show_root(out, contents)
        return
    if isinstance(contents, PipelineContents):
        _show_pipeline(out, contents)
        return
    source = contents.source if isinstance(contents, CheckpointContents) else contents
    facts = {
        "path": source.path,
        "kind": source.kind,
        "files": f"{source.files}, {size(source.file_bytes)}",
        "tensors": f"{source.tensors}, {size(source.tensor_bytes)}",
        "quantized": some(map(format_text, source.quantized)),
        "not whole": some(source.quantized_problems),
        "dtypes": ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in source.dtypes.items()) or "-",
        "ignored files": some(source.ignored_files),
        "not read": f"next to the model: {some(source.ignored_entries)}" if source.ignored_entries else "",
    }
    _facts(out, facts, _checkpoint_facts(contents) if isinstance(contents, CheckpointContents) else {})
    tree = Tree(_line("tensors", size(source.tensor_bytes)))
    _grow(tree, source.tree)
    out.print(tree)
    if isinstance(contents, CheckpointContents):
        show_problems(out, contents.problems)
        if contents.part and not contents.problems:
            out.print(Text(plain(f"not damaged: it {contents.part}"), _YELLOW), soft_wrap=True)


def _grow(tree: Tree, nodes: Iterable[Node]) -> None:
    for node in nodes:
        while node.dtype is None and len(node.children) == 1 and node.copies == 1:
            (child,) = node.children
            name = f"{node.name}.{_folded(child)}"
            node = replace(child, name=name, copies=1, tensors=node.tensors, nbytes=node.nbytes)
        detail = size(node.nbytes)
        if node.dtype is not None:
            detail = f"{node.dtype} {list(node.shape or ())}  {detail}"
        branch = tree.add(_line(_folded(node), detail))
        _grow(branch, node.children)


def _folded(node: Node) -> str:
    return f"[{node.name}] x {node.copies}" if node.copies > 1 else node.name


def _line(name: str, detail: str) -> Text:
    return Text.assemble((plain(name), "bold"), "  ", (plain(detail), "dim"))


def _checkpoint_facts(c: CheckpointContents) -> dict[str, str]:
    facts = {
        "step": str(c.step),
        "after step": "-" if c.parent_step is None else str(c.parent_step),
        "run": c.run_id,
        "ranks": str(c.world_size),
        "software": ", ".join(f"{name} {version}" for name, version in c.software.items()),
    }
    for number, g in enumerate(c.geometries):
        axes = zip(g.axis_names, g.axis_sizes, g.cuts, strict=True)
        cuts = ", ".join(f"{name} {n}: {cut}" for name, n, cut in axes)
        facts[f"geometry {number}"] = f"{g.tensors} tensors, {cuts}"
    if c.referred:
        facts["refers to"] = f"{c.referred} frozen base tensors, by digest"
    facts["parts"] = some(
        f"{number} of host {one.host} (ranks {ranks_text(one.ranks)}, {one.files} files, {size(one.file_bytes)})"
        + ("" if one.is_here else ": not here")
        for number, one in enumerate(c.parts, 1)
    )
    for s in c.optimizer_states:
        facts[f"{s.optimizer}.{s.name}"] = (
            f"{', '.join(s.dtypes)}, {s.parameters} parameters, {size(s.state_bytes)}"
        )
    return facts


def _show_root(out: Console, root: RootContents) -> None:
    _facts(out, {"path": root.path, "kind": "directory of checkpoints", "steps": str(len(root.steps))})
    history = sorted((*root.steps, *root.set_aside), key=lambda s: (-s.step, s.fate != "published"))
    if history:
        is_told = any(s.fate != "published" for s in history)
        is_ours = any(s.run_id for s in history)
        ours = (">ranks", ">parent", "run") if is_ours else ()
        table = _table("step", "valid", *["what"] * is_told, "written", ">size", *ours)
        for s in history:
            parent = "-" if s.parent_step is None else str(s.parent_step)
            row = [
                *[s.fate] * is_told,
                (s.written or "-")[:16].replace("T", " "),
                "-" if s.file_bytes is None else size(s.file_bytes),
                *([str(s.world_size or "-"), parent, (s.run_id or "-")[:8]] if is_ours else []),
            ]
            valid = Text("not checked") if s.ok is None else _verdict(s.ok, s.part)
            table.add_row(str(s.step), valid, *(Text(plain(cell)) for cell in row))
        out.print(table)
        if any(s.ok for s in history):
            out.print(Text("ok: manifest, headers, and sizes agree; run verify to check every byte", "dim"))
        if any(s.ok is None for s in history):
            out.print(Text("not checked: no checksums; shardwise doctor looks for missing files", "dim"))
    for s in history:
        if s.problem:
            out.print(Text(plain(f"{os.path.basename(s.path)}: {s.problem}"), _RED), soft_wrap=True)
    if part := next((s for s in history if s.part), None):  # the others have the same hosts, as a rule
        out.print(Text(plain(f"{os.path.basename(part.path)}: {part.part}"), _YELLOW), soft_wrap=True)
    if root.leftovers:
        out.print(
            Text(plain(f"leftovers from interrupted saves: {', '.join(root.leftovers)}")), soft_wrap=True
        )
    if root.missing:
        out.print(Text(plain(root.missing)), soft_wrap=True)
    if not root.steps:
        out.print(Text("no published step", _RED))


def _show_pipeline(out: Console, pipeline: PipelineContents) -> None:
    facts = {"path": pipeline.path, "kind": pipeline.kind, "class": pipeline.class_name}
    _facts(out, facts, {"tensors": size(sum(one.tensor_bytes for one in pipeline.components))})
    table = _table("component", "library", "class", "variant", ">tensors", ">size", "dtypes")
    for one in pipeline.components:
        dtypes = ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in one.dtypes.items())
        counts = (str(one.tensors), size(one.tensor_bytes)) if one.files else ("-", "-")
        names = (one.name, one.library, one.class_name, one.variant or "-")
        table.add_row(*map(plain, names), *counts, dtypes or "-")
    out.print(table)
    show_problems(out, pipeline.problems)


# ----------------------------------------------------------------------------------------------------
# plan


def _verdict_of(report: PlanReport) -> Text:
    """Whether the run fits."""
    verdict, run = report.verdict, report.run
    assert verdict is not None
    assert run is not None
    if verdict.outcome == "fits":
        needs = f"each device needs at most {size(run.device_bytes)}, each host {size(run.host_bytes)}"
        return Text(f"Fits: {needs}.", _GREEN)
    need = verdict.binds[0]
    text = (
        f"Does not fit: {_the(need.phase)} needs up to {size(need.needed_bytes)} per {need.where}, mostly for "
        f"{_NAMED_AMOUNTS.get(need.largest, need.largest)}; the {need.where} has {size(need.limit_bytes)}."
    )
    if not verdict.changes:
        text += " None of the changes that were tried would make it fit."
    return Text(text, _RED)


def _the(phase: str) -> str:
    """A phase in a sentence: the async save."""
    return " ".join(["the", *reversed(phase.split(", "))])


#: Amounts of a phase whose short name says too little without their table.
_NAMED_AMOUNTS = {
    "gathered": "gathered parameters",
    "reduced": "gradients that are being reduced",
    "staging": "staging buffers",
    "process": "the process itself",
    "context": "the device's context",
}


def _answer(search: Search) -> Text:
    """How many devices a run needs, and what binds."""
    below = search.below
    why = ""
    if below is not None:
        need = below.binds[0]
        largest = _NAMED_AMOUNTS.get(need.largest, need.largest)
        why = f"{below.ranks} would need {size(need.needed_bytes)} each in {_the(need.phase)}, mostly for {largest}"
    if search.ranks is None:
        assert below is not None
        return Text(f"no number of {size(below.binds[0].limit_bytes)} GPUs is enough: {why}", _RED)
    found = next(one for one in search.tried if one.ranks == search.ranks)
    hosts = f", {search.ranks // 8} hosts of 8" if search.ranks > 8 else ""
    changed = ""
    if search.unchanged is not None:
        more = f"{size(search.unchanged.needed_bytes)} ({search.unchanged.largest})"
        changed = f", with {search.change} (without it: {more} on any number of GPUs)"
    text = f"{search.ranks} GPU{'s' * (search.ranks > 1)}{hosts}{changed}: each needs at most {size(found.device_bytes)}"
    return Text(f"{text}; {why}" if why else text, _GREEN)


def show_plan(out: Console, report: PlanReport, host: ThisHost | None, *, is_own_dtype: bool) -> None:
    """Print the result of ``plan``: the answer, what was planned, the model, what each rank holds and reads, and whether a load fits on this
    host."""
    if report.search is not None:
        out.print(_answer(report.search), soft_wrap=True)
    has_verdict = report.verdict is not None and (report.search is None or report.search.ranks is None)
    if has_verdict:
        out.print(_verdict_of(report), soft_wrap=True)
    out.print(Text("\n".join(planned_lines(report, is_own_dtype=is_own_dtype))), soft_wrap=True)
    if has_verdict and report.verdict is not None:
        changes = report.verdict.changes
        if changes:
            out.print(Text("It would fit with one of these changes:", _YELLOW))
        for change in changes:
            taken = f"{size(change.device_bytes)} per device, {size(change.host_bytes)} per host"
            out.print(Text(f"  {change.what}: {taken}"), soft_wrap=True)
    _facts(
        out,
        report.rows(),
        {}
        if host is None
        else {
            "this host": str(host.budget),
            "loading here": f"needs {size(host.needed_bytes)} for {host.ranks} ranks on {host.device}",
        },
        apart=("verdict", "a rank holds"),
    )
    in_store = () if report.store is None else report.store.per_rank
    asked = {one.rank: (str(one.requests), size(one.nbytes)) for one in in_store}
    more = (">requests", ">asks for") if asked else ()
    table = _table(">rank", ">holds", ">reads", ">staging", *more)
    shown = [
        (
            size(cost.shard_bytes),
            size(cost.bytes_read),
            size(cost.staging_bytes),
            *asked.get(cost.rank, ()),
        )
        for cost in report.per_rank
    ]
    for numbers, alike in groupby(zip(report.per_rank, shown, strict=True), key=lambda one: one[1]):
        ranks = [cost.rank for cost, _ in alike]
        is_run = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
        for label in [f"{ranks[0]}-{ranks[-1]}"] if is_run else map(str, ranks):
            table.add_row(label, *numbers)
    out.print(table)
    if not report.is_every_rank:
        out.print(Text("only the ranks that hold the most and the least are shown"))
    left = "and every stored tensor is used"
    if report.unused:
        left += " except those declared unused"
    out.print(Text(f"verified: every element that a rank holds is read exactly once, {left}", _GREEN))
    if host is not None and not host.fits:
        warning = (
            f"warning: loading {host.ranks} ranks on {host.device} of this host needs {size(host.needed_bytes)} of its memory, but "
            f"only {size(host.budget.free_bytes)} is free; use more hosts (--nodes) or devices, or raise the limit"
        )
        out.print(Text(warning, _YELLOW), soft_wrap=True)


def show_pipeline_plan(out: Console, report: PipelinePlan, *, given: str) -> None:
    """Print the result of ``plan`` of a pipeline. ``given``: further arguments of ``load_pipeline``, as Python."""
    limit, shard = report.device_limit_bytes, report.shard
    if limit is not None and shard is None:
        text = f"Does not fit: on {report.ranks} rank{'s' * (report.ranks > 1)}, each needs at least {size(report.least_bytes)} of {size(limit)}."
        out.print(Text(text, _RED), soft_wrap=True)
    elif shard is not None:
        out.print(
            Text(
                f"Fits with {len(shard)} of {len(report.components)} models sharded: {size(report.held_bytes(shard))} on each of {report.ranks} rank{'s' * (report.ranks > 1)}.",
                _GREEN,
            )
        )
    _facts(out, report.rows(), apart=("shard",))
    table = _table(
        "model", "class", "dtypes", ">whole", ">sharded", ">largest group", *["load"] * (limit is not None)
    )
    for one in report.components:
        numbers = map(size, (one.whole_bytes, one.shard_bytes, one.gathered_bytes))
        load = "-" if shard is None else "sharded" if one.name in shard else "whole"
        table.add_row(
            one.name, one.class_name, ", ".join(one.dtypes), *numbers, *[load] * (limit is not None)
        )
    out.print(table)
    if shard is not None:
        line = f"sw.load_pipeline({report.path!r}, mesh, shard={shard!r}{given})"
        out.print(Text(f"To load it: {line}", _GREEN), soft_wrap=True)
    elif limit is None:
        out.print(Text("To see which models to shard, add --fit with the memory of one device."))
    out.print(
        Text(
            f"Only weights are counted, and {GATHERED_GROUPS} times the largest FSDP2 group of a sharded model while it runs. "
            f"Activations aren't: leave memory for them."
        ),
        soft_wrap=True,
    )


# ----------------------------------------------------------------------------------------------------
# verify, export


def show_pipeline_proof(out: Console, report: PipelineProof) -> None:
    """Print the result of ``verify`` of a pipeline."""
    checked = (
        "indexes, headers, sizes, and the tensors that each class wants; published weights have no checksums"
    )
    _facts(out, report.rows(), {"checked": checked}, apart=("problems",))
    show_problems(out, report.problems)
    out.print(_verdict(not report.problems))


def show_verify(out: Console, report: Any) -> None:
    """Print the result of ``verify`` for one checkpoint (a ``VerifyReport``)."""
    more = {}
    if report.referred:
        more["not checked"] = f"{report.referred} frozen base tensors; it only stores their digests"
    _facts(out, report.rows(), more, apart=("problems", "part", "referred"))
    show_problems(out, report.problems)
    if report.part:
        out.print(Text(plain(f"not fully verified: it {report.part}"), _YELLOW), soft_wrap=True)
    out.print(_verdict(not report.problems, report.part))


#: Changed tensors that ``diff`` shows without ``--all``.
_MOST_CHANGES = 20


def show_diff(out: Console, report: Any, *, every: bool) -> None:
    """Print the result of ``diff`` (a ``DiffReport``): counts, then the tensors that changed most, or ``every`` one."""
    changed = sorted(
        report.changed, key=lambda one: (-one.relative if one.relative == one.relative else 0.0, one.name)
    )
    more = {}
    if changed:
        most = max((one.relative for one in changed if one.relative == one.relative), default=None)
        by = "" if most is None else f", by at most {most:.3g} of their norm"
        more["changed"] = f"{len(changed)} tensors{by}"
    title = {"path": f"{report.first} -> {report.second}"}
    _facts(out, title, {**report.rows(), **more}, apart=("first", "second"))
    if changed:
        shown = changed if every else changed[:_MOST_CHANGES]
        table = _table("changed", "what", ">elements", ">largest", ">relative")
        for change in shown:
            numbers = (f"{change.elements:,}", f"{change.largest:.3g}", f"{change.relative:.3g}")
            table.add_row(plain(change.name), change.what, *numbers)
        out.print(table)
        if len(shown) < len(changed):
            out.print(f"the {len(shown)} that changed most; --all shows all {len(changed)}")
    same = "no differences in what was compared" if report.not_compared else "no differences"
    out.print(Text(same, _GREEN) if report.ok else Text("they differ", _RED))


def show_problems(out: Console, problems: Iterable[str]) -> None:
    """A line for each finding."""
    for problem in problems:
        out.print(Text(plain(f"problem: {problem}"), _RED), soft_wrap=True)


def show_report(out: Console, report: Printed) -> None:
    """Print the result of ``copy`` or ``convert``."""
    _facts(out, report.rows())


def show_export(out: Console, report: Any) -> None:
    """Print the result of ``export`` (an ``ExportReport``)."""
    more = {}
    if report.as_source is not None:
        origin = report.as_source
        more["from the source"] = f"{origin.copied + len(origin.not_in_model)} tensors, which did not change"
        for rule in origin.requantized:
            more[f"quantized again ({len(rule.names)})"] = f"{some(rule.names)}; {rule.reference}"
        more["changed, plain"] = some(origin.written)
    if not any(
        os.path.isfile(os.path.join(report.path, name)) for name in ("config.json", "model_index.json")
    ):
        more["no config.json"] = (
            "the source has none, so from_pretrained can't open OUT, and tensors keep their names; export again with "
            "--config DIR, the directory of the model's config.json"
        )
    _facts(out, report.rows(), more, apart=("as source",))


# ----------------------------------------------------------------------------------------------------
# Pieces


def _facts(
    out: Console,
    facts: Mapping[str, str],
    more: Mapping[str, str] | None = None,
    *,
    apart: Collection[str] = (),
) -> None:
    """The path as a title, and labeled lines under it, without empty ones and those that are shown ``apart``."""
    out.print(Text(plain(facts.get("path", "")), "bold"), soft_wrap=True)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in {**facts, **(more or {})}.items():
        if value and label not in ("path", *apart):
            grid.add_row(Text(plain(label)), Text(plain(value)))
    out.print(grid)


def _table(*columns: str) -> Table:
    """A table; columns whose title starts with ``>`` are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def _verdict(ok: bool, part: str | None = None) -> RenderableType:
    """``part``: what it is a part of, which is well and not whole."""
    if ok and part:
        return Text("ok, a part", _YELLOW)
    return Text("ok", _GREEN) if ok else Text("damaged", _RED)


def plain(text: str) -> str:
    """Text without control characters: text from a file can't move the cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# ----------------------------------------------------------------------------------------------------
# The host that ``shardwise plan`` runs on: its memory, and what a load would take of it.


@frozen(kw_only=True)
class ThisHost:
    """The memory of this host, and the need of a load whose ranks run here."""

    budget: HostBudget
    ranks: int
    """Ranks of the load that run on one host."""
    device: str
    """Type of the devices that a load here fills."""
    needed_bytes: int
    """Host memory of these ranks at the peak of the load, without what their processes take before it."""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget.free_bytes

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "fits": self.fits}


def nodes_like_this(ranks: int) -> int:
    """How many hosts with the devices of this one ``ranks`` need, a device each; 1 where there are no devices."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        return 1
    return -(-ranks // torch.accelerator.device_count())


def this_host(report: PlanReport, ranks: int) -> ThisHost | None:
    """The need of ``ranks`` ranks of a planned load on this host; None if the system does not report its memory."""
    budget = host_budget()
    if budget is None:
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ThisHost(
        budget=budget,
        ranks=ranks,
        device="cpu" if accelerator is None else accelerator.type,
        needed_bytes=report.host_bytes(ranks, shards=accelerator is None or shares_memory(accelerator)),
    )
