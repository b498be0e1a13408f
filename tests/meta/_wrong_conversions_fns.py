"""What the ranks run in the tests of conversions that are made wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import ConversionOps

import shardwise as sw
from benchmarks.architectures import Architecture, architectures
from benchmarks.sweeping.ordinary import differences, export_differences, ordinary_load
from shardwise.catalog import catalog_of_safetensors
from shardwise.planning.match import Recipe, recall, remember
from shardwise.tensors.tiles import Loop
from tests.loading._load_fns import assert_same_whole, ordinary_model

Made = dict[str, Any]


class Spoiled(ConversionOps):
    """An operation with something wrong done to what it makes; shapes, dtypes and names stay right."""

    def __init__(self, operation: ConversionOps, spoil: Callable[[Made], Made]) -> None:
        self.operation, self.spoil = operation, spoil
        self.supports_many_to_many = operation.supports_many_to_many

    def convert(
        self, input_dict: Made, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Made:
        return self.spoil(self.operation.convert(input_dict, source_patterns, target_patterns, **kwargs))

    @property
    def reverse_op(self) -> ConversionOps:
        return self.operation.reverse_op


def first_two_exchanged(dim: int) -> Callable[[Made], Made]:
    """Two experts out of order, or two rows."""

    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        first, second, *rest = tensor.split(1, dim)
        return torch.cat([second, first, *rest], dim)

    return lambda made: {name: exchange(tensor) for name, tensor in made.items()}


def halves_swapped(dim: int) -> Callable[[Made], Made]:
    """Up before gate."""
    return lambda made: {n: torch.cat(t.chunk(2, dim)[::-1], dim) for n, t in made.items()}


def parts_exchanged(made: Made) -> Made:
    """The last part under the name of the one before it."""
    *rest, (a, first), (b, second) = made.items()
    return {**dict(rest), a: second, b: first}


#: By model type and error: the operation that it is done to, how, and the ends of the names of what is wrong then.
ERRORS: dict[tuple[str, str], tuple[str, Callable[[Made], Made], tuple[str, ...]]] = {
    ("qwen3_moe", "experts"): (
        "MergeModulelist",
        first_two_exchanged(0),
        ("experts.down_proj", "experts.gate_up_proj"),
    ),
    ("qwen3_moe", "halves"): ("Concatenate", halves_swapped(1), ("experts.gate_up_proj",)),
    ("qwen3_moe", "rows"): ("Concatenate", first_two_exchanged(1), ("experts.gate_up_proj",)),
    ("mixtral", "experts"): (
        "MergeModulelist",
        first_two_exchanged(0),
        ("experts.down_proj", "experts.gate_up_proj"),
    ),
    ("mixtral", "halves"): ("Concatenate", halves_swapped(1), ("experts.gate_up_proj",)),
    ("molmo2_text", "gate and up"): ("Chunk", parts_exchanged, ("gate_proj.weight", "up_proj.weight")),
    ("molmo2_text", "keys and values"): ("Split", parts_exchanged, ("k_proj.weight", "v_proj.weight")),
    ("molmo2_text", "rows"): (
        "Split",
        first_two_exchanged(0),
        ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    ),
    ("molmo2_text", "halves"): ("Concatenate", halves_swapped(0), ("embed_tokens.weight",)),
}


@contextmanager
def spoiled(architecture: Architecture, kind: str, spoil: Callable[[Made], Made]) -> Iterator[None]:
    """The class's conversions, with every operation of a kind spoiled, registered as a user registers his own."""
    names = (architecture.class_name, architecture.model_type)
    key = next(name for name in names if get_checkpoint_conversion_mapping(name))
    mapping, kept = (get_checkpoint_conversion_mapping(key) for _ in range(2))
    altered = 0
    for entry in mapping:
        operations = getattr(entry, "operations", [])
        for k, operation in enumerate(operations):
            if type(operation).__name__ == kind:
                operations[k] = Spoiled(operation, spoil)
                altered += 1
    assert altered, f"no {kind} in the conversions of {key}"
    register_checkpoint_conversion_mapping(key, mapping, overwrite=True)
    try:
        yield
    finally:
        register_checkpoint_conversion_mapping(key, kept, overwrite=True)


def _load(directory: str) -> Any:
    return sw.load_pretrained(directory, init_device_mesh("cpu", (dist.get_world_size(),)))


def wrong_loads(model_type: str, directory: str, out: str) -> dict[str, dict[str, Any]]:
    """By error: what each comparison says of the sharded load, and of how many tensors it should say so.

    ``""`` is the load as it should be.
    """
    (architecture,) = architectures(model_type)
    reference, ordinary = ordinary_load(architecture, Path(directory)), ordinary_model(directory)

    def compare(model: Any, name: str) -> dict[str, Any]:
        sw.export_hf(model, f"{out}/{name}")
        return {
            "tests": failure_of(lambda: assert_same_whole(model, ordinary)),
            "sweep": differences(model, reference),
            "export": export_differences(Path(f"{out}/{name}"), reference, architecture),
        }

    found = {"": compare(_load(directory), "right")}
    for (wanted, error), (kind, spoil, ends) in ERRORS.items():
        if wanted == model_type:
            with spoiled(architecture, kind, spoil):
                model = _load(directory)
            found[error] = compare(model, error) | {"wrong": sum(n.endswith(ends) for n in reference.tensors)}
    return found


def failure_of(check: Callable[[], None]) -> str:
    """What an assertion says; nothing if it holds."""
    try:
        check()
    except AssertionError as error:
        return str(error)
    return ""


def wrong_exports(model_type: str, directory: str, out: str) -> dict[str, list[str]]:
    """What the comparison says of exports of a rightly loaded model."""
    (architecture,) = architectures(model_type)
    reference = ordinary_load(architecture, Path(directory))
    model = _load(directory)
    sw.save(sw.TrainState(model=model), f"{out}/checkpoint")

    def export(name: str, source: Any) -> None:
        sw.export_hf(source, f"{out}/{name}")

    export("live", model)
    export("stored", f"{out}/checkpoint")
    for (wanted, error), (kind, spoil, _) in ERRORS.items():
        if wanted == model_type:
            with spoiled(architecture, kind, spoil):
                export(f"stored, {error}", f"{out}/checkpoint")
    origin = recall(model)
    assert origin is not None
    remember(model, sources_exchanged(origin.recipes), catalog_of_safetensors(directory).tensors)
    export("live, two sources", model)
    return {
        path.name: export_differences(path, reference, architecture)
        for path in sorted(Path(out).iterdir())
        if path.name != "checkpoint"
    }


def sources_exchanged(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes of a load, with what two alike tiles of converted tensors read exchanged."""
    places: dict[tuple[Loop, ...], list[tuple[str, int]]] = {}
    for name, recipe in recipes.items():
        for k, tile in enumerate(recipe.tiles):
            if tile.source != name:
                places.setdefault(tile.loops, []).append((name, k))
    pair = next(alike[:2] for alike in places.values() if len(alike) > 1)
    first, second = (recipes[name].tiles[k] for name, k in pair)
    altered = dict(recipes)
    for (name, k), tile, other in zip(pair, (first, second), (second, first), strict=True):
        tiles = list(altered[name].tiles)
        tiles[k] = replace(tile, source=other.source, source_start=other.source_start)
        altered[name] = replace(altered[name], tiles=tuple(tiles))
    return altered
