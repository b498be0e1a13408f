"""Pathologies in real files: configurations, models, checkpoints, logs, installed versions."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from accelerate.utils import dataclasses as accelerate_utils
from safetensors.torch import load_file, save_file

from shardwise.doctor.examine import collect, findings_of
from shardwise.doctor.facts import classes_of, mount_of
from shardwise.doctor.files import look_at_place
from shardwise.doctor.logs import KNOWN, log_of_losses, read_log
from shardwise.errors import FormatError
from shardwise.operations.host_budget import host_budget
from shardwise.publish.places import set_aside
from tests.doctor.real import FSDP2, NOISE, ROOT, arguments, check, found
from tests.harness.bombs import run_apart
from tests.harness.models import sparse_file
from tests.runs.test_numbered import qwen, trainer

# ----------------------------------------------------------------------------------------------------
# Configurations


CASE_1 = ("accelerate.device-mesh", "accelerate.whole-model", "accelerate.sharded-fp32")


def test_the_yaml_of_case_1_finds_what_its_author_met(here: set[str]) -> None:
    """FSDP2, RAM-efficient, bf16, inductor: the example's own file."""
    path = ROOT / "examples/accelerate_fsdp.yaml"
    settings = yaml.safe_load(path.read_text())
    assert settings["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    findings = found(path, ranks=2)
    check(findings, here, *CASE_1, words="'Tensor' object has no attribute 'device_mesh'")
    first = next(f for f in findings if f.rule not in here)
    assert first.rule == "accelerate.device-mesh"
    assert "ShardwiseAccelerator" in first.do


YAMLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accelerate.fsdp1": ({}, {"fsdp_version": 1}),
    "accelerate.refused-by-fsdp2": ({}, {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}),
    "accelerate.one-group": ({}, {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
    "accelerate.other-engine": ({"distributed_type": "MEGATRON_LM"}, {}),
    "accelerate.parallelism": ({"parallelism_config": {"parallelism_config_cp_size": 2}}, {}),
    "accelerate.processes": ({"num_processes": 3, "num_machines": 2, "main_process_ip": "10.0.0.1"}, {}),
    "accelerate.main-process": ({"num_machines": 2, "main_process_ip": "127.0.0.1"}, {}),
}


@pytest.mark.parametrize("rule", YAMLS)
def test_a_yaml(rule: str, tmp_path: Path, here: set[str]) -> None:
    values, fsdp = YAMLS[rule]
    several = {"network.loopback", "network.hostname"}  # as this machine's name has it
    path = tmp_path / "config.yaml"
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2}
    path.write_text(yaml.safe_dump({**base, **values, "fsdp_config": {**FSDP2, **fsdp}}))
    check(found(path), here | several, rule)


def test_accelerate_refuses_what_is_said_to_be_refused() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    with pytest.raises(ValueError, match="forward_prefetch"):
        FullyShardedDataParallelPlugin(fsdp_version=2, forward_prefetch=True)
    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")


ARGUMENTS: dict[str, dict[str, Any]] = {
    "trainer.fsdp-config-ignored": {"fsdp": "", "fsdp_config": {"reshard_after_forward": True}},
    "trainer.save-only-model": {"save_only_model": True},
    "trainer.data-skip": {"ignore_data_skip": True},
    "trainer.two-halves": {"fp16": True},
    "trainer.checkpointing": {"gradient_checkpointing": True},
    "trainer.low-bit-optimizer": {"optim": "paged_adamw_8bit"},
}


@pytest.mark.parametrize("rule", ARGUMENTS)
def test_training_arguments(rule: str, tmp_path: Path, here: set[str]) -> None:
    check(found(arguments(tmp_path / "args.json", **ARGUMENTS[rule])), here, rule)


# ----------------------------------------------------------------------------------------------------
# Models


def truncate(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 7)


def lead_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"][next(iter(document["weight_map"]))] = "../../etc/passwd"
    index.write_text(json.dumps(document))


def leave_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / "model-00002-of-00002.safetensors").write_text(text)


