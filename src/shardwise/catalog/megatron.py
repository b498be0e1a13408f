"""Megatron-core's distributed checkpoints (``torch_dist``), with the names and shapes that the model has on the hub.

Megatron stacks what all layers, and all experts, have in common, interleaves queries, keys and values by query group, joins gate and up, and
pads the vocabulary. All of these are ranges of rows of a stored tensor, so the hub's tensors are boxes of the same files. The names are those of
Megatron Bridge's mappings (0.3, ``megatron/bridge/models/*/*_bridge.py``), the layouts Megatron-core's (0.16, ``dist_checkpointing``).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from ..dtypes import itemsize
from ..errors import FormatError, IntegrityError, SourceError
from ..limits import brief, is_count, read_json, read_small
from ..objects import frozen
from ..storage import is_file
from ..storage.records import join
from ..tensors.boxes import Box
from .dcp import ByteRange, DcpCheckpoint, ItemFiles, read_dcp
from .pickles import Record
from .records import MEGATRON_FILE, VOCABULARY_MULTIPLE, Catalog, Chunk, StoredTensor
from .torch_files import ANY_NAMES, Archive, read_torch_file

_log = logging.getLogger(__name__)
_COMMON, _COMMON_ITEM, _BRIDGE = "common.pt", "common_state/shard_0_1", "run_config.yaml"
_MOST_LAYERS = 10_000
_MOST_CHAINED = 3
#: What the optimizer keeps of a parameter, in its shape (``fully_reshardable``, or without the distributed optimizer).
_STATE = re.compile(
    r"(chained_\d+\.)?optimizer\.state\.(?P<state>fp32_param|exp_avg|exp_avg_sq)\.(?P<name>.+)"
)

# ----------------------------------------------------------------------------------------------------
# Names


class _Part(NamedTuple):
    """What a tensor of Megatron is made of: tensors of the hub, in order, and how its rows are dealt out to them."""

    names: tuple[str, ...]
    cut: str = "whole"


def _part(*names: str, cut: str = "") -> _Part:
    return _Part(names, cut or {1: "whole", 2: "halves", 3: "groups"}[len(names)])


_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
#: Outside of layers.
_MODEL = {
    "embedding.word_embeddings.weight": _part("model.embed_tokens.weight", cut="tokens"),
    "output_layer.weight": _part("lm_head.weight", cut="tokens"),
    "decoder.final_layernorm.weight": _part("model.norm.weight"),
}
_TOKENS = tuple(part.names[0] for part in _MODEL.values() if part.cut == "tokens")
#: In a layer of any family.
_LAYER = {
    # Transformer Engine's modules have the norm before them.
    "input_layernorm.weight": _part("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": _part("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": _part("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": _part("post_attention_layernorm.weight"),
    "self_attention.linear_qkv.weight": _part(*(f"{x}.weight" for x in _QKV)),
    "self_attention.linear_qkv.bias": _part(*(f"{x}.bias" for x in _QKV)),
    "self_attention.linear_proj.weight": _part("self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": _part("self_attn.o_proj.bias"),
    "self_attention.q_layernorm.weight": _part("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": _part("self_attn.k_norm.weight"),
    "mlp.linear_fc1.weight": _part("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": _part("mlp.down_proj.weight"),
    "mlp.router.weight": _part("mlp.gate.weight"),
    "mlp.router.expert_bias": _part("mlp.gate.e_score_correction_bias"),
    "mlp.experts.linear_fc1.weight": _part(
        "mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"
    ),
    "mlp.experts.linear_fc2.weight": _part("mlp.experts.{}.down_proj.weight"),
    "mlp.shared_experts.linear_fc1.weight": _part(
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": _part("mlp.shared_experts.down_proj.weight"),
}


class _Family(NamedTuple):
    """Models whose layers have other names than the common ones. A model is of the first family whose mark is there."""

    mark: str
    layer: Mapping[str, _Part]
    without: str = ""
    """A tensor that they don't have."""


