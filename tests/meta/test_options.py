"""Options that mean the same have one name, type and default: in Python, the integrations and the command line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.cli import main
from shardwise.fit import plan as planning
from shardwise.integrations import accelerate as swa
from shardwise.models.hub import FromPretrained
from tests.harness import models

API = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api" / "index.md"

#: Every public function and class that takes options, but for records and what follows the protocol of another package.
CALLS: dict[str, Callable[..., Any]] = {
    "Checkpointer": sw.Checkpointer,
    "clone": sw.clone,
    "convert": sw.convert,
    "copy_checkpoint": sw.copy_checkpoint,
    "declare_part": sw.declare_part,
    "diff": sw.diff,
    "digest": sw.digest,
    "export_hf": sw.export_hf,
    "init_weights": sw.init_weights,
    "iter_full_tensors": sw.iter_full_tensors,
    "load": sw.load,
    "load_pipeline": sw.load_pipeline,
    "load_pretrained": sw.load_pretrained,
    "plan": sw.plan,
    "plan_pipeline": sw.reports.plan_pipeline,
    "restore": sw.restore,
    "save": sw.save,
    "shard": sw.shard,
    "verify": sw.verify,
    "WeightReceiver": sw.handover.WeightReceiver,
    "WeightSender": sw.handover.WeightSender,
}

#: What a call takes as its objects, by place; not options.
OBJECTS = {
    "model",
    "model_or_path",
    "model_or_tensor",
    "path",
    "source",
    "out",
    "state",
    "root",
    "first",
    "second",
}

#: (call, its model) -> options of the model that it lacks, options that it has beside them; each with the reason.
FAMILIES: dict[tuple[str, str], tuple[dict[str, str], dict[str, str]]] = {
    ("load", "load_pretrained"): (
        {
            "mesh": "the model is sharded already",
            "policy": "the model is sharded already",
            "dtype": "the model has one",
            "auto_class": "the model has a class",
            "config": "the model has one",
            "trust_remote_code": "the model is built",
            "vocab_size": "the model is built",
            "quantized": "the model is built, of layers in codes or not",
            "return_report": "it returns the report",
            "options": "the model is built; a source is a local path",
        },
        {
            **dict.fromkeys(
                ("names", "converter"), "replaces the class's renames; load_pretrained has a class"
            ),
            "allow_plain": "load_pretrained shards the model itself: policy.exclude",
        },
    ),
    ("plan", "load_pretrained"): (
        {
            "mesh": "nothing is sharded for real: ranks and replicas",
            "seed": "no value is drawn",
            "device": "nothing gets memory",
            "verify": "no payload is read",
            "return_report": "it returns the report",
        },
        {
            "ranks": "instead of a mesh",
            "replicas": "instead of a mesh",
            "tp": "instead of a mesh",
            "ep": "instead of a mesh",
            "nodes": "ranks of a load find their hosts",
            "training": "a load trains nothing",
            "device_limit_bytes": "a load has the memory that there is",
            "host_limit_bytes": "a load has the memory that there is",
        },
    ),
    ("accelerate.load_pretrained", "load_pretrained"): (
        dict.fromkeys(("mesh", "policy", "device"), "the accelerator's"),
        {"accelerator": "the object"},
    ),
    ("accelerate.load", "load"): (
        {"device": "the accelerator's", "allow_plain": "the plugin's ignored_modules"},
        {"accelerator": "the object"},
    ),
}

#: (call, option) whose type or default differs from that of the other calls on purpose.
ODD = {
    ("export_hf", "dtype"): "None, as stored, is no dtype that a model could be built in",
    ("iter_full_tensors", "dtype"): "None, as stored, is no dtype that a model could be built in",
    ("WeightSender", "dtype"): "None, as the model has it, is no dtype that a model could be built in",
    ("WeightSender", "url"): "None takes a free port; a receiver has to be told",
    ("load_pipeline", "dtype"): "also dtypes by component; diffusers reads none from a config",
    ("plan_pipeline", "dtype"): "also dtypes by component; diffusers reads none from a config",
    ("export_hf", "config"): "a directory, because tokenizer and code are taken from it, too",
    ("convert", "config"): "a directory, because tokenizer and code are taken from it, too",
    ("shard", "mesh"): "without a mesh there is nothing to shard",
}

#: Command -> its function, and options of the command that the function lacks, each with the reason.
COMMANDS: dict[str, tuple[str | None, dict[str, str]]] = {
    "inspect": (None, {}),
    "plan": (
        "plan",
        {
            **dict.fromkeys(
                (
                    "batch_size",
                    "sequence_length",
                    "optimizer",
                    "checkpointing",
                    "device",
                    "bandwidth",
                    "keep_last",
                ),
                "a field of training=",
            ),
            **dict.fromkeys(("param_dtype", "reduce_dtype", "offload"), "a field of policy="),
            "fit": "device_limit_bytes=, as people say it",
            "host": "host_limit_bytes=, as people say it",
            "explain": "how much is shown",
        },
    ),
    "verify": ("verify", {}),
    "diff": ("diff", {}),
    "export": ("export_hf", {}),
    "convert": (
        "convert",
        {
            "to": "chooses between sw.convert and sw.export_hf",
            "model_name": "of --to hf: an option of sw.export_hf",
        },
    ),
    "copy": ("copy_checkpoint", {}),
    "explain": (None, {}),
    "report": (None, {"out": "one file", "plan": "a file to compare with"}),
    "doctor": (
        None,
        {"ranks": "on this host, where plan counts those of the run", "run": "where it will write"},
    ),
    "demo": (None, {"out": "a folder to play in", "ranks": "as in plan"}),
}

#: Of every command: how it speaks, which a function doesn't.
SPEECH = {"as_json", "debug", "help", "every"}

#: Former words, which must not come back.
RETIRED = {"unused", "init", "ignored", "class_name", "nproc", "out_dir", "max_shard_size"}
#: Options that one function had under this name and that others still have: its module must not advise them.
RETIRED_OF = {"init_weights": {"names"}, "iter_full_tensors": {"names", "io"}, "clone": {"io"}}
RETIRED_FIELDS = {"not_stored", "not_restored", "left"}


def options_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(call).parameters)
    return {name: p for name, p in found.items() if name not in OBJECTS or p.kind is p.KEYWORD_ONLY}


def test_every_call_is_looked_at() -> None:
    """Classes that hold options without being calls of this kind are named here."""
    others = {
        "ElasticSampler",
        "FailurePolicy",
        "IOOptions",
        "InMemoryCheckpoints",
        "PreemptionPolicy",
        "ResumableLoader",
        "ShardPolicy",
        "TrainState",
        "TrainingSpec",
        "meta_init",
    }
    others |= {"configure_storage"}  # those of obstore and fsspec, under their names
    others |= {"progress"}  # a block around other calls
    public = {name for name in sw.__all__ if callable(getattr(sw, name))}
    public |= {"plan_pipeline", *sw.handover.__all__}  # of sw.reports, and of sw.handover
    assert public == CALLS.keys() | others


def test_the_page_lists_the_options_that_several_calls_take() -> None:
    """Table of docs/reference/api/index.md: complete, and each option with exactly the calls that take it."""
    table = (
        API.read_text(encoding="utf-8")
        .partition("## Options that multiple calls take")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", table, re.MULTILINE)
    said = {option: set(re.findall(r"`(\w+)`", calls)) for option, calls in rows}
    taken: dict[str, set[str]] = {}
    for call, function in CALLS.items():
        for option in options_of(function):
            taken.setdefault(option, set()).add(call)
    assert said == {option: calls for option, calls in taken.items() if len(calls) > 1}


def test_an_option_has_one_type_and_one_default() -> None:
    calls = {**CALLS, "accelerate.load": swa.load, "accelerate.load_pretrained": swa.load_pretrained}
    kinds: dict[str, dict[tuple[str, str], list[str]]] = {}
    for call, function in calls.items():
        for option, parameter in options_of(function).items():
            if (call, option) not in ODD:
                kind = str(parameter.annotation), str(parameter.default)
                kinds.setdefault(option, {}).setdefault(kind, []).append(call)
    # ``step`` and ``seed`` may be given by place where there is nothing else to give.
    assert {option: found for option, found in kinds.items() if len(found) > 1} == {}
    for call, option in ODD:
        parameter = options_of(calls[call])[option]
        kind = str(parameter.annotation), str(parameter.default)
        assert kind not in kinds.get(option, {}), f"{call}({option}=) is not odd any more"


@pytest.mark.parametrize("pair", FAMILIES, ids=" like ".join)
def test_loaders_take_the_same(pair: tuple[str, str]) -> None:
    calls = {**CALLS, "accelerate.load": swa.load, "accelerate.load_pretrained": swa.load_pretrained}
    one, other = (options_of(calls[name]).keys() for name in pair)
    lacks, adds = FAMILIES[pair]
    assert other - one == lacks.keys()
    assert one - other == adds.keys()


def test_methods_of_the_accelerator_pass_options_on() -> None:
    """They name none themselves: they accept whatever the function accepts."""
    for call, own in (
        (swa.ShardwiseAccelerator.load_pretrained, {"self"}),
        (swa.ShardwiseAccelerator.load_model, {"self", "build"}),
    ):
        assert options_of(call).keys() == own | {"options"}


@pytest.mark.needs("trainer")
def test_the_loader_of_the_trainer_passes_options_on() -> None:
    from shardwise.integrations import trainer as swt

    assert options_of(swt.load_pretrained).keys() == {"args", "options"}


def test_every_command_is_looked_at() -> None:
    assert isinstance(main, click.Group)
    assert main.commands.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_commands_are_those_of_functions(name: str) -> None:
    assert isinstance(main, click.Group)
    call, beside = COMMANDS[name]
    parameters = [p for p in main.commands[name].params if isinstance(p, click.Option)]
    for parameter in parameters:
        if parameter.name not in ("as_json", "every"):
            assert (
                parameter.opts[0] == f"--{str(parameter.name).replace('_', '-')}"
            )  # maybe with a short form
    given = {str(p.name) for p in parameters} - SPEECH
    known: set[str] = set()
    if call is not None:
        known = set(options_of(CALLS[call]))
        known |= set(typing.get_type_hints(FromPretrained)) if "options" in known else set()
        places = [p.name for p in main.commands[name].params if isinstance(p, click.Argument)]
        options = options_of(CALLS[call])
        taken = [p for p in inspect.signature(CALLS[call]).parameters if p in OBJECTS - options.keys()]
        expected = ["path" if p in ("source", "model_or_path") else p for p in taken if p != "model"]
        assert places == expected
    assert given - known == beside.keys()


def test_a_default_of_a_command_is_that_of_the_function() -> None:
    """Where the command has one of its own; None and False stand for the function's."""
    assert isinstance(main, click.Group)
    for name, (call, _) in COMMANDS.items():
        if call is None:
            continue
        options, context = options_of(CALLS[call]), click.Context(main.commands[name])
        for parameter in main.commands[name].params:
            own = options.get(str(parameter.name))
            if own is not None and parameter.default is not None and own.default is not own.empty:
                default = parameter.process_value(context, parameter.get_default(context))
                assert (default or None) == (own.default or None), (name, parameter.name)


