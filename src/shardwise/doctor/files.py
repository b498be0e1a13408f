"""Looks at what a user gives: weights, checkpoints, a bucket, settings; and probes a directory."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import random
import re
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..catalog.pickles import Record
from ..catalog.pipelines import Pipeline
from ..catalog.records import METADATA_NAME, stem_of_ranks
from ..catalog.safetensors import catalog_of_safetensors, catalog_of_weights
from ..catalog.torch_files import ANY_NAMES, catalog_of_torch_file, read_torch_file
from ..catalog.weights import INDEX_NAME, Choice, weights_in
from ..checkpoint.verify import check_part
from ..errors import FormatError, ShardwiseError, SourceError
from ..format.header import HEAD_NAME, OTHERS_NAME, read_header
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..internals.diffusers import STEM
from ..limits import (
    MAX_CONFIG_DEPTH,
    MAX_COUNT,
    brief,
    is_inside,
    is_text,
    parse_json,
    read_json,
    read_shallow_json,
    read_small,
)
from ..publish.line import line_of
from ..publish.lock import lock_file
from ..publish.places import leftovers, was_ever_published
from ..runs.history import RESUMED, lost_parts
from ..storage.records import is_url, join, place_of
from ..storage.stores import store_of
from .facts import Bucket, Checkpoint, Model, Place, Settings, Speeds, classes_of, mount_of

# ----------------------------------------------------------------------------------------------------
# Looks at a directory of weights: its index, sizes and headers of its files. Opens no pickle.

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STEMS = ("pytorch_model", "model", STEM)
_ADAPTER = "adapter_config.json"
#: Names that torch.compile, DDP, FSDP1 and PEFT put before a model's own.
_WRAPPED = re.compile(r"_orig_mod\.|module\.|_fsdp_wrapped_module\.|base_model\.model\.")
_LORA = re.compile(r"\.lora_(A|B)\b")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
#: What from_pretrained reads; pytorch_model_fsdp.bin is the training state of FSDP.
_READ_PICKLE = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_POINTER = b"version https://git-lfs"


def holds_weights(names: Iterable[str]) -> bool:
    """Whether a directory with these names holds a model as the hub has it."""
    return any(n == "config.json" or n.endswith(".safetensors") or n == INDEX_NAME for n in names) or any(
        n.startswith(_STEMS) and n.endswith(PICKLES) for n in names
    )


def look_at_pipeline(pipeline: Pipeline, path: str) -> list[Model]:
    """Facts of each model of a local pipeline, and of the folders that it lacks. Rank-local; reads headers only."""
    components = pipeline.components.values()
    lost = tuple(one.name for one in components if not one.is_here)
    found = [Model(path=path, config={}, nbytes=0, lost=lost)] if lost else []
    for one in components:
        if one.is_here and (one.variants or holds_weights(os.listdir(one.folder))):
            plain_first = (None, *one.variants) if None in one.variants else one.variants or (None,)
            model = look_at_model(one.folder, plain_first[0])
            found.append(model if one.variants else replace(model, problem="no weights, only a config.json"))
    return found


def look_at_model(path: str, variant: str | None = None) -> Model:
    """Facts of the local directory ``path``, or of a variant of its weights. Rank-local; reads headers only."""
    names = sorted(os.listdir(path))
    index = _index_taken(path, variant)
    problem, outside, listed = (None, (), ()) if index is None else _index(path, index)
    files = [n for n in names if n.endswith(".safetensors")]
    damaged: dict[str, str] = {}
    pointers, shapes = [], dict[str, tuple[int, ...]]()
    for name in files:
        file = os.path.join(path, name)
        if _is_pointer(file):
            pointers.append(name)
            continue
        try:
            shapes |= {n: entry.shape for n, entry in read_header(file).entries.items()}
        except ShardwiseError as error:
            damaged[name] = _without(str(error), file)
    lost = tuple(n for n in listed if n not in names)
    pickles = [n for n in names if n.endswith(PICKLES) and n.startswith(_STEMS)]
    read = [n for n in pickles if _READ_PICKLE.fullmatch(n)]
    if files and not (problem or outside or lost or damaged or pointers):
        problem = _problem(path, variant)
    config = _config(os.path.join(path, "config.json")) if "config.json" in names else {}
    return Model(
        path=path,
        config=config,
        nbytes=sum(os.path.getsize(os.path.join(path, n)) for n in files or pickles),
        lost=lost,
        damaged=damaged,
        outside=outside,
        pointers=tuple(pointers),
        pickles=() if files else tuple(pickles),
        problem=problem,
        wrapped=tuple(sorted(filter(_WRAPPED.match, shapes)))
        if "config.json" in names and _ADAPTER not in names
        else (),
        slices=_slices(_config(os.path.join(path, _ADAPTER)), shapes) if _ADAPTER in names else (),
        only_pickled=_only_pickled(path, read, shapes) if shapes else (),
        base=_lost_base(_config(os.path.join(path, _ADAPTER))) if _ADAPTER in names else None,
        classes=classes_of(config),
    )


def _only_pickled(path: str, pickles: Iterable[str], shapes: Mapping[str, object]) -> tuple[str, ...]:
    """Tensors of pickles, if those and the safetensors files hold parts of one model: no name is in both.

    The same model in both formats, also under names of an earlier release, has names in common, or one is the end of
    another. Reads what the pickles say with :mod:`..catalog.pickles`, which runs nothing.
    """
    found = set[str]()
    for name in pickles:
        try:
            found |= catalog_of_torch_file(os.path.join(path, name)).tensors.keys()
        except ShardwiseError:
            return ()
    ends = {name.partition(".")[2] for name in (*found, *shapes)} - {""}
    is_apart = found.isdisjoint(shapes) and ends.isdisjoint(found) and ends.isdisjoint(shapes)
    return tuple(sorted(found)) if is_apart else ()


def _lost_base(config: Mapping[str, Any]) -> str | None:
    """The base that an adapter names, if it is a path that is not there, or one of the hub that is not here and can't be fetched."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not is_text(name) or "\0" in name or os.path.isdir(name):
        return None
    if not _HUB_ID.fullmatch(name):
        return name or None
    import huggingface_hub

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    return None if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str) else name


