"""Targets for what other programs write: doctor's files and logs, reports, quantized configs, indexes, adapters, documents, leftovers."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.weights import Choice, listed, weights_in
from shardwise.doctor.examine import Diagnosis, collect, findings_of
from shardwise.doctor.facts import Facts
from shardwise.doctor.files import (
    holds_checkpoint,
    holds_weights,
    is_accelerate,
    is_arguments,
    look_at_checkpoint,
    look_at_model,
    read_settings,
)
from shardwise.doctor.logs import KNOWN, read_log
from shardwise.engine.objects import SourceReader
from shardwise.engine.shared import DecodingReader
from shardwise.errors import ShardwiseError
from shardwise.format.header import describe_steps
from shardwise.format.manifest import read_manifest
from shardwise.loading.adapters import _check_patterns, attach, open_adapter, read_adapter_config
from shardwise.models.documents import code_of, read_documents
from shardwise.planning.plan import IOOptions
from shardwise.publish.hosts import proved_units
from shardwise.publish.lock import has_note, is_checkpoint, is_ours, mark, remove_ours
from shardwise.publish.ring import Record, Ring, read_or_make_record, write_record
from shardwise.quantized.open import dequantized
from shardwise.report.records import find_material
from shardwise.report.report import render
from shardwise.runs.history import is_root, steps_below
from tests.fuzz.mutate import TEXTS, mutate_bytes, mutate_header, mutate_json, mutated_text
from tests.fuzz.targets import Seeds, _bytes, _mutate_manifest, copied, removed, replaced, target

# ------------------------------------------------------------------------------------------------ doctor

_ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "machine_rank": 0,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29500,
    "num_machines": 2,
    "num_processes": 16,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
    "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1},
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_min_num_params": 100,
    },
}
_ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "gradient_checkpointing": True,
    "save_strategy": "steps",
    "save_steps": 0.5,
    "save_only_model": False,
    "load_best_model_at_end": True,
    "bf16": True,
    "optim": "adamw_bnb_8bit",
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "activation_checkpointing": True, "reshard_after_forward": "full_shard"},
    "ignore_data_skip": True,
    "report_to": ["wandb"],
}
_YAML = (
    *(
        b"&a [*a, *a]",
        b"<<: [*a, *a]\n",
        b"!!python/object/apply:tests.fuzz.guard.canary []",
        b"!!bool maybe",
        b"!!int ''",
    ),
    *(
        b"!!timestamp 9999-99-99",
        b"!!binary '\xff'",
        b"!!set {a, b}",
        b"? [a]\n: b\n",
        b"1:1:1:1",
        b"0x",
        b".inf",
        b"0b2",
    ),
    *(
        b"- " * 300,
        b"[" * 300,
        b"---\n",
        b"%YAML 9.9\n",
        b"\t",
        b"|\n",
        b"a: &x 1\nb: *y\n",
        b"'",
        b"1" * 5000,
        b"!!omap [a: 1]",
    ),
)


@cache
def _facts() -> Facts:
    return collect([])


def prepare() -> None:
    """Look at this machine, and let matplotlib make its caches, before any input is guarded."""
    import matplotlib.font_manager
    import matplotlib.pyplot

    assert matplotlib.font_manager.fontManager
    _facts()


def _diagnosed(**found: Any) -> None:
    facts = replace(_facts(), **found)
    json.dumps(Diagnosis(facts=facts, findings=tuple(findings_of(facts)), speaks=True).to_json())


def _settings(place: Path) -> None:
    settings = read_settings(str(next(place.iterdir())))
    if is_arguments(settings):
        _diagnosed(arguments=(settings,))
    elif is_accelerate(settings):
        _diagnosed(accelerate=(settings,))


def _yaml_of(value: Any) -> bytes:
    import yaml

    return yaml.dump(value, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)).encode("utf-8", "replace")


@target(30, _settings)
def _doctor_settings(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Accelerate's YAML and TrainingArguments' JSON."""
    value = rng.choice((_ACCELERATE, _ACCELERATE, _ARGUMENTS))
    if rng.random() < 0.4:
        replaced(place / "a.json", mutated_text(rng, value))
        return
    text = _yaml_of(mutate_json(rng, value, 3))
    for _ in range(rng.choice((0, 0, 1, 1, 3))):
        lines = text.split(b"\n")
        at = rng.randrange(len(lines))
        lines[at] = (
            lines[at].partition(b":")[0] + b": " + rng.choice(_YAML)
            if rng.random() < 0.6
            else rng.choice(_YAML)
        )
        text = b"\n".join(lines)
    replaced(place / "a.yaml", mutate_bytes(rng, text) if rng.random() < 0.1 else text[:200_000])


