"""Plans: what is wrong is said all at once and alike on every rank; what is right is counted exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.catalog import Catalog, Chunk, StoredTensor
from shardwise.dtypes import itemsize
from shardwise.errors import PlanError
from shardwise.planning.match import Made, Matched, Recipe, Rules, as_stored, match, match_rules
from shardwise.planning.plan import (
    IOOptions,
    Plan,
    StridedLoop,
    Transfer,
    build_plan,
    merge_loops,
    transfers_of,
)
from shardwise.planning.proof import cover_problems
from shardwise.tensors.boxes import Box, Layout, LocalBox, Wanted, contiguous_strides, whole, whole_tensor
from shardwise.tensors.placements import Cut, Geometry, cut_boxes, local_shape
from shardwise.tensors.tiles import Loop, Tile, cut, identity, translate
from tests.harness.tiles import pairs

Shape = tuple[int, ...]


def catalog_of(tensors: Mapping[str, tuple[str, Shape]]) -> Catalog:
    stored, at = {}, 128
    for name, (code, shape) in tensors.items():
        stored[name] = StoredTensor(name, code, shape, (Chunk(whole(shape), "f.safetensors", at),))
        at += stored[name].nbytes
    return Catalog("safetensors", "source", stored, ())


def matched_of(
    catalog: Catalog,
    wanted: Sequence[Wanted],
    *,
    names: Mapping[str, str] | None = None,
    allow_unused: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
) -> Matched:
    return match(
        catalog,
        wanted,
        lambda stored: {n: (names or {}).get(n, n) for n in stored},
        allow_unused=lambda stored, _: "caller" if stored in allow_unused else None,
        allow_missing=lambda name: "caller" if name in allow_missing else None,
    )


def plan_of(catalog: Catalog, wanted: Sequence[Wanted], **declared: Sequence[str]) -> Plan:
    matched = matched_of(catalog, wanted, **declared)  # type: ignore[arg-type]
    return build_plan(catalog, Layout(tuple(wanted)), matched, IOOptions())


def sharded(name: str, code: str, shape: Shape, geometry: Geometry, rank: int) -> Wanted:
    coordinate = geometry.coordinate(rank)
    assert coordinate is not None
    boxes = cut_boxes(shape, geometry, coordinate)
    held = local_shape(shape, boxes) or (0,) * len(shape)
    return Wanted(name, code, shape, boxes, held, contiguous_strides(held))


# --- what is wrong ---------------------------------------------------------------------------------------

STORED = {
    "layers.0.attn.query.weight": ("F32", (4, 4)),
    "layers.0.mlp.up.weight": ("F32", (8, 3)),
    "layers.1.mlp.up.weight": ("I64", (8, 4)),
    "layers.0.norm.weight": ("F32", (4,)),
    "old.norm.weight": ("F32", (4,)),
    "router.extra_state": ("U8", (7,)),
}
WANTED = {
    "layers.0.attn.q.weight": ("F32", (4, 4)),
    "layers.0.mlp.up.weight": ("F32", (8, 4)),
    "layers.1.mlp.up.weight": ("BF16", (8, 4)),
    "layers.0.norm.weight": ("F32", (4,)),
    "temperature": ("F32", ()),
}


def wrong(rank: int, ranks: int) -> PlanError:
    geometry = Geometry((ranks,), ("dp",), (Cut("shard", 0),), tuple(range(ranks)))
    plain = Geometry((ranks,), ("world",), (Cut("replicate"),), tuple(range(ranks)))
    wanted = [
        sharded(n, code, shape, geometry if shape else plain, rank) for n, (code, shape) in WANTED.items()
    ]
    catalog = catalog_of(STORED)
    matched = matched_of(catalog, wanted, names={"old.norm.weight": "layers.0.norm.weight"})
    with pytest.raises(PlanError) as caught:
        build_plan(catalog, Layout(tuple(wanted)), matched, IOOptions())
    return caught.value


def test_one_error_lists_every_problem() -> None:
    error = wrong(0, 1)
    assert "source can't fill this model completely: 7 problems" in str(error)
    assert len(error.problems) == 7
    assert all(f"\n  - {problem}" in str(error) for problem in error.problems)
    found = {problem.split(":")[0]: problem for problem in error.problems}
    assert Counter(p.split(":")[0] for p in error.problems) == {
        "missing": 2,
        "unused": 2,
        "shape mismatch": 1,
        "dtype mismatch": 1,
        "duplicated": 1,
    }
    assert "'layers.0.mlp.up.weight' expects shape [8, 4]" in found["shape mismatch"]
    assert "f.safetensors has [8, 3]" in found["shape mismatch"]
    assert "'layers.1.mlp.up.weight' expects BF16" in found["dtype mismatch"]
    assert "is I64" in found["dtype mismatch"]
    assert "all map to 'layers.0.norm.weight'" in found["duplicated"]
    assert "'old.norm.weight'" in found["duplicated"]


def test_the_nearest_names_are_given() -> None:
    text = "\n".join(wrong(0, 1).problems)
    assert "missing: parameter 'layers.0.attn.q.weight' of shape [4, 4] is not stored" in text
    assert "nearest stored name: 'layers.0.attn.query.weight'" in text
    assert "unused: stored tensor 'layers.0.attn.query.weight' [4, 4] in f.safetensors" in text
    assert "nearest wanted name: 'layers.0.attn.q.weight'" in text
    assert "allow_unused=('router.extra_state',)" in text
    assert "allow_missing=('temperature',)" in text


def test_only_a_call_that_takes_declarations_advises_them() -> None:
    names = {f"layers.{k}.up": (k + 1, 2) for k in range(9)}
    stored = catalog_of({**{f"net.{n}": ("F32", s) for n, s in names.items()}, "other": ("F32", (5,))})
    wanted = [whole_tensor(n, "F32", s) for n, s in {**names, "mine": (7,)}.items()]
    told, silent = (match_rules(stored, wanted, Rules(caller_declares=d)).problems for d in (True, False))
    assert [t.split(":")[0] for t in silent] == ["prefix", "missing", "unused"]
    assert all(t.startswith(f"{s}; ") for t, s in zip(told, silent, strict=True))
    for advice in ("allow_missing=", "allow_unused=", "key_mapping"):
        assert any(advice in t for t in told)
        assert not any(advice in s for s in silent)


def test_errors_are_equal_on_every_rank() -> None:
    texts = {str(wrong(rank, 4)) for rank in range(4)} | {str(wrong(rank, 3)) for rank in range(3)}
    assert len(texts) == 1


def test_what_is_declared_is_no_problem() -> None:
    catalog = catalog_of({"a": ("F32", (4,)), "spare": ("F32", (2,))})
    wanted = [whole_tensor("a", "F32", (4,)), whole_tensor("new", "F32", (3,))]
    plan = plan_of(catalog, wanted, allow_unused=["spare"], allow_missing=["new"])
    assert [(d.name, d.declared_by) for d in plan.unused] == [("spare", "caller")]
    assert [(d.name, d.declared_by) for d in plan.initialized] == [("new", "caller")]
    assert set(plan.recipes) == {"a"}
    with pytest.raises(PlanError) as caught:
        plan_of(catalog, wanted, allow_unused=["spare"])
    assert len(caught.value.problems) == 1


def test_a_tie_is_missed_once_and_under_all_its_names() -> None:
    tied = replace(whole_tensor("embed", "F32", (4,)), aliases=("head", "decoder"))
    with pytest.raises(PlanError) as caught:
        plan_of(catalog_of({}), [tied])
    (problem,) = caught.value.problems
    assert "'embed' (also named 'head', 'decoder')" in problem


def test_second_copies_of_a_tie_are_checked_not_loaded_twice() -> None:
    tied = replace(whole_tensor("embed", "F32", (4, 2)), aliases=("head",))
    both = catalog_of({"embed": ("F32", (4, 2)), "head": ("F32", (4, 2))})
    plan = plan_of(both, [tied])
    assert [t.offset_bytes for t in plan.transfers] == [128]
    assert [t.offset_bytes for t in plan.checks] == [160]
    assert plan.bytes_to_read == 64
    alone = plan_of(catalog_of({"head": ("F32", (4, 2))}), [tied])
    assert len(alone.transfers) == 1
    assert alone.checks == ()
    with pytest.raises(PlanError, match="shape mismatch"):
        plan_of(catalog_of({"embed": ("F32", (4, 2)), "head": ("F32", (2, 4))}), [tied])


@pytest.mark.parametrize(
    ("stored", "wanted", "fine"),
    [
        ("F32", "BF16", True),
        ("F16", "F64", True),
        ("I64", "I64", True),
        ("F8_E4M3", "F8_E4M3", True),
        ("I64", "I32", False),
        ("I64", "F32", False),
        ("F32", "I64", False),
        ("F8_E4M3", "BF16", False),
        ("BF16", "F8_E4M3", False),
        ("C64", "F32", False),
        ("BOOL", "U8", False),
    ],
)
def test_casts(stored: str, wanted: str, fine: bool) -> None:
    catalog, layout = catalog_of({"a": (stored, (2,))}), [whole_tensor("a", wanted, (2,))]
    if fine:
        assert plan_of(catalog, layout).transfers[0].target_dtype == wanted
    else:
        with pytest.raises(
            PlanError, match=f"dtype mismatch: 'a' expects {wanted}, but 'a' in f.* is {stored};"
        ):
            plan_of(catalog, layout)


def test_a_second_copy_may_be_made_of_several_parts() -> None:
    """As a conversion makes it: the head is stored in two halves, the embedding it is tied to is whole."""
    tied = replace(whole_tensor("embed", "F32", (4, 2)), aliases=("head",))
    catalog = catalog_of({"embed": ("F32", (4, 2)), "head.0": ("F32", (2, 2)), "head.1": ("F32", (2, 2))})

    def plan_with(*starts: int) -> Plan:
        parts = tuple(
            translate(identity(f"head.{k}", (2, 2)), "target", (start, 0)) for k, start in enumerate(starts)
        )
        head = Made("head", "F32", (4, 2), parts, ("head.0", "head.1"))
        rules = Rules(lambda tensors: [as_stored(tensors["embed"], "embed"), head])
        return build_plan(catalog, Layout((tied,)), match_rules(catalog, [tied], rules), IOOptions())

    plan = plan_with(0, 2)
    assert [t.stored for t in plan.transfers] == ["embed"]
    assert [t.stored for t in plan.checks] == ["head.0", "head.1"]
    with pytest.raises(PlanError, match="write one element"):
        plan_with(0, 1)


def mis_made(*sources: str) -> str:
    """The one problem of a tensor that a conversion makes of these, with another shape than is wanted."""
    catalog = catalog_of(dict.fromkeys(sources, ("F32", (2,))))
    rules = Rules(lambda _: [Made("w", "F32", (len(sources), 2), (), sources)])
    wanted = [whole_tensor("w", "F32", (8, 2))]
    with pytest.raises(PlanError) as caught:
        build_plan(catalog, Layout(tuple(wanted)), match_rules(catalog, wanted, rules), IOOptions())
    (problem,) = caught.value.problems
    return problem


@pytest.mark.timeout(20)
def test_what_a_series_lacks_is_named_whatever_its_names_are() -> None:
    assert "not stored: 'experts.2.up'" in mis_made("experts.0.up", "experts.1.up", "experts.3.up")
    assert "not stored: 'a{x}{0}.1.up'" in mis_made("a{x}{0}.0.up", "a{x}{0}.2.up")
    assert "shape mismatch" in mis_made("e.0.up", f"e.{10**15}.up")
    assert "shape mismatch" in mis_made("e.0.up", f"e.{'9' * 5000}.up")


@pytest.mark.timeout(60)
def test_thousands_of_wrong_names_are_said_quickly() -> None:
    catalog = catalog_of({f"layer{k}.mlp.weight": ("F32", (2,)) for k in range(4000)})
    wanted = [whole_tensor(f"block{k}.mlp.weight", "F32", (1,)) for k in range(4000)]
    with pytest.raises(PlanError) as caught:
        plan_of(catalog, wanted)
    assert len(caught.value.problems) == 8000
    assert "'block0.mlp.weight'" in caught.value.problems[0]
    assert "nearest stored name: 'layer0.mlp.weight'" in caught.value.problems[0]


def _problems(stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan_of(
            catalog_of({name: ("F32", shape) for name, shape in stored.items()}),
            [whole_tensor(name, "F32", shape) for name, shape in wanted.items()],
        )
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("before", "after", "pattern", "words"),
    [
        ("net.", "", r"^net\.", "under 'net.'"),
        (
            "model.language_model.",
            "model.",
            r"^model\.language_model\.",
            "'model.language_model.' for 'model.'",
        ),
        ("", "encoder.", r"^(?=(layers)\.)", "without 'encoder.'"),
        ("model.", "decoder.", r"^model\.", "'model.' for 'decoder.'"),
    ],
)
def test_a_wrong_prefix_is_said_once(before: str, after: str, pattern: str, words: str) -> None:
    names = {f"layers.{k}.{part}.weight": (k + 1, 2) for k in range(500) for part in ("up", "down")}
    tower = {f"tower.layers.{k}.up.weight": (1, 1) for k in range(500)}
    stored = {before + name: shape for name, shape in names.items()}
    wanted = {after + name: shape for name, shape in names.items()}
    prefix, missing, single, family = _problems(
        {**stored, **tower, "lm.bias": (3,)}, {**wanted, "head": (7,)}
    )
    assert prefix.startswith(f"prefix: 1000 of 1001 missing tensors are stored {words} ")
    assert f"key_mapping={{{pattern!r}: {after!r}}}" in prefix
    assert missing.startswith("missing: state 'head' ")
    assert family.startswith("unused: 500 stored tensors 'tower.*' ('tower.layers.0.up.weight' [1, 1] in ")
    assert "give allow_unused=('tower.*',)" in family
    assert "'lm.bias'" in single


def test_only_what_one_pattern_covers_is_said_together() -> None:
    """A part of which something is wanted, or of which little is stored, is said name by name."""
    some = {f"head.{k}": (2,) for k in range(9)}
    few = {f"pooler.{k}": (2,) for k in range(3)}
    deep = {f"model.visual.{k}": (2,) for k in range(9)}
    problems = _problems({**some, **few, **deep, "model.norm": (2,)}, {"head.3": (2,), "model.norm": (2,)})
    assert len(problems) == 8 + 3 + 1
    assert sum("'model.visual.*'" in p for p in problems) == 1
    assert not any("'head.*'" in p or "'pooler.*'" in p or "'model.*'" in p for p in problems)


def test_no_prefix_is_guessed_from_a_few_or_from_other_shapes() -> None:
    names = {f"layers.{k}.weight": (2, 2) for k in range(20)}
    others = {f"net.{name}": (2, 3) for name in names}
    assert not any(p.startswith("prefix") for p in _problems(others, names))
    few = dict(list(names.items())[:5])
    assert not any(p.startswith("prefix") for p in _problems({f"net.{n}": s for n, s in few.items()}, few))


# --- proof of cover --------------------------------------------------------------------------------------


def problems_of(shape: Shape, tiles: Sequence[Tile], stored: Shape | None = None) -> list[str]:
    catalog = catalog_of({"x": ("F32", stored if stored is not None else shape)})
    return cover_problems(whole_tensor("w", "F32", shape), tuple(tiles), catalog)


def test_what_a_tile_may_not_do() -> None:
    full = identity("x", (4, 6))
    assert problems_of((4, 6), [full]) == []
    top, bottom = (next(cut(full, "target", Box((a, 0), (b, 6)))) for a, b in ((0, 2), (2, 4)))
    assert problems_of((4, 6), [bottom, top]) == []
    assert any("has 24 elements, its tiles write 12" in p for p in problems_of((4, 6), [top]))
    assert any("write one element" in p for p in problems_of((4, 6), [full, top]))
    assert any("write one element" in p for p in problems_of((4, 6), [top, top]))
    beside = replace(top, target_start=(0, 1))
    assert any("outside the target 'x'" in p for p in problems_of((4, 6), [beside, bottom]))
    beyond = replace(top, source_start=(3, 0))
    assert any("outside the source 'x'" in p for p in problems_of((4, 6), [beyond, bottom]))
    again = Tile("x", (Loop(4, 0, 1, 0, 1), Loop(6, 1, 1, 0, 1)), (0, 0), (0, 0))
    assert any("writes an element twice" in p for p in problems_of((4, 6), [again]))
    assert problems_of((4, 6), [])


def test_cover_of_zero_dims_and_of_nothing() -> None:
    scalar, none = identity("x", ()), identity("x", (0, 3))
    assert problems_of((), [scalar]) == []
    assert any("write one element" in p for p in problems_of((), [scalar, scalar]))
    assert problems_of((), [])
    assert problems_of((0, 3), [none]) == []
    assert problems_of((0, 3), []) == []


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Shape, list[Tile]]:
    """A tensor cut into tiles, by boxes or by taking every other element; then perhaps something goes wrong."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    tiles = [identity("x", shape)]
    for _ in range(draw(st.integers(0, 3))):
        k, dim = draw(st.integers(0, len(tiles) - 1)), draw(st.integers(0, len(shape) - 1))
        at, n = draw(st.integers(0, shape[dim])), shape[dim]
        tile = tiles.pop(k)
        if draw(st.booleans()):
            for low, high in ((0, at), (at, n)):
                box = Box(
                    tuple(low if d == dim else 0 for d in range(len(shape))),
                    tuple(high if d == dim else m for d, m in enumerate(shape)),
                )
                tiles += cut(tile, "target", box)
        else:
            tiles += halves(tile, dim)
    for _ in range(draw(st.integers(0, 2))):
        if not tiles:
            break
        k = draw(st.integers(0, len(tiles) - 1))
        match draw(st.sampled_from(["drop", "move", "twice", "longer", "shuffle"])):
            case "drop":
                tiles.pop(k)
            case "twice":
                tiles.append(tiles[k])
            case "move":
                dim = draw(st.integers(0, len(shape) - 1))
                start = tuple(s + (d == dim) for d, s in enumerate(tiles[k].target_start))
                tiles[k] = replace(tiles[k], target_start=start)
            case "longer":
                if tiles[k].loops:
                    loops = list(tiles[k].loops)
                    loops[0] = replace(loops[0], size=loops[0].size + 1)
                    tiles[k] = replace(tiles[k], loops=tuple(loops))
            case "shuffle":
                tiles = draw(st.permutations(tiles))
    return shape, tiles