def test_former_words_are_gone() -> None:
    calls: list[Callable[..., Any]] = [*CALLS.values(), swa.load, swa.load_pretrained, sw.ShardPolicy]
    assert {name for call in calls for name in inspect.signature(call).parameters} & RETIRED == set()
    assert isinstance(main, click.Group)
    assert {str(p.name) for command in main.commands.values() for p in command.params} & RETIRED == set()
    reports = [getattr(sw, name) for name in sw.__all__ if name.endswith("Report")]
    assert {f.name for report in reports for f in dataclasses.fields(report)} & RETIRED_FIELDS == set()
    for report in (sw.reports.SaveReport, sw.reports.ResumeReport, sw.reports.ConvertReport):
        assert "skipped" in {f.name for f in dataclasses.fields(report)}


def test_no_text_advises_a_former_word() -> None:
    """Errors and docstrings are texts: no signature and no type checker knows of an option that they name."""
    of_file = {inspect.getsourcefile(getattr(sw, call)): words for call, words in RETIRED_OF.items()}
    found = []
    for file in Path(sw.__file__).parent.rglob("*.py"):
        words = "|".join(RETIRED | of_file.pop(str(file), set()))
        advised = re.compile(rf"(?<![\w.-])(?:{words})=|--(?:{words.replace('_', '-')})\b(?!-)")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [f"{file.name}:{node.lineno}: {said}" for said in advised.findall(node.value)]
    assert of_file == {}, "a function of another name or file"
    assert found == []