def pickle_it(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({"w": torch.zeros(2)}, folder / "pytorch_model.bin")


def store_twice(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    name = next(n for n, f in document["weight_map"].items() if f.startswith("model-00001"))
    first, second = (folder / f"model-0000{k}-of-00002.safetensors" for k in (1, 2))
    save_file({**load_file(second), name: load_file(first)[name]}, second)


def few_experts(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": 2}))


def four_bits(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))


def pickle_half(folder: Path) -> None:
    """The second file as torch.save writes it, and no index."""
    second = folder / "model-00002-of-00002.safetensors"
    torch.save(load_file(second), folder / "pytorch_model-00002-of-00002.bin")
    second.unlink()
    (folder / "model.safetensors.index.json").unlink()


def lose_base(folder: Path) -> None:
    """An adapter of PEFT, trained on a model of another machine."""
    for file in folder.iterdir():
        file.unlink()
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], base_model_name_or_path="/home/me/models/llama", task_type="CAUSAL_LM"
    )
    config.save_pretrained(str(folder))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(2, 8)}, folder / "adapter_model.safetensors")


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "model.missing-file": (
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        "model-00002-of",
    ),
    "model.damaged-file": (truncate, "model-00001-of-00002.safetensors is corrupted"),
    "model.outside": (lead_outside, "../../etc/passwd"),
    "model.lfs-pointer": (leave_pointer, "Git LFS pointer"),
    "model.pickle": (pickle_it, "pytorch_model.bin"),
    "model.two-formats": (pickle_half, "which are only in pickles"),
    "model.missing-base": (lose_base, "its base model /home/me/models/llama doesn't exist"),
    "model.index": (store_twice, "can't be loaded"),
    "model.few-experts": (few_experts, "2 experts across 4 ranks"),
    "model.quant-storage": (four_bits, "uint8"),
}


@pytest.mark.parametrize("rule", MODELS)
def test_a_model(rule: str, copy: Path, here: set[str]) -> None:
    spoil, words = MODELS[rule]
    spoil(copy)
    check(found(copy, ranks=4), here | {"machine.cores"}, rule, words=words)


def test_a_model_in_both_formats_has_no_finding(copy: Path, here: set[str]) -> None:
    """Whole as pickles and as safetensors, also under the names of a model without its head."""
    tensors = {n: t for file in copy.glob("*.safetensors") for n, t in load_file(file).items()}
    for prefix in ("", "model."):
        torch.save({n.removeprefix(prefix): t for n, t in tensors.items()}, copy / "pytorch_model.bin")
        check(found(copy), here)


@pytest.mark.parametrize(
    "wrapped", ["Qwen3DecoderLayr", "LlamaDecoderLayer", "Qwen3DecoderLayer,Qwen3Vision"]
)
def test_a_class_to_wrap_that_the_model_lacks(
    wrapped: str, model: Path, tmp_path: Path, here: set[str]
) -> None:
    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    own = wrapped.split(",")
    assert not all(accelerate_utils.get_module_class_from_name(built, name) for name in own)
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2}
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump({**base, "fsdp_config": {**FSDP2, "fsdp_transformer_layer_cls_to_wrap": wrapped}})
    )
    check(found(path, model), here, "accelerate.wrap-class", words=f"names {own[-1]}")
    said = {"version": 2, "transformer_layer_cls_to_wrap": own}
    check(
        found(arguments(tmp_path / "args.json", fsdp_config=said), model),
        here,
        "accelerate.wrap-class",
        words=f"names {own[-1]}",
    )


def test_classes_of_an_architecture() -> None:
    """Every class of which a model has modules, but torch's own; also of the parts of a model of several."""
    for config in (
        transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8),
        transformers.LlavaConfig(vision_config={"model_type": "clip_vision_model", "num_hidden_layers": 1}),
    ):
        known = classes_of(json.loads(config.to_json_string(use_diff=False)))
        with torch.device("meta"):
            built = transformers.AutoModelForImageTextToText.from_config(config) if config.model_type == "llava" else transformers.AutoModelForCausalLM.from_config(config)  # fmt: skip
        modules = {type(m) for m in built.modules()}
        assert known
        assert {m.__name__ for m in modules if m.__module__.startswith("transformers.models.")} <= {*known}
    assert classes_of({"model_type": "llama", "auto_map": {"AutoModel": "own.Own"}}) == ()
    assert classes_of({"model_type": "../llama"}) == ()
    assert classes_of({}) == ()


# ----------------------------------------------------------------------------------------------------
# Checkpoints