def halves(tile: Tile, dim: int) -> list[Tile]:
    """The even and the odd steps of a loop along a dim."""
    for k, loop in enumerate(tile.loops):
        if loop.target_dim == dim and loop.size > 1:
            both = []
            for odd in (0, 1):
                size = (loop.size + 1 - odd) // 2
                stepped = replace(
                    loop, size=size, source_step=2 * loop.source_step, target_step=2 * loop.target_step
                )
                source, target = list(tile.source_start), list(tile.target_start)
                source[loop.source_dim] += odd * loop.source_step
                target[dim] += odd * loop.target_step
                loops = (*tile.loops[:k], stepped, *tile.loops[k + 1 :])
                both.append(Tile("x", loops, tuple(source), tuple(target)))
            return both
    return [tile]


@settings(max_examples=500)
@given(partitions())
def test_problems_are_found_exactly_where_there_are_some(case: tuple[Shape, list[Tile]]) -> None:
    shape, tiles = case
    every = set(product(*(range(n) for n in shape)))
    moved = [pair for tile in tiles for pair in pairs(tile)]
    times = Counter(target for _, target in moved)
    good = set(times) == every and set(times.values()) == {1} and all(s in every for s, _ in moved)
    problems = problems_of(shape, tiles)
    assert (not problems) == good, problems


