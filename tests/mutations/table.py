"""The seeded mutations: one error each, of a kind that happens, and the tests that must catch it.

A mutation that no test catches stands for a hole in the suite: the test is written, not the mutation removed. When code
changes, ``old`` changes with it (``tests/meta/test_mutations.py`` says where it is out of date). ``caught_by`` names files
where a file takes seconds, and single tests where it takes longer; one failure among them is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTATIONS", "Mutation"]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of one place in a copy of the package."""

    path: str
    """Below ``src/shardwise``."""
    old: str
    """A text that occurs exactly once in the file."""
    new: str
    caught_by: tuple[str, ...]
    """Test files, or tests without parameters, that ``make test`` runs."""
    about: str

    @property
    def room(self) -> str:
        """The room of the file, as docs/architecture.md lists them."""
        return self.path.partition("/")[0].removesuffix(".py")

    def mutated(self, text: str) -> str:
        """The file's text with the error in it. Raises ``ValueError`` unless ``old`` occurs exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path}: occurs {text.count(self.old)} times, expected once: {self.old!r}")
        return text.replace(self.old, self.new)


NAMES = ("tests/test_names.py",)
DIRECT = ("tests/store/test_direct.py",)
DIFF = ("tests/runs/test_diff.py",)
CLI = "tests/cli/test_cli.py"
DEVICE = "tests/device/test_devices.py"


MUTATIONS = (
    # ------------------------------------------------------------------------------------- limits, names, rng
    Mutation(
        "limits.py",
        "    return type(value) is int and 0 <= value <= MAX_COUNT",
        "    return type(value) is int and value <= MAX_COUNT",
        ("tests/catalog/test_catalog.py::test_headers_that_lie",),
        "counts may be negative",
    ),
    Mutation(
        "limits.py",
        'return not {"", ".", ".."} & set(part.split("/"))',
        'return not {"", "."} & set(part.split("/"))',
        ("tests/format/test_slices.py::test_file_names_that_leave_the_directory",),
        "a path may leave its directory",
    ),
    Mutation(
        "limits.py",
        "product, numel = product * max(n, 1), numel * n",
        "product, numel = product * n, numel * n",
        ("tests/catalog/test_hostile_sources.py::test_a_header_whose_shape_no_tensor_has",),
        "a dim of 0 excuses the other dims",
    ),
    Mutation(
        "limits.py",
        "if found is None or found > MAX_REPEATS:",
        "if found is not None and found > MAX_REPEATS:",
        ("tests/adapters/test_hostile_adapters.py",),
        "a repeat within a repeat is taken",
    ),
    Mutation(
        "names.py",
        '"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"))',
        '"_checkpoint_wrapped_module", "_fsdp_wrapped_module"))',
        NAMES,
        "DDP's part stays in names",
    ),
    Mutation(
        "names.py",
        "            aliases=names[1:],\n",
        "            aliases=(),\n",
        NAMES,
        "ties are forgotten",
    ),
    Mutation(
        "names.py",
        "    if clashes:\n",
        "    if len(clashes) > 1:\n",
        NAMES,
        "two tensors of one name are taken",
    ),
    Mutation(
        "names.py",
        "entry.persistent |= persistent",
        "entry.persistent = persistent",
        NAMES,
        "a shared buffer is as persistent as its last place",
    ),
    Mutation(
        "rng.py",
        '        np.random.set_state(("MT19937", keys, *gauss))\n',
        "",
        ("tests/state/test_rng_data.py::test_draws_after_restore_are_the_same",),
        "numpy's generator is not restored",
    ),
    Mutation(
        "rng.py",
        "        torch.set_rng_state(cpu_state)\n",
        "",
        ("tests/state/test_rng_data.py::test_preserve_gives_back_also_after_an_error",),
        "torch's generator is not preserved",
    ),
    Mutation(
        "rng.py",
        'text = f"shardwise-rng-1:{seed}:{step}:{rank}:{generator}"',
        'text = f"shardwise-rng-1:{seed}:{step}:{generator}"',
        ("tests/state/test_rng_data.py::test_derived_generators_follow_their_rule",),
        "all ranks draw alike",
    ),
    # ------------------------------------------------------------------------------------- ranks
    Mutation(
        "ranks/beats.py",
        "elapsed_s = min(now - self._looked, 2 * self._period_s)",
        "elapsed_s = now - self._looked",
        ("tests/ranks/test_ranks.py::test_watch_blames_no_rank_for_its_own_sleep",),
        "a rank that slept blames the others",
    ),
    Mutation(
        "ranks/verdicts.py",
        "    room = max(200, _ALL_CAUSES_CHARS // max(1, len(causes)))",
        "    room = _CAUSE_CHARS",
        ("tests/ranks/test_ranks.py::test_error_of_very_many_ranks_fits_into_one_value",),
        "causes of many ranks don't fit into one value",
    ),
    Mutation(
        "ranks/verdicts.py",
        "    if (status.kind, status.label) == (request.kind, request.label):",
        "    if status.kind == request.kind:",
        ("tests/ranks/test_ranks.py::test_agreement",),
        "ranks that do different things agree",
    ),
    Mutation(
        "ranks/ranks.py",
        "                raise\n            own = error\n        if self.world_size == 1:",
        "                raise\n            own = None\n        if self.world_size == 1:",
        ("tests/ranks/test_ranks.py::test_agreement",),
        "an error on some rank is swallowed",
    ),
    Mutation(
        "ranks/patience.py",
        "                elif number % 2 and now - since < self._limit_s:",
        "                elif number % 2:",
        ("tests/ranks/test_patience.py::test_does_not_tick_past_the_limit_nor_for_python",),
        "a call that never ends is progress for ever",
    ),
    Mutation(
        "ranks/patience.py",
        "patiently(os.unlink if os.path.islink(inner) else os.rmdir, inner)",
        "patiently(os.rmdir, inner)",
        ("tests/ranks/test_patience.py::test_remove_tree",),
        "links to folders are not deleted",
    ),
    Mutation(
        "ranks/patience.py",
        "        if code not in _NOT_HERE:\n            raise OSError(code, os.strerror(code))",
        "        _ = code",
        ("tests/ranks/test_patience.py::test_an_error_of_writing_behind_is_raised",),
        "an error of writing behind is swallowed",
    ),
    Mutation(
        "ranks/messages.py",
        "    if json.loads(text) != value:",
        "    if not text:",
        ("tests/ranks/test_messages.py",),
        "a message comes back as another value",
    ),
    # ------------------------------------------------------------------------------------- layout
    Mutation(
        "layout/boxes.py",
        "if any(a >= b for a, b in zip(start, stop, strict=True)):",
        "if any(a > b for a, b in zip(start, stop, strict=True)):",
        ("tests/layout/test_boxes.py::test_intersect",),
        "boxes that touch overlap",
    ),
    Mutation(
        "layout/boxes.py",
        "if b.stop[dim] > box.start[dim]]",
        "if b.stop[dim] > box.stop[dim]]",
        ("tests/layout/test_boxes.py::test_find_overlap",),
        "a box leaves the sweep too early",
    ),
    Mutation(
        "layout/placements.py",
        "    size = -(-length // parts)",
        "    size = length // parts",
        ("tests/layout/test_placements.py::test_boxes_are_what_torch_chunk_leaves",),
        "chunks are rounded down",
    ),
    Mutation(
        "layout/placements.py",
        "    for axis, cut in reversed(cuts):",
        "    for axis, cut in cuts:",
        ("tests/layout/test_placements.py::test_boxes_are_what_torch_chunk_leaves",),
        "FSDP cuts before TP",
    ),
    Mutation(
        "layout/placements.py",
        "            base += interval[1] - interval[0]",
        "            base = interval[1]",
        ("tests/layout/test_placements.py::test_boxes_are_what_torch_chunk_leaves",),
        "pieces lie at their global place in the local tensor",
    ),
    Mutation(
        "layout/placements.py",
        "        return tuple(reversed(coordinate))",
        "        return tuple(coordinate)",
        ("tests/layout/test_placements.py::test_boxes_are_what_torch_chunk_leaves",),
        "mesh axes are swapped",
    ),
    Mutation(
        "layout/placements.py",
        "if held != math.prod(found) or (expected is not None and expected != found):",
        "if held != math.prod(found):",
        ("tests/layout/test_placements.py::test_a_local_tensor_of_another_shape_is_refused",),
        "a local tensor of another shape is taken",
    ),
    Mutation(
        "layout/live.py",
        "        return replace(self, tensors=tuple([t.refreshed() for t in self.tensors]))",
        "        return replace(self)",
        ("tests/layout/test_live.py",),
        "tensors of before, which got no memory",
    ),
    Mutation(
        "layout/model.py",
        "        if stride <= reach:",
        "        if stride < reach:",
        ("tests/layout/test_live.py",),
        "an expanded tensor is filled",
    ),
    # ------------------------------------------------------------------------------------- format
    Mutation(
        "format/slices.py",
        '    return f"shard-{rank + 1:05d}-',
        '    return f"shard-{rank:05d}-',
        ("tests/format/test_slices.py::test_file_names_are_those_of_torch",),
        "file names count ranks from 0",
    ),
    Mutation(
        "format/slices.py",
        "loads[groups].max(axis=1).argmin()",
        "loads[groups].max(axis=1).argmax()",
        ("tests/format/test_slices.py::test_replicas_share_the_writing",),
        "the replica with most to write gets more",
    ),
    Mutation(
        "format/slices.py",
        "            ends[k] += nbytes",
        "            ends[k] = nbytes",
        ("tests/format/test_slices.py::test_files_of_all_ranks_hold_everything_once",),
        "slices of a file overlap",
    ),
    Mutation(
        "format/spread.py",
        "        return np.cumsum(lengths) - lengths",
        "        return np.cumsum(lengths)",
        ("tests/format/test_slices.py::test_slices_are_found_where_they_are_written",),
        "each slice is looked for where the next begins",
    ),
    Mutation(
        "format/spread.py",
        "last = bisect_right(self._starts, high - 1)",
        "last = bisect_right(self._starts, high - 2)",
        ("tests/format/test_slices.py::test_slices_are_found_where_they_are_written",),
        "the last piece of a box is not read",
    ),
    Mutation(
        "format/header.py",
        "        if entry.offset_bytes != end:",
        "        if entry.offset_bytes < end:",
        ("tests/catalog/test_catalog.py::test_headers_that_lie",),
        "holes between tensors are taken",
    ),
    Mutation(
        "format/header.py",
        "    if expected != span[1] - span[0]:",
        "    if expected > span[1] - span[0]:",
        ("tests/catalog/test_catalog.py::test_headers_that_lie",),
        "a tensor has more bytes than its shape",
    ),
    Mutation(
        "format/manifest.py",
        '    if checksum != document.get("xxh3"):',
        '    if not isinstance(document.get("xxh3"), str):',
        ("tests/format/test_slices.py::test_no_flipped_byte_goes_unseen",),
        "the manifest's checksum is not compared",
    ),
    Mutation(
        "format/manifest.py",
        'document.get("xxh3"):',
        'document.get("xxh3", checksum):',
        ("tests/format/test_slices.py::test_a_manifest_without_its_checksum_is_damaged",),
        "a manifest without a checksum is taken",
    ),
    Mutation(
        "format/manifest.py",
        "            if p.count != found:",
        "            if p.count < found:",
        ("tests/format/test_hostile_manifest.py::test_malformed_manifests",),
        "a pack has elements that are no parameter's",
    ),
    Mutation(
        "format/steps.py",
        "    is_bool = isinstance(step, bool)",
        "    is_bool = False",
        ("tests/format/test_odd_values.py::test_a_step_is_no_bool",),
        "True is step 1",
    ),
    Mutation(
        "format/steps.py",
        "    if found is None or int(found[1]) == step:",
        "    if found is None or int(found[1]) >= step:",
        ("tests/checkpoint/test_damage_fallback.py::test_verify_says_what_a_name_promises",),
        "an old step under a newer name is taken",
    ),
    # ------------------------------------------------------------------------------------- digests
    Mutation(
        "digests/digest.py",
        "for dim, at, size in zip(order, piece_start, piece.shape, strict=True)]",
        "for dim, at, size in zip(sorted(order), piece_start, piece.shape, strict=True)]",
        ("tests/digests/test_digest.py::test_strides_do_not_matter",),
        "the order of strides counts as the order of dims",
    ),
    Mutation(
        "digests/digest.py",
        "[*start[:dim], start[dim] + at, *start[dim + 1 :]]",
        "[*start[:dim], start[dim], *start[dim + 1 :]]",
        ("tests/digests/test_digest.py::test_strides_do_not_matter",),
        "each piece counts as the first",
    ),
    Mutation(
        "digests/digest.py",
        "    for word in (len(name), *words, len(shape), *shape):",
        "    for word in (len(name), *words, len(shape)):",
        ("tests/digests/test_digest.py::test_dtype_and_shape_distinguish",),
        "the shape does not count",
    ),
    Mutation(
        "digests/live.py",
        "        yield piece, held.box.start",
        "        yield piece, held.local_start",
        ("tests/digests/test_digest.py::test_what_ranks_sum_of_their_own_shards_adds_up",),
        "a shard is summed as if it lay first",
    ),
    Mutation(
        "digests/live.py",
        "if len(set(t)) > 1 and n not in may_differ]",
        "if len(set(t)) > 1 and n in may_differ]",
        ("tests/checkpoint/test_promises_on_ranks.py",),
        "replicas that differ are taken",
    ),
    # ------------------------------------------------------------------------------------- sharding
    Mutation(
        "sharding/groups.py",
        "key=lambda dtype: -sum(",
        "key=lambda dtype: sum(",
        ("tests/sharding/test_replicated.py::test_described",),
        "most parameters leave their group, not the few",
    ),
    Mutation(
        "sharding/groups.py",
        "        if len(holders) > 1:\n            deepest",
        "        if len(holders) > 2:\n            deepest",
        ("tests/sharding/test_shard.py::test_a_tie_within_a_block_costs_the_inner_group_only",),
        "a parameter of two groups is given to one of them",
    ),
    Mutation(
        "sharding/split_points.py",
        "        if (is_named or is_owner) and id(module) not in taken",
        "        if is_named and id(module) not in taken",
        ("tests/sharding/test_shard.py::test_a_single_expert_is_never_a_group",),
        "the owner of a list of experts is no group",
    ),
    Mutation(
        "sharding/replicated.py",
        "        sums /= factor\n",
        "",
        ("tests/sharding/test_replicated.py::test_ranks_that_do_not_use_one",),
        "gradients are added, not averaged",
    ),
    Mutation(
        "sharding/fsdp.py",
        "        elif dim > 0 and shape[dim] % shards:",
        "        elif dim > 1 and shape[dim] % shards:",
        ("tests/sharding/test_shard.py::test_refusals_name_everything_and_leave_the_model_alone",),
        "an uneven cut along dim 1 is not refused",
    ),
    # ------------------------------------------------------------------------------------- catalog
    Mutation(
        "catalog/records.py",
        "    if held != whole(shape).numel:",
        "    if held > whole(shape).numel:",
        ("tests/catalog/test_catalog.py::test_a_missing_chunk_is_refused",),
        "a missing chunk is not noticed",
    ),
    Mutation(
        "catalog/safetensors.py",
        "    if lost:\n",
        "    if len(lost) == len(weight_map):\n",
        ("tests/catalog/test_catalog.py::test_an_index_with_keys_that_its_files_do_not_hold",),
        "the index lists tensors that no file holds",
    ),
    Mutation(
        "catalog/torchfile.py",
        "            or not _is_row_major(saved.sizes, saved.strides)\n",
        "",
        ("tests/catalog/test_torch_files.py",),
        "a transposed tensor is read as it lies",
    ),
    Mutation(
        "catalog/torchfile.py",
        "        return self._zip.offset_of(data) + saved.offset * size",
        "        return self._zip.offset_of(data)",
        ("tests/catalog/test_torch_files.py",),
        "views of a storage begin at its start",
    ),
    Mutation(
        "catalog/dcp.py",
        '        path = inside(root, check_name(relative, "file"))',
        '        path = os.path.join(root, check_name(relative, "file"))',
        ("tests/catalog/test_dcp.py::test_paths_outside_the_directory_are_refused",),
        "DCP's paths may leave the directory",
    ),
    Mutation(
        "catalog/checkpoint.py",
        "self._offsets[key] = header_bytes + self._spread.offsets_bytes(*key)",
        "self._offsets[key] = self._spread.offsets_bytes(*key)",
        ("tests/format/test_slices.py::test_a_checkpoint_has_a_catalog",),
        "headers are read as payload",
    ),
    Mutation(
        "catalog/quantized.py",
        ' and name.rpartition(".")[2] not in held:',
        ":",
        ("tests/catalog/test_quantized_sources.py::test_float8_without_scales_and_a_models_own_scales",),
        "a model's own scales are taken for a quantisation",
    ),
    # ------------------------------------------------------------------------------------- models
    Mutation(
        "models/meta_init.py",
        "    if known is not None and known[0]() is parameter:\n        return known[1]\n    replacement",
        "    replacement",
        ("tests/models/test_meta_init.py::test_ties_stay_ties",),
        "ties end on meta",
    ),
    Mutation(
        "models/meta_init.py",
        "    if known is not None and known[0]() is parameter:",
        "    if known is not None:",
        ("tests/models/test_meta_init.py::test_ids_that_python_reuses_are_not_taken_for_ties",),
        "a reused id is taken for a tie",
    ),
    Mutation(
        "models/memory.py",
        "            if parameter.is_meta and id(parameter) not in seen:",
        "            if id(parameter) not in seen:",
        ("tests/models/test_meta_init.py::test_what_has_memory_keeps_it",),
        "parameters that have values get new memory",
    ),
    Mutation(
        "models/memory.py",
        "            if id(buffer) not in real:\n                real",
        "            if True:\n                real",
        ("tests/layout/test_live.py",),
        "a buffer of two modules becomes two",
    ),
    Mutation(
        "models/assets.py",
        "floats[parameter.dtype] += parameter.numel()",
        "floats[parameter.dtype] += 1",
        ("tests/models/test_assets.py",),
        "the config gets the dtype of small parameters",
    ),
    Mutation(
        "models/hub.py",
        "for k in range(1, int(count) + 1))",
        "for k in range(1, int(count)))",
        ("tests/models/test_hub.py::test_a_cache_that_lacks_a_file_of_a_series",),
        "the last file of a series is not missed",
    ),
    # ------------------------------------------------------------------------------------- recipe
    Mutation(
        "recipe/tiles.py",
        "        stop[dim] += step * (loop.size - 1)",
        "        stop[dim] += step * loop.size",
        ("tests/recipe/test_tiles.py::test_bounds",),
        "a tile reaches a step too far",
    ),
    Mutation(
        "recipe/tiles.py",
        "    target_start[loop.target_dim] += begin * loop.target_step",
        "    target_start[loop.target_dim] += begin * loop.source_step",
        ("tests/recipe/test_tiles.py::test_cut_both_sides_then_translate",),
        "steps of source and target are swapped",
    ),
    Mutation(
        "recipe/tiles.py",
        "            if size > 1 and step <= reach:",
        "            if size > 1 and step < reach:",
        ("tests/recipe/test_tiles.py::test_is_injective_never_says_so_wrongly",),
        "an element that is written twice is not noticed",
    ),
    Mutation(
        "recipe/views.py",
        "        base += size\n",
        "",
        ("tests/recipe/test_trace.py::test_tiles_say_what_torch_does",),
        "joined parts lie on each other",
    ),
    Mutation(
        "recipe/match.py",
        "stored == wanted or (stored in _FLOATS and wanted in _FLOATS)",
        "stored == wanted or (stored in _FLOATS or wanted in _FLOATS)",
        ("tests/planning/test_plan.py::test_casts",),
        "integers are cast to floats",
    ),
    Mutation(
        "recipe/match.py",
        "    others = tuple([made.tiles for made in found[1:]]) if len(found) > 1 else ()",
        "    others: tuple[tuple[Tile, ...], ...] = ()",
        ("tests/planning/test_plan.py::test_second_copies_of_a_tie_are_checked_not_loaded_twice",),
        "second copies of a tie are not compared",
    ),
    Mutation(
        "recipe/trace.py",
        '    if dtype is not None and dtype != x.dtype:\n        raise Untraceable(f"a cast from {x.dtype} to {dtype} inside a conversion")\n',
        "",
        ("tests/recipe/test_trace.py::test_what_has_no_map_is_not_guessed",),
        "a cast in a conversion is dropped",
    ),
    # ------------------------------------------------------------------------------------- adapters
    Mutation(
        "adapters/files.py",
        "not 0 < rank <= MAX_ADAPTER_RANK:",
        "not 0 <= rank <= MAX_ADAPTER_RANK:",
        ("tests/adapters/test_hostile_adapters.py",),
        "an adapter of rank 0 is taken",
    ),
    Mutation(
        "adapters/files.py",
        '_SETTINGS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")',
        '_SETTINGS = ("peft_type", "r", "use_rslora", "use_dora")',
        ("tests/adapters/test_peft_errors.py::test_a_wrong_directory",),
        "an adapter of another scale is taken",
    ),
    Mutation(
        "adapters/initial.py",
        "            if rule in SEEDED_INITS:\n                yield",
        "            if rule:\n                yield",
        ("tests/adapters/test_peft.py::test_a_rule_that_can_not_be_repeated_beside_one_that_can",),
        "a rule that needs data is repeated",
    ),
    # ------------------------------------------------------------------------------------- planning
    Mutation(
        "planning/cuts.py",
        "        first += (a - chunk.start[d]) * strides[d]",
        "        first += a * strides[d]",
        ("tests/planning/test_plan.py::test_ranks_read_each_element_once_from_where_it_lies",),
        "offsets in a chunk count from the whole tensor",
    ),
    Mutation(
        "planning/cuts.py",
        "            and outer.target_stride == loop.target_stride * loop.size\n",
        "",
        ("tests/planning/test_plan.py::test_merged_loops_copy_the_same",),
        "loops are merged that are no run in memory",
    ),
    Mutation(
        "planning/cover.py",
        "    if held != expected:",
        "    if held > expected:",
        ("tests/planning/test_plan.py::test_what_a_tile_may_not_do",),
        "elements that no tile writes are not noticed",
    ),
    Mutation(
        "planning/records.py",
        "if self.source_dtype != self.target_dtype or self.reads_whole_span:",
        "if self.reads_whole_span:",
        ("tests/planning/test_plan.py::test_costs_of_a_transfer",),
        "bytes of another dtype go straight into memory",
    ),
    # ------------------------------------------------------------------------------------- transfer
    Mutation(
        "transfer/copy.py",
        "target_offset=transfer.target_offset + begin * loop.target_stride,",
        "target_offset=transfer.target_offset,",
        ("tests/transfer/test_copy.py::test_every_rank_gets_its_shard",),
        "each part of a large read goes to the start",
    ),
    Mutation(
        "transfer/copy.py",
        "            if not torch.equal(_raw(stored), _raw(live)):",
        "            if not torch.equal(stored, live):",
        ("tests/transfer/test_copy.py::test_copies_are_compared_bit_by_bit",),
        "copies are compared as numbers",
    ),
    Mutation(
        "transfer/copy.py",
        "view = self._views[name] = raw.numpy().data[start:]",
        "view = self._views[name] = raw.numpy().data",
        ("tests/transfer/test_copy.py::test_every_rank_gets_its_shard",),
        "a tensor within a storage is filled at its start",
    ),
    Mutation(
        "transfer/copy.py",
        "                        patiently(os.fsync, fd)\n",
        "                        pass\n",
        ("tests/ranks/test_patience.py::test_fsync_finds_little_to_write",),
        "an export is not synced",
    ),
    # ------------------------------------------------------------------------------------- loading
    Mutation(
        "loading/load.py",
        '    if options.verify != "cover" and catalog.digests:',
        '    if options.verify == "digest" and catalog.digests:',
        ("tests/export/test_export.py::test_a_load_from_a_checkpoint_compares_digests",),
        "digests are not compared by default",
    ),
    Mutation(
        "loading/load.py",
        "        claim.alike(_fingerprint(plan), lambda: _describe(plan))\n",
        "",
        ("tests/loading/test_load_errors.py::test_ranks_that_build_different_models",),
        "ranks don't compare their plans",
    ),
    Mutation(
        "loading/initialize.py",
        'f"{seed}\\0{name}".encode()',
        'f"{seed}".encode()',
        ("tests/loading/test_initialize.py::test_each_module_draws_values_of_its_own",),
        "all modules draw the same values",
    ),
    Mutation(
        "loading/initialize.py",
        "drawn[local.box.slices]",
        "drawn[local.slices]",
        ("tests/loading/test_initialize.py::test_same_values_at_every_world_size",),
        "every rank takes the first rows",
    ),
    Mutation(
        "loading/clone.py",
        "        second.requires_grad_(False)\n",
        "",
        ("tests/loading/test_clone.py",),
        "a clone is not frozen",
    ),
    # ------------------------------------------------------------------------------------- state
    Mutation(
        "state/sampler.py",
        "first = begin + self._rank * size",
        "first = begin + self._rank",
        ("tests/state/test_sampler.py::test_a_run_that_changes_its_world_size_equals_a_plain_list",),
        "ranks read the same samples",
    ),
    Mutation(
        "state/sampler.py",
        'f"shardwise order {seed} {epoch} {length}"',
        'f"shardwise order {seed} {length}"',
        ("tests/state/test_sampler.py::test_every_epoch_holds_every_sample_in_another_order",),
        "every epoch has the same order",
    ),
    Mutation(
        "state/optimizer.py",
        "        before = optimizer.state.pop(parameter, {})",
        "        before = dict(optimizer.state[parameter])",
        ("tests/checkpoint/test_resume.py::test_stale_state_is_overwritten_or_cleared",),
        "stale optimizer state stays",
    ),
    Mutation(
        "state/optimizer.py",
        '    if [set(members) for members in live] != [set(g["names"]) for g in groups]:',
        '    if any(set(members) not in [set(g["names"]) for g in groups] for members in live):',
        ("tests/checkpoint/test_promises.py::test_groups_in_another_order_are_refused",),
        "groups in another order are taken",
    ),
    Mutation(
        "state/gradients.py",
        "    if mark is None or mark.gradient() is not gradient:",
        "    if mark is None:",
        ("tests/state/test_gradients.py::test_new_gradients_at_the_address_of_used_ones_wait",),
        "a new gradient at an old address counts as used",
    ),
    Mutation(
        "state/encoding.py",
        "        while key in self.tensors:  #",
        "        while False:  #",
        ("tests/state/test_typed_json.py",),
        "two tensors get one key",
    ),
    Mutation(
        "state/encoding.py",
        "type(key) is str and key != TAG and _is_text(key)",
        "type(key) is str and _is_text(key)",
        ("tests/state/test_typed_json.py",),
        "a dict with our tag is read as a type",
    ),
    Mutation(
        "state/replay.py",
        '            restore_rng(epoch.start["rng"])\n',
        "",
        ("tests/state/test_rng_data.py::test_resumed_run_equals_uninterrupted",),
        "an epoch is replayed with other draws",
    ),
    Mutation(
        "state/scaler.py",
        '(("UNSCALED", "unscale_ and step"), ("STEPPED", "step and update"))',
        '(("UNSCALED", "unscale_ and step"),)',
        ("tests/checkpoint/test_restore_refusals.py::test_a_scaler_in_the_middle_of_a_step_is_refused",),
        "a scaler between step and update is saved",
    ),
    Mutation(
        "state/loader_parts.py",
        '        0 <= state["state"].get("pos", 0) <= _TWISTER_WORDS',
        '        state["state"].get("pos", 0) <= _TWISTER_WORDS',
        ("tests/state/test_loader_parts.py",),
        "numpy reads before its words",
    ),
    # ------------------------------------------------------------------------------------- store
    Mutation(
        "store/write.py",
        "            if kind is None:\n                patiently(os.fsync, self._fd)",
        "            if kind is None:\n                pass",
        ("tests/store/test_publish.py",),
        "files are not synced",
    ),
    Mutation(
        "store/publish.py",
        "        fsync_directory(os.path.join(temporary, folder))",
        "        os.path.join(temporary, folder)",
        ("tests/store/test_publish.py",),
        "names of files are not synced",
    ),
    Mutation(
        "store/publish.py",
        '        raise CheckpointError(f"{final}: can\'t be published: {error.strerror}") from error\n    fsync_directory(os.path.dirname(final))\n',
        '        raise CheckpointError(f"{final}: can\'t be published: {error.strerror}") from error\n',
        ("tests/store/test_publish.py",),
        "the name of a new step is not synced",
    ),
    Mutation(
        "store/publish.py",
        '    wrong += [f"{n}: lost" for n in expected if n not in found]\n',
        "",
        ("tests/store/test_publish.py",),
        "a step is published without a file",
    ),
    Mutation(
        "store/publish.py",
        "    check_held(os.path.dirname(final))\n",
        "",
        ("tests/checkpoint/test_patience_of_ranks.py::test_a_lost_lock_publishes_nothing",),
        "a run that lost its lock publishes",
    ),
    Mutation(
        "store/publish.py",
        "    return dict(sorted(found.items(), reverse=True))",
        "    return dict(sorted(found.items()))",
        ("tests/checkpoint/test_damage_fallback.py",),
        "the oldest step is resumed",
    ),
    Mutation(
        "store/publish.py",
        "if name.startswith((_TEMPORARY, _TRASH))]",
        "if name.startswith(_TRASH)]",
        ("tests/checkpoint/test_checkpointer.py::test_never_published_is_none",),
        "leftovers of killed saves stay",
    ),
    Mutation(
        "store/lock.py",
        "        if self._root in _HELD:",
        "        if self._path in _HELD:",
        ("tests/checkpoint/test_promises.py::test_one_holder_in_a_process",),
        "a lock is looked up under another name than it is kept",
    ),
    Mutation(
        "store/direct.py",
        "            if kind is None and self._failure is not None:",
        "            if kind is not None and self._failure is not None:",
        DIRECT,
        "the writing thread's error is swallowed",
    ),
    Mutation(
        "store/slice_file.py",
        "        if self._room < BLOCK_BYTES:\n            self._close()\n",
        "",
        ("tests/checkpoint/test_verify.py::test_tensors_that_lie_across_blocks",),
        "the last block has no checksum",
    ),
    # ------------------------------------------------------------------------------------- checkpoint
    Mutation(
        "checkpoint/checkpointer.py",
        "            if valid < self._keep_last:",
        "            if valid <= self._keep_last:",
        ("tests/checkpoint/test_checkpointer.py::test_retention",),
        "one step more than keep_last stays",
    ),
    Mutation(
        "checkpoint/checkpointer.py",
        "                if not is_damage(error):\n                    raise\n",
        "",
        ("tests/checkpoint/test_promises.py::test_a_later_format_version_is_not_damage",),
        "every error counts as damage",
    ),
    Mutation(
        "checkpoint/checkpointer.py",
        "        self._lineage = Lineage(self._lineage.run_id, step)\n        self._retain(step, ranks)",
        "        self._retain(step, ranks)",
        (f"{CLI}::test_inspect_a_checkpoint",),
        "a step does not name the step before it",
    ),
    Mutation(
        "checkpoint/restore.py",
        "        exact=not (differences or skipped or caveats),",
        "        exact=not (differences or caveats),",
        ("tests/checkpoint/test_promises.py::test_state_that_a_resume_skips_is_reported_and_not_exact",),
        "exact although state was not restored",
    ),
    Mutation(
        "checkpoint/receivers.py",
        "        self.plan.apply()\n",
        "",
        ("tests/checkpoint/test_resume.py::test_transformers_model_goes_on_bitwise",),
        "generators are not restored",
    ),
    Mutation(
        "checkpoint/restore.py",
        "        exact=not (differences or skipped or caveats),",
        "        exact=not (skipped or caveats),",
        ("tests/checkpoint/test_exact_documents.py",),
        "exact although there are differences",
    ),
    Mutation(
        "checkpoint/optimizer.py",
        "        wrong = [n for n, digest in found.items() if digest != recorded[n]]",
        "        wrong = [n for n in found if n not in recorded]",
        ("tests/state/test_gradients.py::test_gradients_are_verified_like_every_tensor",),
        "digests of optimizer state are not compared",
    ),
    Mutation(
        "checkpoint/save.py",
        "            prove(manifest)\n            commit(temporary, final, manifest)",
        "            commit(temporary, final, manifest)\n            prove(manifest)",
        (
            "tests/format/test_hostile_manifest.py::test_a_conversion_of_damaged_tensors_publishes_nothing_even_for_a_moment",
        ),
        "published before it is proved",
    ),
    Mutation(
        "checkpoint/save_manifest.py",
        "        if len(set(found)) > 1 and not (",
        "        if len(set(found)) > 2 and not (",
        ("tests/checkpoint/test_promises_on_ranks.py::test_replicas_that_drifted_apart",),
        "replicas that drifted apart are saved",
    ),
    Mutation(
        "checkpoint/stage.py",
        "            if self._free_bytes < self._asked or self._error is not None:",
        "            if self.nbytes < self._asked or self._error is not None:",
        ("tests/checkpoint/test_async_save.py::test_the_state_at_the_call_is_stored",),
        "a piece is overwritten while it is written",
    ),
    Mutation(
        "checkpoint/stage.py",
        "tensors={k: t.detach().clone() for k, t in encoded.tensors.items()}",
        "tensors={k: t.detach() for k, t in encoded.tensors.items()}",
        ("tests/checkpoint/test_async_save.py::test_tensors_in_documents_are_those_at_the_call",),
        "documents change while they are saved behind",
    ),
    Mutation(
        "checkpoint/stage.py",
        "        self._sides[device].wait_stream(torch.accelerator.current_stream(device))\n",
        "        pass\n",
        (f"{DEVICE}::test_an_async_save_waits_for_no_copy",),
        "a copy reads what a kernel is still making",
    ),
    Mutation(
        "checkpoint/stage.py",
        "            torch.accelerator.current_stream(device).wait_stream(self._sides[device])\n",
        "            pass\n",
        (f"{DEVICE}::test_an_async_save_waits_for_no_copy",),
        "the next step overwrites what is being copied",
    ),
    Mutation(
        "checkpoint/stage.py",
        "            event.synchronize()\n",
        "            pass\n",
        (f"{DEVICE}::test_a_save_copies_through_a_small_ring",),
        "bytes are written before they have arrived",
    ),
    Mutation(
        "checkpoint/pieces.py",
        "        buffer.order()\n",
        "",
        (f"{DEVICE}::test_an_async_save_waits_for_no_copy",),
        "digest sums are copied before they are made",
    ),
    Mutation(
        "checkpoint/verify.py",
        "if t.name not in unread and finish(sums[t.name] % 2**64, t.dtype, t.shape) != digests[t.name]:",
        "if t.name not in unread and t.name not in digests:",
        ("tests/checkpoint/test_verify.py::test_payload_damage_names_the_tensor",),
        "verify compares no digests",
    ),
    Mutation(
        "checkpoint/check.py",
        "            if total.hexdigest() != entry.header_xxh3:",
        "            if entry.header_bytes == entry.nbytes and total.hexdigest() != entry.header_xxh3:",
        (f"{CLI}::test_the_history_of_a_run_that_went_back",),
        "headers are not compared before a resume",
    ),
    Mutation(
        "checkpoint/stored_documents.py",
        "    if len(content) != entry.nbytes or found != [entry.header_xxh3, *entry.blocks]:",
        "    if len(content) != entry.nbytes:",
        ("tests/checkpoint/test_documents.py::test_documents_are_compared_with_their_checksum",),
        "documents are not compared with their checksum",
    ),
    Mutation(
        "checkpoint/documents.py",
        '            skipped.append(f"{name}: not among this run\'s extras")',
        "            pass",
        ("tests/checkpoint/test_promises.py::test_state_that_a_resume_skips_is_reported_and_not_exact",),
        "an extra that no object takes is not reported",
    ),
    Mutation(
        "checkpoint/receivers.py",
        "    kept = copy.deepcopy(value) if is_asked else None",
        "    kept = value if is_asked else None",
        ("tests/checkpoint/test_exact_documents.py::test_an_extra_is_asked_again",),
        "the given state, not the stored one, is compared",
    ),
    # ------------------------------------------------------------------------------------- runs
    Mutation(
        "runs/diff.py",
        "        added=tuple(n for n in b if n not in a),",
        "        added=tuple(n for n in a if n not in b),",
        DIFF,
        "removed tensors count as added",
    ),
    Mutation(
        "runs/diff.py",
        '        gap = torch.where(gap.isnan(), float("inf"), gap)\n',
        "",
        DIFF,
        "a difference to NaN is lost",
    ),
    Mutation(
        "runs/diff.py",
        "x_digest is not None and x_digest == y_digest:",
        "x_digest == y_digest:",
        DIFF,
        "tensors without digests count as equal",
    ),
    Mutation(
        "runs/convert.py",
        "        if made.models[model][name].digest != digest",
        "        if name not in made.models[model]",
        (
            "tests/format/test_hostile_manifest.py::test_a_conversion_of_damaged_tensors_publishes_nothing_even_for_a_moment",
        ),
        "a conversion compares no digests",
    ),
    Mutation(
        "runs/third_party.py",
        "            if len({_as_text(options) for options in each}) > 1:",
        "            if not each:",
        ("tests/catalog/test_dcp.py::test_another_optimizer_is_refused",),
        "groups of different settings become one",
    ),
    # ------------------------------------------------------------------------------------- export
    Mutation(
        "export/files.py",
        "        if groups[-1] and used + nbytes > limit:",
        "        if groups[-1] and used > limit:",
        ("tests/export/test_export.py::test_no_file_has_more_bytes_than_asked",),
        "files are larger than asked",
    ),
    Mutation(
        "export/hub.py",
        '        config["dtype"] = str(torch_dtype(dtype)).removeprefix("torch.")\n',
        "",
        (f"{CLI}::test_export", "tests/export/test_export.py::test_several_files_and_dtype"),
        "the config says another dtype than the files",
    ),
    Mutation(
        "export/stored.py",
        "            if finish(total, stored.dtype, stored.shape) != self._catalog.digests[name]:",
        "            if name not in self._catalog.digests:",
        ("tests/export/test_export.py::test_a_damaged_checkpoint_is_not_exported",),
        "an export compares no digests",
    ),
    # ------------------------------------------------------------------------------------- integrations
    Mutation(
        "integrations/_trainer_place.py",
        "    return is_count(value) and value > 0",
        "    return is_count(value)",
        ("tests/integrations/test_trainer_place.py::test_a_malformed_extra_of_the_trainer",),
        "a batch of no samples is taken",
    ),
    Mutation(
        "integrations/_trainer_folder.py",
        "            except (FormatError, IntegrityError) as error:",
        "            except IntegrityError as error:",
        ("tests/integrations/test_trainer_place.py::test_the_search_passes_a_malformed_one_by",),
        "a malformed checkpoint ends the search",
    ),
    Mutation(
        "integrations/_trainer_folder.py",
        "    check_held(root)\n",
        "",
        ("tests/integrations/test_trainer_place.py::test_a_run_that_lost_the_directory_renames_nothing",),
        "checkpoints of another run are renamed",
    ),
    # ------------------------------------------------------------------------------------- cli
    Mutation(
        "cli/options.py",
        '_UNITS |= {f"{letter}B": 1000**power',
        '_UNITS |= {f"{letter}B": 1024**power',
        (f"{CLI}::test_units",),
        "KB counts as KiB",
    ),
    Mutation(
        "cli/commands.py",
        '    ok = all(document["ok"] for document in documents)',
        '    ok = any(document["ok"] for document in documents)',
        (f"{CLI}::test_verify_finds_damage",),
        "a damaged step beside a good one is fine",
    ),
    Mutation(
        "cli/render.py",
        'return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)',
        "return text",
        (f"{CLI}::test_hostile_names_are_shown_as_text",),
        "names from a file move the cursor",
    ),
    Mutation(
        "cli/tree.py",
        "    return node.dtype, node.shape, node.children",
        "    return node.dtype, node.shape",
        (f"{CLI}::test_tree_folds_only_what_is_alike",),
        "modules that differ are shown as one",
    ),
)