_FAMILIES = (
    _Family(  # DeepSeek-V3: latent attention
        "self_attention.linear_kv_down_proj.weight",
        {
            "self_attention.linear_q_proj.weight": _part("self_attn.q_proj.weight"),
            "self_attention.linear_q_down_proj.weight": _part("self_attn.q_a_proj.weight"),
            "self_attention.linear_q_up_proj.weight": _part("self_attn.q_b_proj.weight"),
            "self_attention.linear_q_up_proj.layer_norm_weight": _part("self_attn.q_a_layernorm.weight"),
            "self_attention.q_layernorm.weight": _part("self_attn.q_a_layernorm.weight"),
            "self_attention.linear_kv_down_proj.weight": _part("self_attn.kv_a_proj_with_mqa.weight"),
            "self_attention.linear_kv_up_proj.weight": _part("self_attn.kv_b_proj.weight"),
            "self_attention.linear_kv_up_proj.layer_norm_weight": _part("self_attn.kv_a_layernorm.weight"),
            "self_attention.kv_layernorm.weight": _part("self_attn.kv_a_layernorm.weight"),
            # The layers after the last: multi-token prediction
            "enorm.weight": _part("enorm.weight"),
            "hnorm.weight": _part("hnorm.weight"),
            "eh_proj.weight": _part("eh_proj.weight"),
            "final_layernorm.weight": _part("shared_head.norm.weight"),
        },
    ),
    _Family(  # Gemma 2 and 3: norms after attention and MLP, too
        "self_attention.linear_proj.post_layernorm.weight",
        {
            "self_attention.linear_proj.post_layernorm.weight": _part("post_attention_layernorm.weight"),
            "mlp.linear_fc1.layer_norm_weight": _part("pre_feedforward_layernorm.weight"),
            "pre_mlp_layernorm.weight": _part("pre_feedforward_layernorm.weight"),
            "mlp.linear_fc2.post_layernorm.weight": _part("post_feedforward_layernorm.weight"),
        },
    ),
    _Family(  # Qwen2-MoE: one shared expert with a gate
        "mlp.shared_experts.gate_weight",
        {
            "mlp.shared_experts.gate_weight": _part("mlp.shared_expert_gate.weight"),
            "mlp.shared_experts.linear_fc1.weight": _part(
                "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"
            ),
            "mlp.shared_experts.linear_fc2.weight": _part("mlp.shared_expert.down_proj.weight"),
        },
    ),
    _Family(  # Mixtral
        "mlp.router.weight",
        {
            "mlp.router.weight": _part("block_sparse_moe.gate.weight"),
            "mlp.experts.linear_fc1.weight": _part(
                "block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"
            ),
            "mlp.experts.linear_fc2.weight": _part("block_sparse_moe.experts.{}.w2.weight"),
        },
        without="self_attention.q_layernorm.weight",  # Qwen3-MoE
    ),
)
_NAME = re.compile(
    r"(?P<stack>decoder\.layers|mtp\.layers)\.((?P<layer>\d{1,5})\.)?((transformer_layer|mtp_model_layer)\.)?(?P<rest>.+)"
)
_EXPERT = re.compile(r"mlp\.experts\.experts\.((?P<expert>\d{1,5})\.)?(?P<rest>.+)")
#: What stands next to the model: the optimizer, states of random generators, and TE's own states.
_BESIDE = re.compile(
    r"(chained_\d+\.)?optimizer\..*|rng_state.*|rerun_state_machine_state.*|.*\._extra_state.*"
)


class _Found(NamedTuple):
    """A stored tensor's name, in parts."""

    stored: str
    rest: str
    """In a layer; the whole name outside of one."""
    axes: tuple[str, ...] = ()
    """What its first dims stand for: ``layer``, ``expert``."""
    fixed: Mapping[str, int] = {}
    """The numbers of layer and expert, if the name says them."""
    first: int | None = None
    """The number of the first layer of its stack; None outside of layers."""
    half: int | None = None
    """0 or 1 for a gate or up that is stored apart from the other (``singleton_local_shards``)."""


def _found(name: str, layers: int) -> _Found:
    match = _NAME.fullmatch(name)
    if match is None:
        return _Found(name, name)
    axes, fixed, rest = [], {}, match["rest"]
    first = layers if match["stack"] == "mtp.layers" else 0
    if match["layer"] is None:
        axes.append("layer")
    else:
        fixed["layer"] = int(match["layer"])
    if (expert := _EXPERT.fullmatch(rest)) is not None:
        rest = f"mlp.experts.{expert['rest']}"
        if expert["expert"] is None:
            axes.append("expert")
        else:
            fixed["expert"] = int(expert["expert"])
    half = {"_w": 0, "_v": 1}.get(rest[-2:])
    return _Found(name, rest if half is None else rest[:-2], tuple(axes), fixed, first, half)