# --- what is right ---------------------------------------------------------------------------------------


def offsets(loops: Sequence[StridedLoop]) -> list[tuple[int, int]]:
    steps = product(*(range(v.size) for v in loops))
    return [
        (
            sum(i * v.source_stride for i, v in zip(s, loops, strict=True)),
            sum(i * v.target_stride for i, v in zip(s, loops, strict=True)),
        )
        for s in steps
    ]


strides = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])
strided_loops = st.lists(st.builds(StridedLoop, st.integers(2, 4), strides, strides), max_size=4)


@given(strided_loops)
def test_merged_loops_copy_the_same(loops: list[StridedLoop]) -> None:
    merged = merge_loops(loops)
    assert sorted(offsets(merged)) == sorted(offsets(loops))
    assert len(merged) <= len(loops)


def test_whole_tensors_are_one_run() -> None:
    (transfer,) = plan_of(
        catalog_of({"a": ("F32", (6, 1, 5))}), [whole_tensor("a", "F32", (6, 1, 5))]
    ).transfers
    assert transfer.loops == (StridedLoop(30, 1, 1),)
    assert transfer.is_direct
    (scalar,) = plan_of(catalog_of({"a": ("F32", ())}), [whole_tensor("a", "F32", ())]).transfers
    assert scalar.loops == ()
    assert scalar.is_direct
    assert scalar.numel == scalar.run_numel == scalar.span_numel == 1