# ----------------------------------------------------------------------------------------------------
# What options take


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("options")
    models.write_hub_directory("qwen3", root, torch.float32)
    return root


@pytest.mark.parametrize("option", ["allow_unused", "allow_missing", "allow_plain"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("head.*", "is the string 'head.*'; expected a tuple of patterns: {}=('head.*',)"),
        ({"head.*": "model"}, "is a dict; expected a tuple of patterns"),
        (b"head.*", "is a bytes; expected a tuple of patterns"),
        ((p for p in ("head.*",)), "is a generator; expected a tuple of patterns"),
        (3, "is a int; expected a tuple of patterns"),
        (("head.*", 3), "holds 3; expected patterns"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_declaration_is_a_tuple_of_patterns(source: Path, option: str, given: Any, said: str) -> None:
    """A string would be taken letter by letter: ``allow_unused="*"`` allows everything, ``"head"`` nothing."""
    calls: list[Callable[[], object]] = [lambda: sw.load(nn.Linear(2, 2), source, **{option: given})]
    if option != "allow_plain":
        calls.append(lambda: sw.load_pretrained(source, **{option: given}))
        calls.append(lambda: sw.plan(source, ranks=2, **{option: given}))
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call()
        assert f"{option} {said.format(option)}" in str(caught.value)


def test_patterns_elsewhere_are_tuples_too() -> None:
    with pytest.raises(TypeError, match=r"exclude is the string '\*'"):
        sw.ShardPolicy(exclude="*")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"block_classes=\('Block',\)"):
        sw.ShardPolicy(block_classes="Block")  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(TypeError, match="only is the string 'weight'"):
        sw.init_weights(model, only="weight")
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "patterns", [["lm_head.*"], {"lm_head.*"}, ("lm_head.*",)], ids=lambda p: type(p).__name__
)
def test_any_collection_of_patterns_will_do(source: Path, patterns: Any) -> None:
    kept = {n: t for n, t in stored(source).items() if n != "lm_head.weight"}
    assert len(kept) < len(stored(source))
    folder = source.parent / f"headless-{type(patterns).__name__}"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(kept, folder / "model.safetensors")
    report = sw.plan(folder, ranks=2, allow_missing=patterns)
    assert [(d.name, d.declared_by) for d in report.initialized] == [("lm_head.weight", "caller")]


def stored(source: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}


def test_load_takes_key_mapping_as_load_pretrained_does(source: Path, tmp_path: Path) -> None:
    """For a transformers model before its class's renames, and for any module."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = stored(source)
    save_file({f"net.{name}": t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    with sw.meta_init():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    with pytest.raises(sw.errors.PlanError) as caught:
        sw.load(model, tmp_path)
    assert "give key_mapping={'^net\\\\.': ''}" in str(caught.value)
    sw.load(model, tmp_path, key_mapping={r"^net\.": ""})
    other = sw.load_pretrained(source)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in model.state_dict().items())

    save_file(
        {"old.up.weight": torch.ones(2, 3), "old.up.bias": torch.ones(2)}, tmp_path / "plain.safetensors"
    )
    plain = nn.ModuleDict({"down": nn.Linear(3, 2)})
    sw.load(plain, tmp_path / "plain.safetensors", key_mapping={r"^old\.": "", r"^(u)p\.": "down."})
    assert plain.state_dict()["down.weight"].eq(1).all()
    with pytest.raises(ValueError, match="give one of them"):
        sw.load(plain, tmp_path / "plain.safetensors", names={}, key_mapping={})


def test_a_checkpoint_keeps_its_names_under_a_key_mapping(tmp_path: Path) -> None:
    """Its names are the module's own: the mapping was of the files that the run began with."""
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    sw.save(sw.TrainState(model=net), tmp_path / "step")
    second = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    sw.load(second, tmp_path / "step", key_mapping={r"^a\.": "c.", r"^b\.": "a.", r"^c\.": "b."})
    assert all(torch.equal(t, second.state_dict()[name]) for name, t in net.state_dict().items())


def test_a_prefix_in_a_checkpoint_is_not_advised_a_key_mapping(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(k + 1, 2) for k in range(9)))
    sw.save(sw.TrainState(model=nn.ModuleDict({"net": net})), tmp_path / "step")
    with pytest.raises(sw.errors.PlanError) as caught:
        sw.load(net, tmp_path / "step")
    (line,) = caught.value.problems
    assert "give names=" in line
    assert "key_mapping" not in line
    sw.load(net, tmp_path / "step", names=lambda name: name.removeprefix("net."))


