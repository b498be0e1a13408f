"""The ordinary load of an architecture, and what of another model or of exported files is not like it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.architectures import Architecture, write_checkpoint
from benchmarks.sweeping.rows import Row

__all__ = ["Reference", "differences", "export_differences", "make_reference"]


@dataclass(slots=True)
class Reference:
    """What ``from_pretrained`` gives, and what it says about the checkpoint."""

    directory: Path
    tensors: dict[str, torch.Tensor]
    kinds: dict[str, tuple[str, bool]]
    """Parameter or buffer, and ``requires_grad``, by name."""
    ties: set[tuple[str, str]]
    missing: list[str]
    unexpected: list[str]
    conversions: tuple[str, ...]
    has_tp_plan: bool
    generation: dict[str, Any] | None
    stored: dict[str, torch.Tensor]
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    """What ``from_pretrained`` makes something else of, as it was saved."""
    half: Reference | None = None
    """The same in bf16, of diffusers."""


def make_reference(architecture: Architecture, directory: Path, dtype: torch.dtype) -> tuple[Row, Reference]:
    """Write the checkpoint, load it the ordinary way, and compare with what was saved."""
    row = Row(architecture.model_type, architecture.class_name, library=architecture.library)
    model, small = write_checkpoint(architecture, directory, dtype)
    row.parameters = small.parameters
    if architecture.library == "diffusers":
        return row, diffusers_reference(architecture, row, model, directory)
    reference = ordinary_load(architecture, directory)
    row.conversions = reference.conversions
    if architecture.saved_as:
        return row, bare_reference(architecture, row, reference)
    # from_pretrained makes every loaded parameter trainable, also those that the class freezes (5.23). Those
    # of construction are right, as in the library's own distributed load.
    built = kinds_of(model)
    thawed = [n for n, kind in built.items() if reference.kinds.get(n) != kind]
    if thawed:
        row.notes.append(
            f"{len(thawed)} parameter{'s' * (len(thawed) > 1)} that the class freezes and from_pretrained does not"
        )
    reference.kinds = built
    if reference.missing:
        row.notes.append(f"not saved by the library: {', '.join(reference.missing[:3])}")
    if reference.unexpected:
        row.notes.append(f"saved but not loaded by the library: {', '.join(reference.unexpected[:3])}")
    unsaved = model._keys_to_ignore_on_save or ()
    reference.changed = {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in reference.missing
        and not any(re.search(pattern, name) for pattern in unsaved)
        and not same_bits(tensor.to(reference.tensors[name].dtype), reference.tensors[name])
    }
    if reference.changed:
        names = ", ".join(list(reference.changed)[:3])
        row.ordinary = f"not handled: from_pretrained changes {len(reference.changed)} tensors: {names}"
    lost = [n for n in reference.missing if n in model.state_dict()]
    if lost and reference.unexpected:
        # What it doesn't find it makes up: nothing is left to compare with.
        raise ValueError(
            f"from_pretrained does not find {len(lost)} tensors that were saved: {', '.join(lost[:3])}"
        )
    return row, reference


def bare_reference(architecture: Architecture, row: Row, reference: Reference) -> Reference:
    """Of a bare model, from the checkpoint of one with a head: what belongs to the head is left over."""
    row.notes.append(f"from the checkpoint of {architecture.saved_as}")
    if reference.missing:
        raise ValueError(f"{architecture.saved_as} has no {', '.join(reference.missing[:3])}")
    config = architecture.model_class.config_class.from_pretrained(reference.directory)
    reference.kinds = kinds_of(architecture.model_class(config))
    reference.unexpected = ["*"]
    return reference


def diffusers_reference(architecture: Architecture, row: Row, model: nn.Module, directory: Path) -> Reference:
    """Of a model of diffusers, in fp32 and in bf16; what ``from_pretrained`` gives counts, also where it isn't what was saved."""
    if next(model.parameters(), None) is None:
        raise ValueError("a model without parameters")
    reference = diffusers_load(architecture, directory, None)
    reference.half = diffusers_load(architecture, directory, torch.bfloat16)
    saved = model.state_dict()
    if changed := [
        n for n, t in saved.items() if not same_bits(t.to(reference.tensors[n].dtype), reference.tensors[n])
    ]:
        row.notes.append(f"from_pretrained changes {len(changed)} tensors: {', '.join(changed[:3])}")
    parameters = dict(model.named_parameters())
    kept = [n for n in parameters if reference.half.tensors[n].dtype == torch.float32]
    if kept:
        row.notes.append(f"{len(kept)} of {len(parameters)} parameters stay in fp32")
    return reference


def diffusers_load(architecture: Architecture, directory: Path, dtype: torch.dtype | None) -> Reference:
    """``from_pretrained`` of diffusers and what it reports."""
    load = architecture.model_class.from_pretrained
    model, report = load(directory, torch_dtype=dtype, output_loading_info=True, local_files_only=True)
    found = _reference(model, report, directory)
    if unfilled := [n for n, t in found.tensors.items() if t.is_meta]:
        raise ValueError(f"from_pretrained leaves {len(unfilled)} tensors on meta: {', '.join(unfilled[:3])}")
    return found