@given(strided_loops, st.sampled_from(["U8", "F32", "F64"]), st.sampled_from(["U8", "F32", "F64"]))
def test_costs_of_a_transfer(loops: list[StridedLoop], source: str, target: str) -> None:
    transfer = Transfer("w", "x", "f", 0, source, target, 0, merge_loops(loops))
    places = [a for a, _ in offsets(transfer.loops)]
    assert transfer.numel == len(places)
    assert transfer.span_numel == max(places) + 1
    run = 1
    while run < len(places) and places[run] == places[0] + run:
        run += 1
    assert transfer.run_numel <= run
    assert len(places) % transfer.run_numel == 0
    expected = transfer.span_numel if transfer.reads_whole_span else transfer.numel
    assert transfer.bytes_to_read == expected * itemsize(source)
    if transfer.is_direct:
        assert source == target
        inner = transfer.loops[-1].size if transfer.loops else 1
        pairs = offsets(transfer.loops)
        for k in range(0, len(pairs), inner):
            base = pairs[k]
            assert pairs[k : k + inner] == [(base[0] + i, base[1] + i) for i in range(inner)]


@settings(max_examples=150)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    axis=st.integers(1, 4),
    dim=st.integers(0, 2),
    factor=st.integers(1, 3),
    data=st.data(),
)
def test_ranks_read_each_element_once_from_where_it_lies(
    shape: Shape, axis: int, dim: int, factor: int, data: st.DataObject
) -> None:
    """Byte by byte: which file byte goes to which local element, for chunked storage and any shard."""
    dim = dim % len(shape) if shape else 0
    geometry = Geometry((axis,), ("dp",), (Cut("strided", dim, factor),), tuple(range(axis)))
    if not shape:
        geometry = replace(geometry, axis_sizes=(1,), cuts=(Cut("replicate"),), ranks=(0,))
    at = data.draw(st.integers(0, shape[0])) if shape else 0
    stored = chunked(shape, at)
    catalog = Catalog("safetensors", "source", {"w": stored}, ())
    seen: Counter[tuple[str, int]] = Counter()
    for rank in geometry.ranks:
        wanted = sharded("w", "F32", shape, geometry, rank)
        plan = plan_of(catalog, [wanted])
        places = sorted((t.path, t.offset_bytes) for t in plan.transfers)
        assert places == [(t.path, t.offset_bytes) for t in plan.transfers], "not in the order of the files"
        filled: Counter[int] = Counter()
        for transfer in plan.transfers:
            for source, target in offsets(transfer.loops):
                byte = transfer.offset_bytes + 4 * source
                seen[transfer.path, byte] += 1
                filled[transfer.target_offset + target] += 1
                index = index_at(stored, transfer.path, byte)
                assert local_place(wanted, index) == transfer.target_offset + target
        assert filled == Counter(range(math.prod(wanted.local_shape)))
        assert sum(t.numel * 4 for t in plan.transfers) == wanted.local_nbytes == plan.local_nbytes
    expected = [(c.path, c.offset_bytes + 4 * k) for c in stored.chunks for k in range(c.box.numel)]
    assert seen == Counter(expected)