def _log_read(place: Path) -> None:
    _diagnosed(logs=(read_log(str(place / "run.log")),))


_LINES = [text for known in KNOWN for text in known.lines]
_IN_LOGS = (
    *_LINES,
    *(
        "exitcode  : -9",
        "'loss': 2.31",
        "loss=" + "9" * 9 + "." + "1" * 20,
        "loss : " * 500,
        "optim Missing key",
        "| MISSING | layers.0.",
    ),
    *(
        "Connection refused remote=[127.0.0.1]",
        "\x1b[31m",
        "\0",
        "é",
        "\r",
        "exitcode" + " " * 5000,
        "Missing key" * 300,
    ),
)


@target(40, _log_read)
def _doctor_logs(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Lines that are known, near known, long, and torn."""
    lines = []
    for _ in range(rng.choice((1, 3, 20))):
        line = rng.choice((" ", "", ": ")).join(rng.choice(_IN_LOGS) for _ in range(rng.randint(1, 4)))
        lines.append(line * rng.choice((1, 1, 1, 1, 30)))
    text = rng.choice(("\n", "\r\n", " ")).join(lines).encode()
    replaced(place / "run.log", mutate_bytes(rng, text, 8) if rng.random() < 0.5 else text)


def _looked_at(place: Path) -> None:
    names = os.listdir(place)
    if holds_weights(names):
        _diagnosed(models=(look_at_model(str(place)),))
    if holds_checkpoint(str(place), names):
        _diagnosed(checkpoints=(look_at_checkpoint(str(place), names),))


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@target(10, _looked_at)
def _doctor_models(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Directories of models and checkpoints with a damaged file."""
    kind = rng.choice(("model", "hub", "torch_index", "dcp", "trainer", "run"))
    copied(seeds[kind], place)
    if kind == "run" and rng.random() < 0.7:
        _mutate_manifest(rng, place / "step-00000002")
        return
    files = sorted(path for path in place.rglob("*") if path.is_file())
    path = rng.choice(files)
    content = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.8:
        content = mutated_text(rng, json.loads(content))
    elif path.suffix == ".safetensors" and rng.random() < 0.7:
        content = mutate_header(rng, content)
    else:
        content = rng.choice((_POINTER, b"", mutate_bytes(rng, content)))
    replaced(path, content)


# ------------------------------------------------------------------------------------------------ reports


def _lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _bytes(path).splitlines()]


def _found(place: Path) -> None:
    find_material([str(place)])


def _rendered(place: Path) -> None:
    text = render(find_material([str(place)]))
    assert "<script>alert" not in text, "the report repeats HTML of its input"