def spoil_step(root: Path) -> Path:
    file = next((root / "step-00000002/model").glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    return root


def put_aside(root: Path) -> Path:
    set_aside(str(root / "step-00000002"), "superseded")
    return root


def leave_temporary(root: Path) -> Path:
    (root / ".tmp-step-00000003-0123456789abcdef").mkdir()
    return root


def per_rank(root: Path) -> Path:
    for rank in range(2):
        torch.save({}, root / f"pytorch_model_fsdp_rank{rank}.bin")
    return root


def of_dcp(root: Path) -> Path:
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=root / "other/pytorch_model_fsdp_0", no_dist=True)
    return root / "other"


def unfinished(root: Path) -> Path:
    other = of_dcp(root)
    (other / "pytorch_model_fsdp_0/.metadata").unlink()
    return other


CHECKPOINTS: dict[tuple[str, ...], Callable[[Path], Path]] = {
    ("checkpoint.damaged",): spoil_step,
    ("checkpoint.set-aside",): put_aside,
    ("checkpoint.leftovers",): leave_temporary,
    ("checkpoint.per-rank", "checkpoint.pickle", "path.foreign"): per_rank,
    ("checkpoint.pickle",): of_dcp,
    ("checkpoint.unfinished",): unfinished,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("rules", CHECKPOINTS, ids="+".join)
def test_a_checkpoint(rules: tuple[str, ...], steps: Path, tmp_path: Path, here: set[str]) -> None:
    root = Path(shutil.copytree(steps, tmp_path / "steps"))
    if rules[0] == "checkpoint.per-rank":
        root = tmp_path / "per-rank"
        root.mkdir()
    check(found(CHECKPOINTS[rules](root)), here, *rules)
    assert not list(root.glob(".shardwise-doctor-*"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a plain Trainer writes: three checkpoints."""
    root = tmp_path_factory.mktemp("trained") / "out"
    trainer(root, qwen(), max_steps=6, save_steps=2, logging_steps=1, per_device_train_batch_size=2).train()
    return root


#: What is lost of a checkpoint, and what is said.
LOST = {
    "optimizer.pt": "checkpoint-4 has no optimizer: a resume from it starts with fresh moments, and the loss jumps.",
    "scheduler.pt": "checkpoint-4 has no scheduler: the HF Trainer then restores neither scheduler nor optimizer",
    "rng_state.pth": "checkpoint-4 has no RNG states: dropout",
    "model.safetensors": "checkpoint-4 is missing model.safetensors, which the checkpoints next to it have.",
}


@pytest.mark.parametrize("name", LOST)
def test_a_checkpoint_of_the_trainer_that_lost_a_file(
    name: str, trained: Path, tmp_path: Path, here: set[str]
) -> None:
    """Found in its run, alone, and in a run that has its final model, too. The whole one has no finding."""
    quiet = here | {"checkpoint.pickle"}
    root = Path(shutil.copytree(trained, tmp_path / "out"))
    check(found(root), quiet)
    (root / "checkpoint-4" / name).unlink()
    check(found(root), quiet, "checkpoint.incomplete", words=LOST[name])
    check(found(root / "checkpoint-4"), quiet, "checkpoint.incomplete", words=LOST[name])
    for file in ("config.json", "model.safetensors", "trainer_state.json"):
        shutil.copy(root / "checkpoint-6" / file, root)
        check(found(root), quiet, "checkpoint.incomplete", words=LOST[name])
    check(found(root / "checkpoint-6"), quiet)


def test_an_old_checkpoint_of_the_trainer_that_lost_its_optimizer(
    trained: Path, tmp_path: Path, here: set[str]
) -> None:
    """The run went on after the resume: newer ones are whole."""
    root = Path(shutil.copytree(trained, tmp_path / "out"))
    (root / "checkpoint-2/optimizer.pt").unlink()
    for step in (8, 10):
        shutil.copytree(root / "checkpoint-6", root / f"checkpoint-{step}")
    check(
        found(root),
        here | {"checkpoint.pickle"},
        "checkpoint.incomplete",
        words="checkpoint-2 has no optimizer",
    )


def test_checkpoints_of_a_run_that_saves_the_model_only(tmp_path: Path, here: set[str]) -> None:
    """The Trainer's own arguments say so, or those that are given."""
    run = trainer(tmp_path / "out", qwen(), max_steps=1, save_steps=1, save_only_model=True)
    run.train()
    check(found(tmp_path / "out"), here | {"checkpoint.pickle"}, "checkpoint.model-only")
    (tmp_path / "out/checkpoint-1/training_args.bin").unlink()
    check(
        found(tmp_path / "out"),
        here,
        "checkpoint.incomplete",
        words="no optimizer, scheduler and RNG states",
    )
    given = arguments(tmp_path / "args.json", fsdp="", fsdp_config={}, save_only_model=True)
    check(found(tmp_path / "out", given), here, "checkpoint.model-only")
    log = tmp_path / "train.log"
    log.write_text(of_trainer(STEADY, 0.0) + ENDS + of_trainer(STEADY, 0.08))
    told = found(tmp_path / "out", given, log)
    check(told, here, "checkpoint.resumed-model-only")
    assert next(f for f in told if f.rule == "checkpoint.resumed-model-only").kind == "problem"


@pytest.mark.needs("trainer")
def test_checkpoints_of_a_shardwise_trainer_that_saves_the_model_only(tmp_path: Path, here: set[str]) -> None:
    """Its steps have manifests. Found once for all of them, also for those that are only listed."""
    from shardwise.integrations.trainer import ShardwiseTrainer

    plain = trainer(tmp_path / "out", qwen(), max_steps=5, save_steps=1, save_only_model=True)
    ShardwiseTrainer(plain.model, plain.args, train_dataset=plain.train_dataset).train()
    check(
        found(tmp_path / "out"), here, "checkpoint.model-only", words="5 checkpoints contain only the model"
    )


def test_pickles_of_several_checkpoints_are_noted_once(trained: Path) -> None:
    told = [f for f in found(trained) if f.kind == "note"]
    assert [f.rule for f in told if f.rule.startswith("checkpoint.")] == ["checkpoint.pickle"]
    assert told[-1].where == f"{trained}: 3 checkpoints"


def test_files_of_a_trainers_run_stand_for_themselves(trained: Path, tmp_path: Path, here: set[str]) -> None:
    """Its list of losses, and its arguments, whose pickle is read without running anything of it."""
    state, pickled = (trained / "checkpoint-4" / name for name in ("trainer_state.json", "training_args.bin"))
    facts = collect([str(state), str(pickled)])
    assert facts.taken_for == {
        str(state): "the HF Trainer's state, 4 losses",
        str(pickled): "TrainingArguments, read from a pickle without running it",
    }
    check(found(state, pickled), here)
    real = torch.load(pickled, weights_only=False)
    (read,) = facts.arguments
    told = {name: read.values[name] for name in ("optim", "save_strategy", "bf16", "ignore_data_skip")}
    assert told == {name: getattr(real, name) for name in told}
    real.ignore_data_skip = True
    torch.save(real, tmp_path / "training_args.bin")
    check(found(tmp_path / "training_args.bin"), here, "trainer.data-skip")
    torch.save({"weights": torch.ones(2)}, tmp_path / "training_args.bin")
    with pytest.raises(FormatError, match="contains no arguments of the HF Trainer"):
        found(tmp_path / "training_args.bin")


def test_a_checkpoint_of_accelerate(tmp_path: Path, here: set[str]) -> None:
    """It has a scheduler only if one was prepared."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    accelerator.prepare(torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(tmp_path / "checkpoint_3"))
    quiet = here | {"checkpoint.pickle"}
    check(found(tmp_path), quiet)
    (tmp_path / "checkpoint_3/optimizer.bin").unlink()
    check(found(tmp_path), quiet, "checkpoint.incomplete", words="checkpoint_3 has no optimizer")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_next_to_what_fsdp_saves(model: Path, tmp_path: Path, here: set[str]) -> None:
    """The adapter in PEFT's form, and as Accelerate's FULL_STATE_DICT has it: under names with the adapter's own."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model), config)
    adapted.save_pretrained(tmp_path)
    tensors = {n: t for n, t in adapted.state_dict().items() if ".default.weight" in n}
    assert tensors
    torch.save(tensors, tmp_path / "pytorch_model_fsdp.bin")
    check(found(tmp_path), here | {"checkpoint.pickle"})


# ----------------------------------------------------------------------------------------------------
# Logs

#: As the programs write them.
LINES = {
    "model-only": "restored step 40, saved on 1 rank, now on 1; exact: no: the checkpoint only contains the model (save_only_model): optimizer and",
    "device-mesh": "[rank0]: AttributeError: 'Tensor' object has no attribute 'device_mesh'",
    "nccl-timeout": "[rank3]:[E ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12",
    "cuda-oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
    "optimizer-key": "RuntimeError: Missing key in checkpoint state_dict: optimizer.state.unused.weight.step.",
    "no-space": "OSError: [Errno 28] No space left on device: '/data/run/step-00000100'",
    "oom-kill": "[77.1] Memory cgroup out of memory: Killed process 4242 (python) total-vm:88GiB, anon-rss:64GiB",
    "hf-initialized": "TypeError: Parameter.__new__() got an unexpected keyword argument '_is_hf_initialized'",
    "meta-copy": "NotImplementedError: Cannot copy out of meta tensor; no data!",
    "mixed-dtensor": "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all",
    "initial-lr": "KeyError: \"param 'initial_lr' is not specified in param_groups[0] when resuming an optimizer\"",
    "shared-memory": "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory",
    "open-files": "OSError: [Errno 24] Too many open files: '/models/a.safetensors'",
    "gloo-loopback": "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:14215 (rank=8, size=16)",
    "duplicate-gpu": "Last error: Duplicate GPU detected : rank 3 and rank 0 both on CUDA device 3000",
    "damaged-safetensors": "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "missing-weights": "base_model.model.model.layers.{0, 1}.self_attn.q_proj.base_layer.weight | MISSING |",
    "nms": "RuntimeError: operator torchvision::nms does not exist",
}


@pytest.mark.parametrize("known", KNOWN, ids=lambda k: k.line)
def test_a_log(known: Any, tmp_path: Path, here: set[str]) -> None:
    path = tmp_path / "run.log"
    path.write_text(f"{NOISE * 50}{LINES[known.line]}\n{NOISE}")
    findings = found(path)
    check(findings, here, f"log.{known.line}", words=LINES[known.line][:60])


@pytest.mark.nightly
def test_a_long_log_is_read_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.out"
    with path.open("w") as file:
        file.write(f"{LINES['oom-kill']}\n")
        for _ in range(40):
            file.write("x" * 1024**2 + "\n")
        file.write(f"{LINES['no-space']}\n")
    assert read_log(str(path)).lines.keys() == {"oom-kill", "no-space"}


_KEY = '"optimizer.state.model.layers.7.self_attn.q_proj.weight.exp_avg", '
#: Lines that programs write, and such that no program writes; each is repeated up to 4 MiB.
REPEATED = {
    **{
        text: text
        for text in ("Missing key", "optim.state.x", "optimizer.state.", "Missing key optim", "shared memor")
    },
    **{
        text: text
        for text in (
            "No space",
            "No space left on devic",
            "No space left on device shared memory",
            "exitcode ",
        )
    },
    **{
        text: text
        for text in ("onnect", "onnect refused", "onnectrefused remote=[", "remote=[127.", "h.", "layers.")
    },
    **{
        text: text
        for text in ("h.| MISSIN", "| MISSING", "wte.a", "exitcode", "exitcode\t \t", "loss=1", "loss 1")
    },
    **{text: text for text in ("loss='1", "loss \t", "loss=1.", " ", "1", "a")},
    "keys that are unexpected": f"Unexpected key(s) in state_dict: {_KEY * 1000}",
}


@pytest.mark.parametrize("text", REPEATED.values(), ids=REPEATED)
@pytest.mark.processes
def test_a_line_of_many_mib(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.log"
    path.write_text(text * (4 * 1024**2 // len(text)))
    outcome = run_apart(lambda: read_log(str(path)), seconds=10)
    assert outcome.kind == "done", outcome
    assert outcome.mbytes < 200


# ----------------------------------------------------------------------------------------------------
# Versions, mounts, large models


INSTALLED = {
    "software.requires": ({"safetensors": "0.4.0"}, "safetensors is 0.4.0"),
    "software.gates": ({"transformers": "5.21.1"}, "this needs transformers 5.22 or newer"),
    "software.peft": ({"peft": "0.19.1", "transformers": "5.23.0"}, "peft 0.19.1 with transformers"),
    "software.torchvision": ({"torchvision": "0.20.0"}, "torchvision 0.20.0 with torch"),
}


_TAKES = pytest.mark.needs("transformers>=5.6", "takes the argument of PEFT 0.19")


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[_TAKES] * (rule == "software.peft")) for rule in INSTALLED]
)
def test_an_installed_version(
    rule: str, tmp_path: Path, here: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that comes first in the path says that they are installed there."""
    releases, words = INSTALLED[rule]
    for name, version in releases.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    # PEFT 0.19 lacks a feature of the table of gates, too.
    check(found(), here, *{rule, "software.gates"} if rule == "software.peft" else {rule}, words=words)


MOUNTS = {
    "storage.nfs-soft": "36 35 0:50 / {} rw,relatime shared:7 - nfs4 srv:/x rw,vers=4.2,soft,acdirmax=60",
    "storage.nfs-stale": "36 35 0:50 / {} rw,relatime - nfs4 srv:/x rw,vers=4.2,hard,actimeo=600",
    "storage.nfs-locks": "36 35 0:50 /sub {} rw - nfs srv:/x rw,vers=3,hard,nolock",
    "storage.over-object-store": "36 35 0:50 / {} rw,nosuid - fuse.gcsfuse bucket rw,user_id=0",
}


@pytest.mark.parametrize("rule", MOUNTS)
def test_lines_of_the_kernel_s_table_of_mounts(rule: str, tmp_path: Path, here: set[str]) -> None:
    """File systems that can't be mounted here, in the kernel's own words."""
    table = tmp_path / "mountinfo"
    lines = [
        "28 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
        MOUNTS[rule].format(tmp_path),
        "40 28 0:9 / /proc rw - proc p rw",
    ]
    table.write_text("\n".join(lines) + "\n")
    place = look_at_place(str(tmp_path))
    facts = replace(collect(()), places=(replace(place, mount=mount_of(str(tmp_path / "x"), table)),))
    check(findings_of(facts), here, rule)


def test_a_path_of_no_known_kind(tmp_path: Path, here: set[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    check(found(tmp_path / "config.json"), here, "path.unknown")


def test_a_path_that_does_not_exist(tmp_path: Path, here: set[str]) -> None:
    for name in ("nope", "fdsp.yaml"):
        check(found(tmp_path / name), here, "path.absent")


def huge(folder: Path, nbytes: int) -> Path:
    """A model of that size, which takes no room on the disk."""
    folder.mkdir()
    sparse_file(folder / "model.safetensors", {"w": (nbytes // 2,)})
    return folder


def test_a_model_larger_than_the_host(tmp_path: Path, here: set[str]) -> None:
    budget = host_budget()
    assert budget is not None
    if torch.accelerator.current_accelerator(check_available=True) is None:
        model = huge(tmp_path / "huge", budget.limit_bytes + 1024**3)
        check(found(model), here, "model.too-large", words="doesn't fit on this host")
    path = tmp_path / "config.yaml"
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2}
    path.write_text(yaml.safe_dump({**base, "fsdp_config": FSDP2}))
    model = huge(tmp_path / "half", int(0.7 * budget.free_bytes))
    check(
        found(model, path, ranks=2),
        here,
        "accelerate.not-ram-efficient",
        words="each of the 2 ranks loads the full model",
    )


#: Rules of losses, and the fact that each speaks of.
LOSSES = {"log.loss-jump": "jump", "log.nan-loss": "not_a_number", "log.rising-loss": "rise"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["{'loss': 2.1}", "{'loss': 2.0}", "resuming from step 100", "{'loss': 9.8}", "{'loss': 9.1}"],
            "jump",
        ),
        (["step 3 loss=2.1", "Resumed from checkpoint-3", "step 4 loss=2.11", "step 5 loss=2.05"], None),
        (["loss: 2.1", "loss: nan", "loss: nan"], "not_a_number"),
        ([f"loss: {2 + abs(50 - k) / 10:.3f}" for k in range(100)], "rise"),
        ([f"loss: {9 - k / 20:.3f}" for k in range(100)], None),
        (["resuming from step 100", "{'loss': 9.8}"], None),
        (["{'loss': 2.1}", "resuming", "{'eval_loss': 9.8}", "{'loss': 2.1}"], None),
    ],
    ids=["jump", "no jump", "nan", "rising", "falling", "nothing before", "evaluation"],
)
def test_what_a_log_says_of_the_loss(tmp_path: Path, lines: list[str], expected: str | None) -> None:
    path = tmp_path / "run.log"
    path.write_text("\n".join(lines))
    log = read_log(str(path))
    told = [name for name in LOSSES.values() if getattr(log, name) is not None]
    assert told == ([] if expected is None else [expected])
    assert [f.rule for f in found(path) if f.rule in LOSSES] == [
        rule for rule in LOSSES if LOSSES[rule] in told
    ]
    if expected == "jump":
        assert log.jump == ("line 4, resuming from step 100", 2.1, 9.1)


#: Losses of a run that lost its optimizer, before the resume and after it: they grow for some steps.
BEFORE = [0.60, 0.85, 0.70, 0.72, 0.66, 0.80, 0.75, 0.62, 0.70, 0.68]
GROWING = [0.64, 0.72, 0.85, 1.19, 1.09, 1.19, 1.02, 0.93]
SPIKE = [2.1, 0.74, 0.69, 0.71, 0.65]
STEADY = [0.71, 0.84, 0.66, 0.69, 0.88, 0.73, 0.60, 0.75]


def of_trainer(losses: list[float], epoch: float) -> str:
    """The lines that the HF Trainer prints by default, 100 steps an epoch."""
    told = [(loss, epoch + k / 100) for k, loss in enumerate(losses, 1)]
    return "".join(
        f"{{'loss': '{loss:.3f}', 'grad_norm': '1.9', 'learning_rate': '0.01', 'epoch': '{at:.3f}'}}\n"
        for loss, at in told
    )


ENDS = (
    "{'train_runtime': '0.2409', 'train_steps_per_second': '16.6', 'train_loss': '0.711', 'epoch': '1.5'}\n"
)
LOADS = "Loading weights: 100%|██████████| 148/148 [00:00<00:00, 8057.10it/s]\n"


@pytest.mark.parametrize("after", [GROWING, SPIKE, STEADY], ids=["growing", "spike", "steady"])
@pytest.mark.parametrize(
    "sign", [ENDS, LOADS, "resuming from checkpoint-150\n", ""], ids=["ends", "loads", "says", "back"]
)
def test_a_jump_in_a_log_of_the_trainer(tmp_path: Path, sign: str, after: list[float]) -> None:
    """At its default settings no line speaks of a resume: the epochs continue after a start, or go back to the checkpoint."""
    path = tmp_path / "train.log"
    path.write_text(of_trainer(BEFORE, 1.40) + sign + of_trainer(after, 1.47 if not sign else 1.50))
    jumps = [f for f in found(path) if f.rule in LOSSES]
    assert [f.rule for f in jumps] == ["log.loss-jump"] * (after is not STEADY)
    assert all("trainer.resume_report" in f.do for f in jumps)


#: Losses that fall, of a LoRA run of the Trainer, and those after it resumed without its optimizer and its schedule.
FALLING = [3.317, 3.179, 3.113, 3.09, 2.992, 2.998, 2.913, 2.784, 2.778, 2.709]
FALLING += [2.617, 2.546, 2.485, 2.553, 2.306, 2.364, 2.337, 2.184, 2.136, 2.127]
JUMPED = [2.088, 4.228, 3.844, 3.509, 3.308, 3.225, 2.942, 2.826]
#: The same run with ``logging_steps=5``.
FEW, JUMPED_FEW = [5.364, 3.884, 3.63, 3.386, 3.138, 2.836, 2.501, 2.23], [3.395, 2.921, 2.671, 2.479]


@pytest.mark.parametrize(
    ("before", "after", "back", "jump"),
    [
        (FALLING, JUMPED, 0, (2.184, 3.86)),
        ([*FALLING, 2.141, 2.199, 2.124, 2.086, 1.898], JUMPED, 5, (2.184, 3.86)),
        (FALLING, [2.141, 2.199, 2.124, 2.086, 1.898], 0, None),
        (FALLING, FALLING[5:13], 15, None),
        (FEW, JUMPED_FEW, 0, (2.228, 2.996)),
        (FEW, [2.1, 2.2, 2.0, 2.15], 0, None),
    ],
    ids=["falls", "replays", "restored", "replays the fall", "few", "few, restored"],
)
def test_a_jump_is_measured_from_the_last_losses(
    tmp_path: Path,
    before: list[float],
    after: list[float],
    back: int,
    jump: tuple[float, float] | None,
) -> None:
    """Not from a mean over a fall; losses of steps that the resume replays are left out. The finding names the line of the jump."""
    path = tmp_path / "train.log"
    path.write_text(of_trainer(before, 0.0) + ENDS + of_trainer(after, (len(before) - back) / 100))
    told = read_log(str(path)).jump
    if jump is None:
        assert told is None
        return
    assert told is not None
    assert told[0] == f"line {len(before) + 2}, epoch {(len(before) - back + 1) / 100:g}"
    assert told[1:] == pytest.approx(jump, abs=1e-3)


#: Learning rates before and after a resume, and whether the second ones go back.
RATES = {
    "linear": ([0.0077, 0.0073, 0.007], [0.02, 0.0197, 0.0193], True),
    "warmup": ([0.0077, 0.0073, 0.007], [0.0, 0.002, 0.004], True),
    "restored": ([0.0077, 0.0073, 0.007], [0.0067, 0.0063, 0.006], False),
    "restored in a warmup": ([0.001, 0.002, 0.003], [0.004, 0.005, 0.006], False),
    "constant": ([0.01, 0.01, 0.01], [0.01, 0.01, 0.01], False),
    "decay by epoch": ([0.01, 0.01, 0.01], [0.001, 0.001, 0.001], False),
}


@pytest.mark.parametrize("name", RATES)
def test_a_learning_rate_that_goes_back(tmp_path: Path, name: str) -> None:
    """In a log, and in what the Trainer lists; at the resume, with losses that don't jump."""
    before, after, back = RATES[name]
    lines = [
        f"{{'loss': '2.1', 'learning_rate': '{r:g}', 'epoch': '{k / 10:g}'}}\n"
        for k, r in enumerate([*before, *after])
    ]
    path = tmp_path / "train.log"
    path.write_text("".join([*lines[: len(before)], ENDS, *lines[len(before) :]]))
    log = read_log(str(path))
    assert log.rate_jump == (("line 5, epoch 0.3", before[-1], after[0]) if back else None)
    assert log.resumed
    assert [f.rule for f in found(path) if f.rule.startswith("log.")] == ["log.lr-jump"] * back
    told = log_of_losses("x", {}, {2: "checkpoint-2"}, dict(enumerate([*before, *after])))
    assert told.rate_jump == (("checkpoint-2", before[-1], after[0]) if back else None)
    assert told.resumed == back


def test_a_schedule_with_restarts_does_not_go_back() -> None:
    rates = dict(enumerate([0.5 * (1 + math.cos(math.pi * (k % 25) / 25)) for k in range(100)]))
    saved = {step: f"checkpoint-{step}" for step in range(100)}
    assert log_of_losses("x", {}, saved, rates).rate_jump is None


@pytest.mark.parametrize("sign", [ENDS, LOADS, ""])
def test_another_training_in_the_same_log_is_no_resume(tmp_path: Path, sign: str) -> None:
    """Its epochs begin where those of the training before began."""
    path = tmp_path / "train.log"
    path.write_text(of_trainer(BEFORE, 0.0) + sign + of_trainer([3.0 - k / 10 for k in range(20)], 0.0))
    assert [f.rule for f in found(path) if f.rule in LOSSES] == []


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_a_noisy_healthy_run_has_no_jump(tmp_path: Path, noise: float) -> None:
    """A hundred of them, each with three resumes in its log and thirty checkpoints."""
    rng = random.Random(f"healthy {noise}")
    told = []
    for run in range(100):
        losses = [(0.6 + 2 * math.exp(-k / 40)) * math.exp(noise * rng.gauss(0, 1)) for k in range(300)]
        path = tmp_path / f"{run}.log"
        parts = [of_trainer(losses[k : k + 75], k / 100) for k in range(0, 300, 75)]
        path.write_text(ENDS.join(parts))
        points = dict(enumerate(losses, 1))
        saved = {step: f"checkpoint-{step}" for step in range(10, 301, 10)}
        told += [read_log(str(path)).jump, log_of_losses("x", points, saved, {}).jump]
    assert [jump for jump in told if jump is not None] == []


def test_a_jump_after_a_checkpoint_of_the_trainer(trained: Path, tmp_path: Path, here: set[str]) -> None:
    """In the losses that the Trainer lists; the folders say from where a run may have resumed."""
    root = Path(shutil.copytree(trained, tmp_path / "out"))
    for step, name in ((20, "checkpoint-4"), (30, "checkpoint-6")):
        (root / name).rename(root / f"checkpoint-{step}")
    file = root / "checkpoint-30/trainer_state.json"
    state = json.loads(file.read_text())
    for after in (STEADY, GROWING, SPIKE):
        losses = enumerate([*BEFORE, *reversed(BEFORE), *after], 1)
        state["log_history"] = [{"step": k, "loss": loss, "epoch": k / 100} for k, loss in losses]
        file.write_text(json.dumps(state))
        rules = ("log.loss-jump",) * (after is not STEADY)
        words = "The loss jumped after checkpoint-20, from which a run may have resumed: 0.708 before"
        check(found(root), here | {"checkpoint.pickle"}, *rules, words=words * bool(rules))
        check(found(file), here, *rules, words=words * bool(rules))