def chunked(shape: Shape, at: int) -> StoredTensor:
    if not shape:
        return StoredTensor("w", "F32", shape, (Chunk(whole(()), "one", 99),))
    boxes = [Box((a, *[0] * (len(shape) - 1)), (b, *shape[1:])) for a, b in ((0, at), (at, shape[0]))]
    chunks = [Chunk(b, name, k) for b, name, k in zip(boxes, ("one", "two"), (99, 5), strict=True) if b.numel]
    return StoredTensor("w", "F32", shape, tuple(chunks))


def index_at(stored: StoredTensor, path: str, byte: int) -> Shape:
    chunk = next(c for c in stored.chunks if c.path == path)
    k, rest = divmod(byte - chunk.offset_bytes, 4)
    assert rest == 0
    index = []
    for start, size in zip(reversed(chunk.box.start), reversed(chunk.box.sizes), strict=True):
        k, here = divmod(k, size)
        index.append(start + here)
    assert k == 0
    return tuple(reversed(index))


def local_place(wanted: Wanted, index: Shape) -> int:
    for b in wanted.boxes:
        if all(x <= i < y for x, i, y in zip(b.box.start, index, b.box.stop, strict=True)):
            local = [i - x + s for i, x, s in zip(index, b.box.start, b.local_start, strict=True)]
            return sum(i * s for i, s in zip(local, wanted.local_strides, strict=True))
    raise AssertionError(f"{index} is not held here")