def test_verify_is_an_option_of_load_pretrained_too(source: Path, tmp_path: Path) -> None:
    model, report = sw.load_pretrained(source, return_report=True)
    assert report.verified == "cover", "files of the hub record no digests"
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    assert sw.reports.load_report(sw.load_pretrained(tmp_path / "step")).verified == "digest"
    assert sw.reports.load_report(sw.load_pretrained(tmp_path / "step", verify="cover")).verified == "cover"


def test_plan_plans_with_the_caller_s_staging(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = planning.plan_load, []
    monkeypatch.setattr(planning, "plan_load", lambda *a, io, **k: (seen.append(io), own(*a, io=io, **k))[1])
    io = sw.IOOptions(staging_bytes=2**20)
    sw.plan(source, ranks=2, io=io)
    assert seen == [io, io]


def test_accelerate_s_loaders_hand_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(swa, "shard", lambda accelerator, model: ("plain",))
    monkeypatch.setattr(swa, "device_of", lambda accelerator: "cpu")
    monkeypatch.setattr(swa, "_load", lambda model, source, **options: given.update(options))
    monkeypatch.setattr(
        swa,
        "load_wrapped",
        lambda request, wrap, filling: (given.update(request=request, filling=filling), None),
    )
    options: dict[str, Any] = {name: object() for name in options_of(swa.load).keys() - {"accelerator", "io"}}
    swa.load(object(), nn.Linear(2, 2), "x", **options)  # type: ignore[arg-type]
    assert given == {**options, "io": None, "device": "cpu", "allow_plain": ("plain",)}
    given.clear()
    own = options_of(swa.load_pretrained).keys() - {"accelerator", "return_report", "options"}
    options = {name: object() for name in own}
    swa.load_pretrained(object(), "x", revision="main", **options)  # type: ignore[arg-type]
    found = {f.name: getattr(r, f.name) for r in given.values() for f in dataclasses.fields(r)}
    known = {
        "path": "x",
        "options": {"revision": "main"},
        "device": "cpu",
        "allow_plain": None,
        "with_modules": False,
    }
    assert found == {**options, **known}