# ----------------------------------------------------------------------------------------------------
# What the run says of the model


@frozen
class _Config:
    """Numbers by which rows are dealt out."""

    path: str
    layers: int
    heads: int
    groups: int
    head_dim: int
    experts: int
    vocabulary: int | None
    multiple: int | None
    """The vocabulary was padded to the next multiple of this."""


@frozen
class MegatronCheckpoint:
    """What a folder ``iter_0000100`` holds."""

    catalog: Catalog
    """The model under hub names: of each parameter the fp32 master, if it's stored in the parameter's shape."""
    moments: Mapping[str, StoredTensor]
    """Adam's, as ``<parameter>.exp_avg``; empty if they aren't stored in the parameters' shapes, or the model has experts."""
    updates: int
    """The number of the optimizer's steps."""
    step: int | None
    world_size: int


def read_megatron(folder: str) -> MegatronCheckpoint:
    """The checkpoint in ``folder``, that of one step (:func:`.megatron_folder` finds it).

    Rank-local; reads descriptions and no payload, as :func:`.read_dcp`. Raises :class:`SourceError` for tensors that no hub name is known
    of, for another backend than ``torch_dist``, and if the numbers of heads aren't stored; :class:`FormatError` and :class:`IntegrityError` for files
    that are damaged or don't belong together.
    """
    backend = read_json(join(folder, MEGATRON_FILE), "Megatron's metadata.json")
    backend = backend.get("sharded_backend") if isinstance(backend, dict) else backend
    if backend != "torch_dist":
        raise SourceError(
            f"is written by Megatron's backend {brief(backend)}, and only torch_dist can be read; save it with --ckpt-format torch_dist",
            path=folder,
        )
    found = read_dcp(folder)
    common = _common(folder, found)
    config = _config(folder, common)
    model = {name: t for name, t in found.catalog.tensors.items() if not _BESIDE.fullmatch(name)}
    states: dict[str, dict[str, StoredTensor]] = {}
    for name, t in found.catalog.tensors.items():
        match = _STATE.fullmatch(name)
        if match and match["name"] in model and model[match["name"]].shape == t.shape:
            states.setdefault(match["state"], {})[match["name"]] = t
    names = _Names(folder, model, config)
    tensors, cut = names.on_hub(model | states.pop("fp32_param", {}))
    names.check_layers()
    updates = _updates_in(common.get("optimizer"))
    moments = {
        f"{name}.{state}": replace(t, name=f"{name}.{state}")
        for state, own in states.items()
        if updates and not config.experts
        for name, t in names.on_hub(own)[0].items()
    }
    others = sorted(
        {_short(name) for name in (*found.objects, *found.catalog.tensors) if _BESIDE.fullmatch(name)}
    )
    metadata = (
        {VOCABULARY_MULTIPLE: str(config.multiple)} if config.multiple and not config.vocabulary else {}
    )
    catalog = Catalog(
        "megatron", folder, tensors, found.catalog.files, metadata=metadata, ignored_entries=(*cut, *others)
    )
    step, world = common.get("iteration"), _state(common.get("args")).get("world_size")
    return MegatronCheckpoint(
        catalog,
        moments,
        updates,
        step if is_count(step) else None,
        int(world) if world and is_count(world) else 0,
    )


def _short(name: str) -> str:
    """The entry of what isn't read: there may be thousands of parts."""
    return "_extra_state" if "_extra_state" in name else name.partition(".")[0].partition("/")[0]


def _state(found: Any) -> dict[Any, Any]:
    """The attributes of an object from a pickle."""
    state = found.state if type(found) is Record else found
    return state if type(state) is dict else {}