def test_a_rank_that_holds_nothing_reads_nothing() -> None:
    empty = Wanted("a", "F32", (2, 3), (), (0, 3), (3, 1))
    plan = plan_of(catalog_of({"a": ("F32", (2, 3))}), [empty])
    assert plan.transfers == ()
    assert plan.bytes_to_read == plan.local_nbytes == plan.staging_bytes == 0
    assert set(plan.recipes) == {"a"}


def test_staging_is_that_of_the_largest_staged_read() -> None:
    catalog = catalog_of({"cast": ("F32", (100,)), "plain": ("F32", (5000,)), "spans": ("F32", (30, 10))})
    columns = Wanted("spans", "F32", (30, 10), (LocalBox(Box((0, 2), (30, 4)), (0, 0)),), (30, 2), (2, 1))
    wanted = [whole_tensor("cast", "BF16", (100,)), whole_tensor("plain", "F32", (5000,))]
    assert plan_of(catalog, wanted, allow_unused=["spans"]).staging_bytes == 400
    plan = plan_of(catalog, [*wanted, columns])
    assert plan.staging_bytes == (29 * 10 + 2) * 4
    assert plan.bytes_to_read == 400 + 20_000 + 1168


def test_one_place_in_a_transfer_of_a_tile_is_one_place_in_the_tensor() -> None:
    """transfers_of alone, for a transposing tile and a stored tensor in two chunks."""
    stored = chunked((4, 6), 3)
    tile = Tile("w", (Loop(6, 1, 1, 0, 1), Loop(4, 0, 1, 1, 1)), (0, 0), (0, 0))
    wanted = whole_tensor("t", "F32", (6, 4))
    found = {}
    for transfer in transfers_of(tile, wanted, {"w": stored}):
        for source, target in offsets(transfer.loops):
            index = index_at(stored, transfer.path, transfer.offset_bytes + 4 * source)
            found[transfer.target_offset + target] = index
    assert found == {4 * j + i: (i, j) for i in range(4) for j in range(6)}


def test_plans_compare_and_options_are_frozen_and_checked() -> None:
    catalog, wanted = catalog_of({"a": ("F32", (4,))}), [whole_tensor("a", "F32", (4,))]
    assert plan_of(catalog, wanted) == plan_of(catalog, wanted)
    with pytest.raises(FrozenInstanceError):
        IOOptions().staging_bytes = 0  # type: ignore[misc]
    with pytest.raises(ValueError, match="at least 1 MiB"):
        IOOptions(staging_bytes=1024)
    with pytest.raises(ValueError, match="positive"):
        IOOptions(timeout_s=0)


def test_a_recipe_of_another_rank_is_not_needed() -> None:
    """What is not matched at all (left as it is) makes no transfers and no problem here."""
    catalog = catalog_of({"a": ("F32", (4,))})
    layout = Layout((whole_tensor("a", "F32", (4,)), whole_tensor("b", "F32", (4,))))
    matched = Matched({"a": Recipe("a", (identity("a", (4,)),))})
    plan = build_plan(catalog, layout, matched, IOOptions())
    assert {t.wanted for t in plan.transfers} == {"a"}