def _make_report(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["report"], place)
    path = rng.choice(
        sorted(p for p in place.rglob("*") if p.suffix in (".jsonl", ".json") and "step-" not in str(p))
    )
    if path.suffix == ".json":
        replaced(path, mutated_text(rng, json.loads(path.read_bytes())))
        return
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(records))
        kind = rng.randrange(6)
        if kind <= 2:
            records[at] = mutate_json(rng, records[at])
        elif kind == 3:
            records[at:at] = records[at : at + rng.choice((1, 5))] * rng.choice((1, 3, 50))
        elif kind == 4:
            records[at], records[0] = records[0], records[at]
        elif isinstance(records[at], dict):
            records[at][rng.choice(("name", "host", "error", "t", "step", "id", "parent"))] = rng.choice(
                ("<script>alert(1)</script>", "</svg>", -1, 2**62, 1e308, None, [], "$\\frac{", *TEXTS)
            )
    text = "\n".join(map(json.dumps, records)).encode()
    replaced(path, mutate_bytes(rng, text) if rng.random() < 0.2 else text)


@target(30, _found)
def _report_material(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Ledgers, loss logs and plans, as a report reads them."""
    _make_report(rng, seeds, place)


@target(0.2, _rendered)
def _report_page(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """The same, to the whole page."""
    _make_report(rng, seeds, place)


# --------------------------------------------------------------------------------------------- quantized

_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "bitsandbytes", "mxfp4", "quanto", "")
_SETTINGS = (
    *(("bits", n) for n in (0, 1, 2, 3, 4, 5, 8, 32, -4, "4", 4.0, True)),
    *(("group_size", n) for n in (0, -1, 1, 7, 32, 128, 2**40, "32", None)),
    *(
        ("weight_block_size", n)
        for n in (None, [], [0, 0], [1, 1], [128], [4, 8, 8], [-1, 4], [2**40, 1], ["4", 8], "x")
    ),
    *(
        ("desc_act", True),
        ("sym", True),
        ("sym", "no"),
        ("zero_point", False),
        ("version", "gemv"),
        ("checkpoint_format", "gptq_v2"),
    ),
    *(
        ("bnb_4bit_quant_type", "fp4"),
        ("load_in_8bit", True),
        ("load_in_4bit", True),
        ("format", "mxfp4-pack-quantized"),
    ),
    *(("modules_to_not_convert", n) for n in (None, ["lm_head"], "lm_head", [1], ["re:(a|a)*x"], ["*"])),
    *(("ignore", n) for n in (None, ["re:.*"], ["re:(a|a)*$"], ["re:("], [None], "re:.*")),
    *(("num_bits", n) for n in (0, 1, 3, 4, 16, -1, "8")),
    *(("strategy", n) for n in ("group", "channel", "tensor", "block", "tensor_group", "x", None, 1)),
    *(("type", n) for n in ("int", "float", "x")),
    *(("actorder", n) for n in ("group", "weight", True, 1)),
    *(("block_structure", n) for n in ([4, 8], "4x8", [0, 1], None)),
    *(("targets", n) for n in (["Linear"], ["re:(.*)*x"], ["re:["], [], None, "Linear", [1])),
    *(("scale_fmt", "ue8m0"), ("scale_dtype", "torch.uint8"), ("symmetric", False), ("dynamic", True)),
)


def _inside(value: Any) -> list[dict[str, Any]]:
    """All objects of a JSON value."""
    found, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            found.append(one)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return found


def _mutate_quantized(rng: random.Random, seeds: Seeds, place: Path) -> None:
    source = seeds[rng.choice(sorted(name for name in seeds if name.startswith("quantized ")))]
    copied(source, place)
    if rng.random() < 0.25:
        replaced(place / "model.safetensors", mutate_header(rng, _bytes(source / "model.safetensors")))
        return
    config = json.loads(_bytes(source / "config.json"))
    settings = config["quantization_config"]
    for _ in range(rng.randint(1, 2)):
        kind = rng.randrange(4)
        if kind == 0:
            settings = mutate_json(rng, settings, 2)
        elif kind == 1 and isinstance(settings, dict):
            settings["quant_method"] = rng.choice(_METHODS)
        elif objects := _inside(settings):
            name, value = rng.choice(_SETTINGS)
            having = [one for one in objects if name in one]
            rng.choice(having or objects)[name] = value
    config["quantization_config"] = settings
    replaced(place / "config.json", json.dumps(config).encode())


@target(40, lambda place: dequantized(open_catalog(place)))
def _quantized_configs(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """What a config says of codes and scales."""
    _mutate_quantized(rng, seeds, place)


def _decoded(place: Path) -> None:
    catalog = dequantized(open_catalog(place))
    with SourceReader(files=catalog.files) as files:
        reader = DecodingReader(files, catalog.coded, IOOptions(staging_bytes=1024**2))
        for one in list(catalog.coded.values())[:4]:
            if one.tensor.nbytes < 2**20:
                reader.read_into(one.path, 0, memoryview(bytearray(one.tensor.nbytes)))


@target(10, _decoded)
def _quantized_values(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """And the values that they give."""
    _mutate_quantized(rng, seeds, place)


# ------------------------------------------------------------------------------------------------- the hub

_CANDIDATES = (
    *(
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    *(
        "model.fp16.safetensors",
        "model.safetensors.index.fp16.json",
        "pytorch_model.fp16.bin",
        "pytorch_model.bin.index.fp16.json",
    ),
    *(
        "adapter_model.bin",
        "adapter_model.safetensors",
        "shard-00000-model-00001-of-00002.safetensors",
        "modules.json",
        "own.safetensors",
    ),
)
_CHOICES = (Choice(), Choice(variant="fp16"), Choice(use_safetensors=True), Choice(use_safetensors=False))


def _chosen(place: Path, choice: Choice) -> None:
    found = weights_in(str(place), choice)
    if found is not None:
        listed(str(place), found, is_asked=choice.is_asked)
    open_catalog(place, choice=choice)


@target(30, *(partial(_chosen, choice=choice) for choice in _CHOICES))
def _hub_indexes(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Directories with several candidates: indexes, variants, and a config that names one."""
    copied(seeds[rng.choice(("hub", "torch_index"))], place)
    index = json.loads(_bytes(seeds["hub"] / "model.safetensors.index.json"))
    for _ in range(rng.randint(1, 3)):
        path = place / rng.choice(_CANDIDATES)
        kind = rng.randrange(7)
        removed(path)
        if kind == 0:
            path.symlink_to(
                rng.choice(
                    ("nowhere", path.name, "../../../../etc/passwd", "model-00001-of-00002.safetensors")
                )
            )
        elif kind == 1:
            os.mkfifo(path)
        elif kind == 2:
            path.mkdir()
        elif "index" in path.name or path.name == "modules.json":
            replaced(
                path,
                mutated_text(rng, index if "index" in path.name else [{"idx": 0, "name": "0", "path": "a"}]),
            )
        else:
            replaced(path, mutate_header(rng, _bytes(seeds["trainer"] / "model.safetensors")))
    if rng.random() < 0.5:
        names = (
            *_CANDIDATES,
            *TEXTS,
            "../x.safetensors",
            "/x.safetensors",
            "a/b.safetensors",
            "x" * 3000 + ".safetensors",
            1,
            [],
        )
        config = {"architectures": ["X"], "transformers_weights": rng.choice(names)}
        replaced(
            place / "config.json",
            mutated_text(rng, config) if rng.random() < 0.3 else json.dumps(config).encode(),
        )


_DEEP = (
    b'{"transformers_weights": "model.safetensors", "a": ' + b"[" * 400 + b"]" * 400 + b"}",
    b'{"a":' * 900 + b"1" + b"}" * 900,
)


def _exported(place: Path) -> None:
    sw.export_hf(place, place.parent / "out", dtype="float16")


@target(3, _exported)
def _exports(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """A model's directory whose documents an export copies or changes."""
    copied(seeds["model"], place)
    name = rng.choice(("config.json", "config.json", "generation_config.json"))
    content = mutated_text(rng, json.loads(_bytes(seeds["model"] / name)))
    replaced(place / name, rng.choice(_DEEP) if rng.random() < 0.1 else content)


# ------------------------------------------------------------------------------------------------ adapters

_PATTERNS = (
    *(
        "q_proj",
        ".*",
        "(a|a)*x",
        "(.*)*x",
        ".*.*.*.*.*x",
        "(?=.*)*",
        "(",
        "[",
        "*",
        "\\",
        "(?P<a>x)(?P=a)*",
        "a{1,9999999}",
    ),
    *(
        "a{2147483648}",
        "(?:" * 60 + "a" + ")*" * 60,
        "x" * 5000,
        "model.layers.0.*",
        "layers\\.(\\d+)+\\.",
        "(?i)Q_PROJ",
        "^",
        "$",
        "|" * 500,
    ),
    *("all-linear", "(\\w+\\.?)+$", "(?:a?){30}a{30}", "(?>a+)b", "a++", "(?(1)a|b)", "\ud800", "\0", ""),
)


class _Base(nn.Module):
    """Names as a decoder has them."""

    def __init__(self) -> None:
        super().__init__()
        block = {"q_proj": nn.Linear(4, 4), "v_proj": nn.Linear(4, 4, bias=False), "norm": nn.LayerNorm(4)}
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": nn.ModuleDict(block)}) for _ in range(2)])
        self.embed_tokens = nn.Embedding(5, 4)
        self.lm_head = nn.Linear(4, 5)


def _base() -> _Base:
    with torch.device("meta"):
        return _Base()


def _patterns_of(place: Path) -> None:
    config = read_adapter_config(str(place))
    _check_patterns(_shared_base(), config, str(place))


@cache
def _shared_base() -> _Base:
    return _base()


def _attached(place: Path) -> None:
    open_adapter(place)
    attach(_base(), str(place))


def _make_adapter(rng: random.Random, seeds: Seeds, place: Path) -> None:
    def pattern() -> str:
        return rng.choice(_PATTERNS)

    def patterns(value: Any) -> Any:
        kind = rng.randrange(8)
        if kind == 0:
            return rng.choice((None, 1, [], {}, True, [1], {"a": []}))
        return {pattern(): value for _ in range(rng.choice((1, 2, 20)))}

    copied(seeds["model"] / "adapter", place)
    config = json.loads(_bytes(seeds["model"] / "adapter" / "adapter_config.json"))
    config["task_type"] = None if rng.random() < 0.8 else "CAUSAL_LM"
    for name in rng.sample(
        ("target_modules", "rank_pattern", "alpha_pattern", "layers_pattern", "more", "any"), 2
    ):
        if name == "target_modules":
            config[name] = rng.choice((pattern(), [pattern(), "q_proj"], {"a": 1}, None, "all-linear", [1]))
        elif name == "layers_pattern":
            config["layers_to_transform"] = rng.choice(([0], 0, [2**40], "x", [-1], None, list(range(3000))))
            config[name] = rng.choice((pattern(), [pattern()], None, 1))
        elif name == "rank_pattern":
            config[name] = patterns(rng.choice((1, 2, 65, 2**16, 2**17, -1, "x", None)))
        elif name == "alpha_pattern":
            config[name] = patterns(rng.choice((1, 2.5, 1e308, -1, "x", None)))
        elif name == "more":
            more = (
                "exclude_modules",
                "modules_to_save",
                "target_parameters",
                "trainable_token_indices",
                "peft_type",
                "bias",
            )
            config[rng.choice(more)] = rng.choice(
                (pattern(), [pattern()], "LOHA", "IA3", "all", [0], {"a": [1]}, None)
            )
        else:
            config = mutate_json(rng, config, 2)
            if not isinstance(config, dict):
                break
    replaced(place / "adapter_config.json", json.dumps(config).encode())


@target(20, _patterns_of)
def _adapter_patterns(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Expressions that PEFT would match with every module."""
    _make_adapter(rng, seeds, place)


@target(4, _attached)
def _adapter_attached(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """And PEFT's own work with them."""
    _make_adapter(rng, seeds, place)


# ------------------------------------------------------------------------------------- files of directories

_DOCUMENTS = (
    *(
        "config.json",
        "tokenizer.json",
        "modules.json",
        "chat_template.jinja",
        "README.md",
        "vocab.txt",
        "own.py",
        "generation_config.json",
    ),
    *(
        "1_Pooling/config.json",
        "1_Pooling/model.safetensors",
        "additional_chat_templates/a.jinja",
        "custom_generate/generate.py",
    ),
    *(
        "token.json",
        ".env",
        "a\nb.json",
        "x" * 200,
        "processor/preprocessor_config.json",
        "a.tar.gz",
        "é.txt",
        "deep/er/a.json",
    ),
)
_CONTENTS = (
    *(
        b'[{"path": "1_Pooling"}, {"path": ".."}]',
        b'[{"path": "/etc"}]',
        b'[{"path": "deep"}]',
        b'{"auto_map": {"A": "own.B"}}',
    ),
    *(
        b'{"auto_map": {"A": ["own.B", "../x.B", null]}}',
        b"from .own import a\nfrom .other import b\n",
        b"import .own\n" * 50,
        b"",
        b"[" * 5000,
    ),
    *(b'{"auto_map": []}', b"\xff\xfe", b" " * 100_000 + b"from . own import", b"from .a import (\n" * 100),
)


def _documents_of(place: Path) -> None:
    documents = read_documents(str(place))
    code_of(str(place), documents)


def _put_something(rng: random.Random, path: Path, contents: Callable[[], bytes]) -> None:
    """A file, or what stands in its place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        kind = rng.randrange(10)
        if kind == 0:
            path.symlink_to(rng.choice(("nowhere", path.name, "/etc/passwd", ".", "..", "/")))
        elif kind == 1:
            os.mkfifo(path)
        elif kind == 2:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(contents())
    except OSError:
        return  # a name in the way of another one


@target(20, _documents_of)
def _documents(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Directories with odd names, links and pipes, and code that they name."""
    for _ in range(rng.randint(1, 6)):
        _put_something(rng, place / rng.choice(_DOCUMENTS), lambda: _some_document(rng))


def _some_document(rng: random.Random) -> bytes:
    content = rng.choice(_CONTENTS)
    return mutate_bytes(rng, content) if rng.random() < 0.3 else content


_NONCE = "0123456789abcdef"
_OURS = (
    *(
        f".tmp-step-00000005-{_NONCE}",
        f".trash-step-00000005-{_NONCE}",
        f".tmp-{_NONCE}-view",
        f"x.copying-{_NONCE}",
    ),
    *(
        f".tmp-latest-{_NONCE}",
        f".tmp-place-{_NONCE}",
        f".tmp-memory-{_NONCE}",
        f".tmp-probe-{_NONCE}-7",
        f".tmp-x-{_NONCE}",
        "step-00000005",
    ),
)


def _told_apart(place: Path) -> None:
    """What is ours is deleted, and nothing else is."""
    foreign = {path: path.lstat().st_ino for path in place.rglob("*foreign*")}
    for path in sorted(place.iterdir()):
        has_note(str(path)), is_checkpoint(str(path))
        if is_ours(str(path)):
            remove_ours(str(path))
    for path in place.rglob("*foreign*"):
        foreign.pop(path, None)
    assert not [path for path in foreign if path.parent == place], "a file that is not ours was deleted"


@target(25, _told_apart)
def _marks(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Leftovers of saves, under names of ours, and what others put there."""
    (place / "foreign").write_bytes(b"x")
    note = json.dumps({"shardwise": "x", "nonce": _NONCE}).encode()
    for _ in range(rng.randint(1, 3)):
        path = place / rng.choice(_OURS)
        if path.is_dir() and not path.is_symlink():
            continue
        if rng.random() < 0.6 and not os.path.lexists(path):
            path.mkdir()
            if rng.random() < 0.3:
                mark(str(path))
            if rng.random() < 0.5:
                _put_something(rng, path / ".shardwise", lambda: mutated_text(rng, json.loads(note)))
            if rng.random() < 0.3:
                copied(seeds["run"] / "step-00000001", path)
                _mutate_manifest(rng, path)
            if rng.random() < 0.3:
                _put_something(rng, path / "foreign", lambda: b"y")
        else:
            content = rng.choice(
                (b"step-0000", b"0123", b'{"format": "x"', b"\0" * 50, b"", b"x" * 2000, note)
            )
            _put_something(rng, path, partial(bytes, content))


def _history_of(place: Path) -> None:
    if is_root(str(place)):
        steps_below(str(place))
    describe_steps(str(place))


@target(15, _history_of)
def _history(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """A run's directory, as inspect and reports list it."""
    copied(seeds["run"], place)
    names = (
        "latest",
        ".lock",
        "step-00000003",
        "step-1",
        "step-99999999999999999999",
        f".tmp-step-00000003-{_NONCE}",
        "set-aside",
        "step-00000002/manifest.json",
    )
    if rng.random() < 0.6:
        _mutate_manifest(rng, place / "step-00000002")
    for _ in range(rng.randint(0, 2)):
        path = place / rng.choice(names)
        if not path.is_dir() or path.is_symlink():
            _put_something(rng, path, lambda: rng.randbytes(20))


# ------------------------------------------------------------------------------------------- the memory tier


def _recorded(place: Path) -> None:
    record = read_or_make_record(str(place))
    assert read_or_make_record(str(place)) == record, "the record is another one when it is read again"


@target(15, _recorded)
def _memory_records(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """The record of a run's memory, and its mark."""
    content: dict[str, Any] = {
        "format": "shardwise-memory",
        "version": 2,
        "name": "ab" * 16,
        "line": "cd" * 16,
    }
    if rng.random() < 0.4:
        write_record(str(place), Record("ab" * 16, "cd" * 16))
    if rng.random() < 0.8:
        _put_something(rng, place / ".memory.json", lambda: mutated_text(rng, content))
    if rng.random() < 0.6:
        _put_something(
            rng, place / "memory-id", lambda: rng.choice((b"", b"ab" * 16, rng.randbytes(30), b"x" * 20_000))
        )


def _slots_read(place: Path) -> None:
    ring = Ring(str(place), "run")
    ring.lines, ring.sweep_views()
    for name in ring.slots():
        slot = ring.slot(name)
        sorted(slot.files())
        try:
            manifest = read_manifest(slot.path)
        except ShardwiseError:
            slot.clear()
            continue
        for file, entry in manifest.files.items():
            try:
                path = ring.readable(f"{name}/{file}")
            except ShardwiseError:
                continue
            proved_units(path, entry, lambda: None)
        slot.keep_only([0], ["state.json"])


@target(20, _slots_read)
def _memory_slots(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Slots of a ring with changed manifests, odd files, links and pipes."""
    ring = Path(Ring(str(place), "run").path)
    slot = ring / rng.choice(("own-0", "own-1", "held-0", "held-1", "own-2"))
    copied(seeds["run"] / "step-00000001", slot)
    if rng.random() < 0.7:
        _mutate_manifest(rng, slot)
    files = [
        *sorted(p for p in slot.rglob("*") if p.is_file()),
        ring / "lines",
        ring / "view-1",
        ring / "own-0",
        slot / "more",
    ]
    for _ in range(rng.randint(0, 2)):
        path = rng.choice(files)
        if not path.is_dir() or path.is_symlink():
            _put_something(rng, path, lambda: mutate_bytes(rng, b"ab" * 16 + b"\ncd"))