def _slices(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """LoRA matrices whose rank is not that of the adapter's config: A has one row for each, B one column."""
    if (
        not isinstance(rank := config.get("r"), int)
        or config.get("rank_pattern")
        or config.get("target_parameters")
    ):
        return ()  # no rank, or several
    found = []
    for name, shape in sorted(shapes.items()):
        matrix = _LORA.search(name)
        has = None if matrix is None or len(shape) != 2 else shape[0 if matrix[1] == "A" else 1]
        if has is not None and has != rank:
            found.append(f"{name} has rank {has}, but {_ADAPTER} says {rank}")
    return tuple(found)


def look_at_stored_model(url: str, names: Iterable[str]) -> Model:
    """Facts of a model below a URL: a few requests for each file."""
    known, problem, nbytes = list(names), None, 0
    pickles = tuple(n for n in known if n.endswith(PICKLES))
    files = any(n.endswith(".safetensors") for n in known)
    if files:
        try:
            nbytes = sum(f.nbytes for f in catalog_of_safetensors(url).files)
        except ShardwiseError as error:
            problem = _without(str(error), url)
    config = _config(join(url, "config.json")) if "config.json" in known else {}
    return Model(path=url, config=config, nbytes=nbytes, pickles=() if files else pickles, problem=problem)


def _index_taken(path: str, variant: str | None) -> str | None:
    """The index by which a load goes, if it goes by one."""
    try:
        weights = weights_in(path, Choice(variant=variant, use_safetensors=True))
    except ShardwiseError:
        return None
    return weights.name if weights is not None and weights.is_index else None


def _index(path: str, name: str) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """Why the index can't be read, its names that lead outside, and the files that it names."""
    try:
        document = read_json(os.path.join(path, name), "index")
    except ShardwiseError as error:
        return _without(str(error), path), (), ()
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        return f"{name}: its weight_map is missing, empty, or not an object", (), ()
    files = list(dict.fromkeys(brief(f) if not isinstance(f, str) else f for f in found.values()))
    outside = tuple(f for f in files if not is_inside(f) or "/" in f)
    return None, outside, tuple(f for f in files if f not in outside)


def _problem(path: str, variant: str | None) -> str | None:
    """What else may stop a load: tensors that an index lists and no file holds, or that are stored twice."""
    try:
        choice = Choice(variant=variant, use_safetensors=True)
        weights = weights_in(path, choice)
        catalog = catalog_of_weights(path, weights, choice) if weights else catalog_of_safetensors(path)
        unheld = catalog.unheld
    except ShardwiseError as error:
        return _without(str(error), path)
    if not unheld:
        return None
    more = f" and {len(unheld) - 5} more" if len(unheld) > 5 else ""
    lost = ", ".join(f"{name} (in {file})" for name, file in list(unheld.items())[:5])
    return f"{_index_taken(path, variant)}: lists tensors that their files don't contain: {lost}{more}"


def _config(path: str) -> dict[str, Any]:
    try:
        found = read_shallow_json(path)
    except ShardwiseError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_pointer(file: str) -> bool:
    if not os.path.isfile(file):
        return False  # a pipe would be waited for
    try:
        with open(file, "rb") as opened:
            return opened.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def _without(text: str, path: str) -> str:
    """An error's text without the path that a finding names anyway."""
    return text.removeprefix(f"{path}: ") if is_url(path) or path in text else text


# ----------------------------------------------------------------------------------------------------
# A short probe of a prefix in an object store: a few small objects, which it deletes.


def look_at_bucket(url: str) -> Bucket:
    """Facts of the prefix ``url``. Rank-local; takes about ten requests.

    Asks for what a run needs: list, write, write only if absent, replace only if unchanged, delete.
    """
    failures: dict[str, str] = {}
    ahead_s = 0.0
    step = "list"
    try:
        place = place_of(join(url, f".shardwise-doctor-{secrets.token_hex(8)}"))
        store = store_of(place.root)
        store.list(place.key)
        step, plain, key = "write", f"{place.key}/plain", f"{place.key}/one"
        first, second = (_content(k) for k in range(2))
        store.write(plain, iter([memoryview(first)]), len(first))
        step = "create"
        if not store.create(key, first):
            failures["create"] = "a write to a fresh name was refused as if it were taken"
        stat = store.stat(key)
        if stat is not None and stat.changed_s is not None:
            found_s = stat.changed_s - time.time()
            ahead_s = 0.0 if -2.0 <= found_s <= 0.0 else found_s  # stores say whole seconds
        if store.create(key, second):
            failures["create"] = "a second write under 'only if absent' replaced the first"
        step = "replace"
        held = store.get(key, 4096)
        if held is not None:
            third = _content(3)
            if not store.replace(key, third, held):
                failures["replace"] = "'only if unchanged' was refused though nothing had changed"
            elif store.replace(key, _content(4), held):
                failures["replace"] = "'only if unchanged' replaced an object that had changed"
    except (ShardwiseError, OSError) as error:
        failures[step] = str(error)
    if step not in ("list", "write"):
        try:
            for name in (plain, key):
                store.delete(name)
                if store.stat(name) is not None:
                    failures["delete"] = "the object is still there"
        except (ShardwiseError, OSError) as error:
            failures["delete"] = str(error)
    return Bucket(url=url, failures=failures, clock_ahead_s=ahead_s)


def _content(number: int) -> bytes:
    """Unlike that of any other writer."""
    return json.dumps({"probe": number, "nonce": secrets.token_hex(8)}).encode()


# ----------------------------------------------------------------------------------------------------
# Reads configurations: Accelerate's YAML or JSON, and TrainingArguments as JSON or pickled. Values are taken as they stand.

#: Real ones have a few KiB, and a few hundred values.
_MOST_BYTES, _MOST_VALUES = 1024**2, 100_000
#: Settings whose values the facts, which ``--json`` prints, repeat: those that rules read, without their prefixes. Any
#: other text or number may be a secret: under a name of its author's, within a URL or an argument.
_READ = frozenset(
    [
        "activation_checkpointing",
        "auto_wrap_policy",
        "backward_prefetch",
        "bf16",
        "compute_environment",
        "cp_size",
        "cpu_ram_efficient_loading",
        "distributed_type",
        "dynamo_backend",
        "dynamo_mode",
        "forward_prefetch",
        "fp16",
        "fsdp",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "ignore_data_skip",
        "load_best_model_at_end",
        "main_process_ip",
        "min_num_params",
        "mixed_precision",
        "num_machines",
        "num_processes",
        "offload_params",
        "optim",
        "rdzv_backend",
        "reshard_after_forward",
        "same_network",
        "save_only_model",
        "save_strategy",
        "sharding_strategy",
        "sp_size",
        "state_dict_type",
        "sync_module_states",
        "tf32",
        "tp_size",
        "transformer_layer_cls_to_wrap",
        "use_cpu",
        "use_orig_params",
        "version",
    ]
)
_HIDDEN = "…"

#: The HF Trainer's pickle of its arguments.
ARGUMENTS_FILE = "training_args.bin"

_OF_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "num_processes"}
_OF_ARGUMENTS = {"output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "save_strategy"}


def read_settings(path: str) -> Settings:
    """The mapping in a ``.yaml``, ``.yml`` or ``.json`` file. Raises :class:`SourceError`, :class:`FormatError`."""
    raw = read_small(path, "configuration", _MOST_BYTES)
    found = parse_json(raw, path, "configuration") if path.endswith(".json") else _yaml(raw, path)
    if not isinstance(found, dict):
        raise FormatError("contains no settings: expected names and values", path=path)
    _check_size(found, path)
    return Settings(path=path, values={name: _shown(name, value) for name, value in found.items()})


def read_pickled_arguments(path: str) -> Settings:
    """The fields of the TrainingArguments in a ``training_args.bin``. Nothing of it is run: an enum is its value, another object None.

    Raises :class:`SourceError`, :class:`FormatError`.
    """

    def pick(content: Any) -> Any:
        return _plain(content.state if isinstance(content, Record) else None)

    found, _ = read_torch_file(path, pick, names=ANY_NAMES)
    if not isinstance(found, dict):
        raise FormatError("contains no arguments of the HF Trainer", path=path)
    _check_size(found, path)
    return Settings(path=path, values={str(name): _shown(name, value) for name, value in found.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Record):  # an enum's member is a call with its value
        return value.args[0] if len(value.args) == 1 and isinstance(value.args[0], str) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str) else None


def _check_size(found: Any, path: str) -> None:
    """Refuse many values (aliases of YAML let one stand for billions), deep ones, and endless numbers."""
    waiting, count = [(found, 1)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count + len(waiting) > _MOST_VALUES:
            raise FormatError(f"holds more than {_MOST_VALUES} values: no configuration", path=path)
        if depth > MAX_CONFIG_DEPTH:
            raise FormatError(
                f"has values nested deeper than {MAX_CONFIG_DEPTH}: no configuration", path=path
            )
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise FormatError(f"has a number above {MAX_COUNT}: no configuration", path=path)
        if isinstance(value, dict | list):
            waiting += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]


def _shown(name: Any, value: Any) -> Any:
    """A value for rules and facts: switches, and the settings that rules read."""
    if isinstance(value, dict):
        return {inner: _shown(inner, one) for inner, one in value.items()}
    if isinstance(value, list):
        return [_shown(name, one) for one in value]
    if isinstance(value, bool) or not value:
        return value
    is_read = str(name).removeprefix("fsdp_").removeprefix("parallelism_config_") in _READ
    return value if is_read and isinstance(value, str | int | float) else _HIDDEN


def _yaml(raw: bytes, path: str) -> Any:
    import yaml  # transformers and huggingface_hub require it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Counts what merge keys ("<<") copy: a few lines of them stand for billions of values."""

        copied = 0

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self.copied += len(node.value)
            if self.copied > _MOST_VALUES:
                raise ValueError(f"its merge keys copy more than {_MOST_VALUES} values")

    try:
        return yaml.load(raw, Loader)
    except (
        Exception
    ) as error:  # PyYAML's constructors raise what Python does for "!!bool maybe" or "!!int ''"
        text = " ".join(str(error).split())[:200]
        raise FormatError(f"is not YAML: {type(error).__name__}: {text}", path=path) from None


def is_accelerate(settings: Settings) -> bool:
    """Whether ``accelerate config`` writes such names; TrainingArguments have an ``fsdp_config``, too."""
    return bool(_OF_ACCELERATE & settings.values.keys()) and not is_arguments(settings)


def is_arguments(settings: Settings) -> bool:
    """Whether these are arguments of the HF Trainer."""
    return len(_OF_ARGUMENTS & settings.values.keys()) >= 1


# ----------------------------------------------------------------------------------------------------
# Looks at a checkpoint, or at a directory of checkpoints, from names, manifests and headers. Opens no pickle.

#: A directory may hold many steps; a resume takes one of the newest.
_STEPS_CHECKED = 3
#: Of Accelerate: FSDP1's flat parameters (``LOCAL_STATE_DICT``).
_PER_RANK = re.compile(r"(pytorch_model_fsdp|pytorch_model)_rank\d+\.bin")
_OF_OTHERS = re.compile(
    r"\.metadata|.*\.distcp|(pytorch_model_fsdp|optimizer)(_\d+)?(\.bin|\.pt)?|trainer_state\.json|"
    r"random_states_\d+\.pkl|rng_state.*\.pth|scheduler\.(bin|pt)"
)
#: Files that no resume reads.
_TEXTS = re.compile(r"\..*|.*\.(md|txt|log)")
_NUMBERS = re.compile(r"\d+")


def holds_checkpoint(path: str, names: Iterable[str]) -> bool:
    """Whether a directory with these names holds training state, or steps of a run."""
    known = set(names)
    if MANIFEST_NAME in known or HEAD_NAME in known:
        return True
    if any(_PER_RANK.fullmatch(n) or stem_of_ranks(n) or _OF_OTHERS.fullmatch(n) for n in known):
        return True
    return not is_url(path) and (was_ever_published(path) or bool(leftovers(path)))


def look_at_checkpoint(path: str, names: Iterable[str]) -> Checkpoint:
    """Facts of the directory or URL ``path``. Rank-local; reads no payload."""
    known = set(names)
    if MANIFEST_NAME in known:
        try:
            step = read_manifest(path).step
        except ShardwiseError:
            step = 0  # the check says why
        return Checkpoint(path=path, kind="step", damaged=_damage({step: path}))
    if HEAD_NAME in known or (not is_url(path) and (was_ever_published(path) or leftovers(path))):
        return _of_line(path)
    return _of_others(path)


def _of_line(path: str) -> Checkpoint:
    line = line_of(path)
    try:
        steps = line.seen_steps()
        aside, left = line.set_aside(), line.leftovers()
    except ShardwiseError as error:
        return Checkpoint(path=path, kind="steps", damaged={os.path.basename(path): str(error)})
    newest = {step: join(path, name) for step, name in list(steps.items())[:_STEPS_CHECKED]}
    return Checkpoint(
        path=path,
        kind="steps",
        steps=tuple(steps),
        set_aside=tuple(one.name for one in aside),
        leftovers=tuple(left),
        damaged=_damage(newest),
    )


def _damage(steps: dict[int, str]) -> dict[str, str]:
    found = {}
    for step, place in steps.items():
        try:
            check_part(place, step)
        except ShardwiseError as error:
            found[os.path.basename(place)] = str(error)
    return found


def _of_others(path: str) -> Checkpoint:
    files = sorted(
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, names in os.walk(path)
        for name in names
    )
    per_rank = tuple(n for n in files if _PER_RANK.fullmatch(os.path.basename(n)))
    parts = {os.path.dirname(n) for n in files if n.endswith(".distcp")}
    described = {os.path.dirname(n) for n in files if os.path.basename(n) == METADATA_NAME}
    return Checkpoint(
        path=path,
        kind="per-rank" if per_rank else "dcp" if parts or described else "full",
        per_rank=per_rank,
        pickles=tuple(n for n in files if n.endswith(PICKLES) or os.path.basename(n) == METADATA_NAME),
        nbytes=sum(os.path.getsize(os.path.join(path, n)) for n in files),
        lacks_metadata=bool(parts - described),
    )


def look_for_lost(found: Checkpoint, names: Sequence[str], neighbors: Sequence[Sequence[str]]) -> Checkpoint:
    """Add what ``found``, a numbered checkpoint of the HF Trainer, Accelerate or a ShardwiseTrainer, lacks; also by its neighbors' files.

    A directory without a number may be a finished model, and no run resumes from that. Rank-local; reads names, and the
    Trainer's arguments.
    """
    if not OTHERS_NAME.fullmatch(os.path.basename(found.path)) or found.kind == "steps":
        return found
    if found.kind == "step":  # of a ShardwiseTrainer; the manifest lists its files
        only = "optimizer" not in names and _says_model_only(os.path.join(found.path, ARGUMENTS_FILE))
        return replace(found, lost=("optimizer", "scheduler"), is_model_only=True) if only else found
    lost = lost_parts(names)
    return replace(
        found,
        lost=lost,
        lost_files=_lost_files(names, neighbors),
        is_model_only=bool(lost) and _says_model_only(os.path.join(found.path, ARGUMENTS_FILE)),
    )


def _lost_files(names: Sequence[str], others: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Files of all ``others``, if there are at least two, that ``names`` lacks. Numbers in names may differ: they count ranks, parts and steps."""
    if len(others) < 2:
        return ()
    by_form = [{_NUMBERS.sub("N", name): name for name in other} for other in others]
    shared = set(by_form[0]).intersection(*by_form[1:]) - {_NUMBERS.sub("N", name) for name in names}
    found = sorted(by_form[0][form] for form in shared)
    told = [*RESUMED.values(), _TEXTS]
    return tuple(name for name in found if not any(one.fullmatch(name) for one in told))


def _says_model_only(path: str) -> bool:
    try:
        return read_pickled_arguments(path).values.get("save_only_model") is True
    except SourceError:
        return False


# ----------------------------------------------------------------------------------------------------
# A short probe of a directory: writes at most 64 MiB below a fresh name, reads them, and deletes them.

#: Names of what the probe makes begin so. It deletes them, also when it is interrupted; SIGKILL leaves one such folder.
PREFIX = ".shardwise-doctor-"
_BYTES, _PIECE_BYTES, _READ_BYTES = 64 * 1024**2, 4 * 1024**2, 8 * 1024**2
#: Each of the three measurements ends after so long.
_EACH_S = 1.5
#: Folders of probes that run.
_running: set[str] = set()


def look_at_place(path: str) -> Place:
    """Facts of the directory ``path``, which exists. Rank-local; takes a few seconds, unless the storage hangs."""
    space = os.statvfs(path)
    free_bytes = space.f_bavail * space.f_frsize if space.f_blocks else None
    failures: dict[str, str] = {}
    speeds, ahead_s = None, 0.0
    folder = os.path.join(path, f"{PREFIX}{secrets.token_hex(8)}")
    _running.add(folder)  # before it is there: an interrupt may come at any moment
    try:
        os.mkdir(folder, 0o700)
    except OSError as error:
        _running.discard(folder)
        failures["write"] = error.strerror or str(error)
    else:
        try:
            speeds, ahead_s = _measure(
                folder, _BYTES if free_bytes is None else min(_BYTES, free_bytes // 4), failures
            )
            _try(failures, "rename", lambda: _rename(folder))
            _try(failures, "lock", lambda: _lock(folder, failures))
            _try(failures, "direct", lambda: _write_direct(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _running.discard(folder)
    return Place(
        path=path,
        mount=mount_of(path),
        free_bytes=free_bytes,
        free_inodes=space.f_favail if space.f_files else None,
        failures=failures,
        speeds=speeds,
        clock_ahead_s=ahead_s,
    )


def delete_probes() -> None:
    """Delete the folders of probes that other threads run, before the process ends and those threads with it."""
    for folder in [*_running] * 20:  # the probe may make a file meanwhile
        shutil.rmtree(folder, ignore_errors=True)


def _try(failures: dict[str, str], what: str, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        failures[what] = error.strerror or str(error)


def _measure(folder: str, nbytes: int, failures: dict[str, str]) -> tuple[Speeds | None, float]:
    """Write, sync and read one file; what was measured, and how far its time is ahead of this machine's clock."""
    step, ahead_s = "write", 0.0
    fd = -1
    try:
        fd = os.open(os.path.join(folder, "bytes"), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        began, now_s = time.monotonic(), time.time()
        done = _fill(fd, nbytes)
        ahead_s = os.fstat(fd).st_mtime - time.time()
        if -1.0 <= ahead_s <= 0.0 or now_s <= os.fstat(fd).st_mtime <= time.time():
            ahead_s = 0.0  # within the write: no difference that this can see
        step = "fsync"
        os.fsync(fd)
        write_s = time.monotonic() - began
        fsync_s = statistics.median(_time_of_sync(folder, k) for k in range(3))
        step = "read"
        _forget(fd)
        read = _read(fd, range(0, done, _PIECE_BYTES), _PIECE_BYTES)
        _forget(fd)
        draw = random.Random(0)
        places = [draw.randrange(0, max(1, done - _READ_BYTES)) // 4096 * 4096 for _ in range(8)]
        return Speeds(
            write_bytes_s=done / max(write_s, 1e-6),
            read_bytes_s=read,
            random_bytes_s=_read(fd, places, _READ_BYTES),
            fsync_s=fsync_s,
        ), ahead_s
    except OSError as error:
        failures[step] = error.strerror or str(error)
        return None, ahead_s
    finally:
        if fd >= 0:
            os.close(fd)


def _fill(fd: int, nbytes: int) -> int:
    piece = os.urandom(min(_PIECE_BYTES, max(nbytes, 4096)))
    done, end = 0, time.monotonic() + _EACH_S
    while not done or (done < nbytes and time.monotonic() < end):
        done += os.pwrite(fd, piece, done)
    return done


def _time_of_sync(folder: str, number: int) -> float:
    fd = os.open(os.path.join(folder, f"small-{number}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, bytes(4096))
        began = time.monotonic()
        os.fsync(fd)
        return time.monotonic() - began
    finally:
        os.close(fd)


def _forget(fd: int) -> None:
    """Ask the system to drop the file's pages, so that a read reaches the storage."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(fd: int, places: range | list[int], nbytes: int) -> float:
    """Bytes a second."""
    began, done = time.monotonic(), 0
    for start in places:
        done += len(os.pread(fd, nbytes, start))
        if time.monotonic() - began > _EACH_S:
            break
    return done / max(time.monotonic() - began, 1e-6)


def _rename(folder: str) -> None:
    """As a published checkpoint does: a file over another, and a whole directory."""
    old, new = os.path.join(folder, "small-0"), os.path.join(folder, "small-1")
    for path in (old, new):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    os.replace(old, new)
    os.mkdir(os.path.join(folder, "half"))
    os.rename(os.path.join(folder, "half"), os.path.join(folder, "whole"))


def _lock(folder: str, failures: dict[str, str]) -> None:
    """Lock a file twice, through two descriptors: the second must be refused."""
    path = os.path.join(folder, "lock")
    first = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    second = os.open(path, os.O_RDWR)
    try:
        lock_file(first)
        if not hasattr(fcntl, "F_OFD_SETLK"):
            return  # locks of the process: they do not exclude their own process
        try:
            lock_file(second)
        except OSError:
            return
        failures["exclude"] = "two holders had one lock"
    finally:
        os.close(first)
        os.close(second)


def _write_direct(folder: str) -> None:
    """Write one page past the page cache."""
    if not hasattr(os, "O_DIRECT"):
        return
    fd = os.open(os.path.join(folder, "direct"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, 4096) as page:
            os.write(fd, page)
    finally:
        os.close(fd)