def ordinary_load(architecture: Architecture, directory: Path) -> Reference:
    """``from_pretrained`` and what it reports."""
    load = architecture.model_class.from_pretrained
    try:
        model, report = load(directory, output_loading_info=True, local_files_only=True)
    except AttributeError:
        # Classes for decisions can't report (5.23); what is missing then shows as a failure of ours.
        model = load(directory, local_files_only=True)
        report = {"mismatched_keys": (), "missing_keys": (), "unexpected_keys": ()}
    return replace(
        _reference(model, report, directory),
        conversions=conversions_of(model),
        has_tp_plan=bool(model.tp_plan),
        generation=model.generation_config.to_dict() if model.can_generate() else None,
    )


def _reference(model: Any, report: Mapping[str, Any], directory: Path) -> Reference:
    """What both libraries' loads give. Raises :class:`ValueError` for shapes that don't fit."""
    if report["mismatched_keys"]:
        raise ValueError(f"from_pretrained finds shapes that don't fit: {report['mismatched_keys']}")
    tensors = tensors_of(model)
    return Reference(
        directory=directory,
        tensors={n: t.detach() for n, t in tensors.items()},
        kinds=kinds_of(model),
        ties=ties_of(tensors),
        missing=sorted(report["missing_keys"]),
        unexpected=sorted(report["unexpected_keys"]),
        conversions=(),
        has_tp_plan=False,
        generation=None,
        stored=stored_tensors(directory),
    )


def conversions_of(model: Any) -> tuple[str, ...]:
    """Kinds of the conversions that a load used."""
    found: Counter[str] = Counter()
    for used in getattr(model, "_weight_conversions", None) or ():
        operations = getattr(used, "operations", None)
        if operations is None:
            kind = type(used).__name__
            found["rename" if kind == "WeightRenaming" else kind] += 1
        else:
            found[" + ".join(_operation(o) for o in operations)] += 1
    return tuple(sorted(found))


def _operation(operation: Any) -> str:
    dims = [
        str(getattr(operation, a))
        for a in ("dim", "dim0", "dim1", "stack_dim", "concat_dim")
        if hasattr(operation, a)
    ]
    return f"{type(operation).__name__}({', '.join(dims)})"


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files."""
    from safetensors.torch import load_file

    return {n: t for file in sorted(directory.glob("*.safetensors")) for n, t in load_file(file).items()}


# ----------------------------------------------------------------------------------------------------
# Comparing


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under every name, persistent or not."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def kinds_of(model: nn.Module) -> dict[str, tuple[str, bool]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        n: ("parameter" if n in parameters else "buffer", t.requires_grad)
        for n, t in tensors_of(model).items()
    }


def ties_of(tensors: dict[str, torch.Tensor]) -> set[tuple[str, str]]:
    """Pairs of names that are one object."""
    by_object: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_object.setdefault(id(tensor), []).append(name)
    return {pair for names in by_object.values() for pair in combinations(sorted(names), 2)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*as_bytes)


def differences(model: Any, reference: Reference) -> list[str]:
    """What of a sharded model, put together, is not as in the ordinary one. Collective."""
    found, expected = tensors_of(model), reference.tensors
    problems = []
    if list(found) != list(expected):
        odd = sorted(set(found) ^ set(expected))
        problems.append(f"names: {odd[:4] if odd else 'another order'}")
    if (ties := ties_of(found)) != reference.ties:
        problems.append(f"ties: {sorted(ties ^ reference.ties)[:3]}")
    if (kinds := kinds_of(model)) != reference.kinds:
        problems.append(f"kinds: {[n for n in kinds if kinds[n] != reference.kinds.get(n)][:3]}")
    different = []
    whole: dict[int, torch.Tensor] = {}
    for name, tensor in found.items():
        if id(tensor) not in whole:
            whole[id(tensor)] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        # Where the ordinary load changes what is stored, what is stored counts.
        mine, theirs = whole[id(tensor)], reference.changed.get(name, expected.get(name))
        if theirs is None or name in reference.missing:
            continue
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            different.append(
                f"{name} {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
            )
        elif not same_bits(mine, theirs):
            different.append(name)
    if different:
        problems.append(f"values of {len(different)}: {'; '.join(different[:3])}")
    if model.training:
        problems.append("training mode")
    return problems


def export_differences(directory: Path, reference: Reference, architecture: Architecture) -> list[str]:
    """What of exported files is not as in the checkpoint that was loaded, by bytes and by an ordinary load."""
    stored = stored_tensors(directory)
    if architecture.saved_as:
        odd = sorted(set(stored) - set(reference.stored))
    else:
        odd = sorted(set(stored) ^ (set(reference.stored) - set(reference.unexpected)))
    problems = [f"names: {odd[:4]}"] if odd else []
    # What the class keeps in fp32 is exported as it is.
    bad = [
        n
        for n, t in stored.items()
        if n in reference.stored and not same_bits(t, reference.stored[n].to(t.dtype))
    ]
    if bad:
        problems.append(f"values of {len(bad)}: {bad[:3]}")
    again = ordinary_load(architecture, directory)
    unlike = [
        n
        for n, t in reference.tensors.items()
        if n not in {*reference.missing, *reference.changed}
        and (n not in again.tensors or not same_bits(t, again.tensors[n]))
    ]
    if unlike or again.ties != reference.ties:
        problems.append(f"another model after an ordinary load: {unlike[:3]}")
    return problems