def _common(folder: str, found: DcpCheckpoint) -> dict[Any, Any]:
    """What ranks share. After Megatron-core 0.16.1 it's an item next to the tensors."""

    def pick(content: Any) -> dict[str, Any]:
        if type(content) is not dict:
            raise FormatError(f"holds {brief(content)}, expected a dict")
        return {key: content.get(key) for key in ("args", "iteration", "optimizer")}

    path = join(folder, _COMMON)
    if is_file(path):
        content: dict[Any, Any] = read_torch_file(path, pick, names=ANY_NAMES)[0]
        return content
    if (item := found.objects.get(_COMMON_ITEM)) is None:
        raise IntegrityError(f"lost: no such file, and no item {_COMMON_ITEM}", path=path)
    held = _item(item, found)
    return pick(held[0] if type(held) is list and len(held) == 1 else held)


def _updates_in(found: Any, depth: int = 0) -> int:
    """The ``step`` of an optimizer's groups, also of one of several that are chained; 0 if there is none."""
    groups = found.get("param_groups") if type(found) is dict else None
    steps = [group.get("step") for group in groups if type(group) is dict] if type(groups) is list else []
    first = steps[0] if steps else None
    if first is not None and is_count(first) and steps == [first] * len(steps):
        return int(first)
    inner = found.values() if type(found) is dict and depth < _MOST_CHAINED else ()
    return next((n for one in inner if (n := _updates_in(one, depth + 1))), 0)


def _item(item: ByteRange, found: DcpCheckpoint) -> Any:
    with ItemFiles(found.catalog.files) as files:
        return Archive(files.file(item), item.offset_bytes, item.nbytes, ANY_NAMES).content


def _config(folder: str, common: Mapping[Any, Any]) -> _Config:
    args, path = _state(common.get("args")), join(folder, _COMMON)
    is_bridge = False
    if not args and (is_bridge := is_file(bridge := join(folder, _BRIDGE))):
        args, path = _of_yaml(read_small(bridge, "Megatron Bridge's config").decode(errors="replace")), bridge

    def number(name: str, otherwise: int | None = None) -> int:
        value: Any = args.get(name)
        value = otherwise if value is None else value
        if not is_count(value):
            raise FormatError(f"its {name} is {brief(value)}, expected a number", path=path)
        return int(value)

    if not args:
        raise SourceError(
            f"holds no args of Megatron-LM, and there's no {_BRIDGE} of Megatron Bridge next to it, so the numbers of heads and layers aren't "
            f"known",
            path=path,
        )
    heads, layers = number("num_attention_heads"), number("num_layers")
    if not 0 < heads <= _MOST_LAYERS or not 0 < layers <= _MOST_LAYERS:
        raise FormatError(f"says {heads} heads and {layers} layers", path=path)
    # Megatron-LM's num_query_groups is 1 if nobody asked for groups.
    has_groups = args.get("group_query_attention", args.get("num_query_groups") is not None)
    zero_centered = (args.get(key) for key in ("layernorm_zero_centered_gamma", "apply_layernorm_1p"))
    if True in zero_centered and (
        args.get("swiglu") is True or (is_bridge and "emma" not in str(args.get("_target_")))
    ):
        raise SourceError(
            "says that norms are stored less one (apply_layernorm_1p), as only Gemma's are on the hub; export it with Megatron Bridge",
            path=path,
        )
    padded = [args.get(key) for key in ("make_vocab_size_divisible_by", "tensor_model_parallel_size")]
    factors = [n for n in padded if n is not None and is_count(n)]
    return _Config(
        path=path,
        layers=layers,
        heads=heads,
        groups=number("num_query_groups", heads) if has_groups else heads,
        head_dim=number("kv_channels", number("hidden_size", 0) // heads),
        experts=number("num_moe_experts", number("num_experts", 0)),
        vocabulary=number("vocab_size") if args.get("vocab_size") is not None else None,
        multiple=math.prod(factors) if len(factors) == 2 else None,
    )


def _of_yaml(text: str) -> dict[str, Any]:
    """The plain values of ``model:`` in Megatron Bridge's config, which has them one level deep."""
    _, _, text = f"\n{text}".partition("\nmodel:\n")
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line[:1] not in (" ", ""):
            break
        match = re.fullmatch(r"  (\w+): *(\S.*)", line)
        if match:
            value = match[2].strip("'\"")
            plain = {"true": True, "false": False, "null": None}
            found[match[1]] = int(value) if re.fullmatch(r"\d{1,18}", value) else plain.get(value, value)
    return found


# ----------------------------------------------------------------------------------------------------
# Tensors


#: Rows ``start`` to ``stop`` of a stored tensor, which are a hub's tensor's from row ``at`` on.
_Run = tuple[int, int, int]


class _Names:
    """A model's names on the hub, by the family that its names in Megatron show."""

    def __init__(self, folder: str, model: Iterable[str], config: _Config) -> None:
        self._folder, self._config, self._seen = folder, config, set[int]()
        self._found = {name: _found(name, config.layers) for name in sorted(model)}
        rests = {one.rest for one in self._found.values()}
        family = next(
            (f for f in _FAMILIES if f.mark in rests and (not f.without or f.without not in rests)), None
        )
        self._layer = {**_LAYER, **(family.layer if family else {})}
        if unknown := [n.stored for n in self._found.values() if n.rest not in self._parts(n)]:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise SourceError(
                f"holds {brief(unknown[0])}{more}, and no hub name is known for it (known are Llama, Mistral, Qwen2, Qwen3, Mixtral, Gemma and "
                f"DeepSeek-V3). Export the model with Megatron Bridge: AutoBridge.export_ckpt",
                path=folder,
            )
        if not rests:
            raise SourceError("contains no model", path=folder)

    def _parts(self, one: _Found) -> Mapping[str, _Part]:
        return _MODEL if one.first is None else self._layer

    def check_layers(self) -> None:
        """Raise :class:`IntegrityError` if nothing is there of one of the layers."""
        if missing := [k for k in range(self._config.layers) if k not in self._seen]:
            raise IntegrityError(
                f"holds nothing of layer(s) {brief(missing)} of {self._config.layers}", path=self._folder
            )

    def on_hub(self, stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
        """Tensors with these names in Megatron under hub names, and what is left out of them."""
        tensors: dict[str, StoredTensor] = {}
        left: list[str] = []
        for one in (self._found[name] for name in stored):
            part, t = self._parts(one)[one.rest], stored[one.stored]
            if one.half is not None:
                if part.cut != "halves":
                    raise FormatError(
                        f"holds {brief(one.stored)}, a half of what has no halves", path=self._folder
                    )
                part = _part(part.names[one.half])
            runs, inner = self._checked(one, part, t)
            rows = t.shape[len(one.axes)]
            if padding := rows - sum(stop - start for own in runs for start, stop, _ in own):
                left.append(f"{one.stored}: {padding} rows that pad the vocabulary")
            for lead, pieces in _by_lead(t, len(one.axes)).items():
                numbers = {**one.fixed, **dict(zip(one.axes, lead, strict=True))}
                layer = (one.first or 0) + numbers.get("layer", 0)
                if one.first == 0:
                    self._seen.add(layer)
                for name, own in zip(part.names, runs, strict=True):
                    name = name.format(numbers.get("expert"))
                    name = name if one.first is None else f"model.layers.{layer}.{name}"
                    if name in tensors:
                        raise FormatError(
                            f"has two tensors for {name}, {brief(one.stored)} is one of them",
                            path=self._folder,
                        )
                    shape = (sum(stop - start for start, stop, _ in own), *inner)
                    chunks = tuple(_cut(pieces, own, itemsize(t.dtype)))
                    tensors[name] = StoredTensor(name, t.dtype, shape, chunks)
        return tensors, left

    def _checked(self, one: _Found, part: _Part, t: StoredTensor) -> tuple[list[list[_Run]], tuple[int, ...]]:
        """How rows are dealt out, and the dims after them. Raises :class:`FormatError` for a shape that doesn't fit the run."""
        if len(t.shape) <= len(one.axes):
            raise FormatError(
                f"{brief(one.stored)} has shape {list(t.shape)}, expected a dim for each {' and '.join(one.axes) or 'row'}, and others",
                path=self._folder,
            )
        for axis, size in zip(one.axes, t.shape, strict=False):
            config = self._config
            expected = config.experts if axis == "expert" else size if one.first else config.layers
            if size != expected:
                raise FormatError(
                    f"{brief(one.stored)} has {size} {axis}s, and the run {expected} ({config.path})",
                    path=self._folder,
                )
        return list(_dealt(one.stored, t.shape[len(one.axes)], part, self._config)), t.shape[
            len(one.axes) + 1 :
        ]


def _dealt(stored: str, rows: int, part: _Part, config: _Config) -> Iterator[list[_Run]]:
    """The rows of each of the hub's tensors. Raises :class:`FormatError` for another number of them than the run has."""
    match part.cut:
        case "whole":
            yield [(0, rows, 0)]
        case "tokens":
            kept = rows if config.vocabulary is None else config.vocabulary
            if not 0 < kept <= rows:
                raise FormatError(f"{brief(stored)} has {rows} tokens, and the run {kept}", path=config.path)
            yield [(0, kept, 0)]
        case "halves":
            if rows % 2:
                raise FormatError(
                    f"{brief(stored)} has {rows} rows, expected a gate and as much of up", path=config.path
                )
            yield [(0, rows // 2, 0)]
            yield [(rows // 2, rows, 0)]
        case _:
            heads, groups, dim = config.heads, config.groups, config.head_dim
            if not groups or heads % groups or rows != (heads + 2 * groups) * dim:
                raise FormatError(
                    f"{brief(stored)} has {rows} rows, and the run {heads} heads in {groups} groups, of {dim} channels each",
                    path=config.path,
                )
            sizes = (heads // groups * dim, dim, dim)  # queries, keys and values of a group
            for k, size in enumerate(sizes):
                first = sum(sizes[:k])
                yield [
                    (start, start + size, group * size)
                    for group in range(groups)
                    for start in [group * sum(sizes) + first]
                ]


def _by_lead(t: StoredTensor, axes: int) -> dict[tuple[int, ...], list[Chunk]]:
    """The chunks of a tensor by layer and expert, its first ``axes`` dims, which they no longer have."""
    found: dict[tuple[int, ...], list[Chunk]] = {}
    for chunk in t.chunks:
        start, stop = chunk.box.start, chunk.box.stop
        inner = Box(start[axes:], stop[axes:])
        nbytes = inner.numel * itemsize(t.dtype)
        leads = product(*(range(a, b) for a, b in zip(start[:axes], stop[:axes], strict=True)))
        for k, lead in enumerate(leads):
            found.setdefault(lead, []).append(Chunk(inner, chunk.path, chunk.offset_bytes + k * nbytes))
    return found


def _cut(pieces: Sequence[Chunk], runs: Sequence[_Run], size: int) -> Iterator[Chunk]:
    """The parts of ``pieces`` that are in ``runs``. They are whole rows of a chunk, so each is contiguous."""
    for start, stop, at in runs:
        for piece in pieces:
            box = piece.box
            first, last = max(start, box.start[0]), min(stop, box.stop[0])
            if first < last:
                row = math.prod(box.sizes[1:]) * size
                moved = Box((first - start + at, *box.start[1:]), (last - start + at, *box.stop[1:]))
                yield Chunk(moved, piece.path, piece.offset_bytes + (first - box.start[0]) * row)


def without_padding(catalog: Catalog, rows: Iterable[tuple[str, int]]) -> Catalog:
    """The catalog without the tokens that pad the vocabulary, where only the model knows how many it has.

    ``rows``: names of the model's tensors, and how many rows they have; it isn't looked at for other sources. Rows are left out only where
    Megatron would have padded that number to the stored one. Pure.
    """
    multiple = int(catalog.metadata.get(VOCABULARY_MULTIPLE, 0))
    if not multiple:
        return catalog
    known = dict(rows)
    tensors, left = dict(catalog.tensors), list(catalog.ignored_entries)
    for name, t in catalog.tensors.items():
        kept = known.get(name, 0) if name.startswith(_TOKENS) else 0  # an optimizer's states, too
        if 0 < kept < t.shape[0] == -(-kept // multiple) * multiple:
            chunks = tuple(_cut(t.chunks, [(0, kept, 0)], itemsize(t.dtype)))
            tensors[name] = replace(t, shape=(kept, *t.shape[1:]), chunks=chunks)
            left.append(f"{name}: {t.shape[0] - kept} rows that pad the vocabulary")
    if len(left) > len(catalog.ignored_entries):
        _log.info("%s: %s", catalog.root, "; ".join(left[len(catalog.ignored_entries) :]))
    return replace(catalog, tensors=tensors, ignored_entries=tuple(left))
