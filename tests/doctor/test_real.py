"""Pathologies in real files, limits, variables and file systems; and real healthy ones, which have no finding."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.doctor.collect import collect
from shardwise.doctor.logs import KNOWN
from shardwise.doctor.mounts import mount_of
from shardwise.doctor.probe import look_at_place
from shardwise.doctor.rule import Finding
from shardwise.doctor.table import findings_of
from shardwise.models.host_budget import host_budget
from shardwise.store.publish import set_aside
from tests.faults.mounts import NEW_NAMES, CanNotMount, mount, mount_tmpfs, unshare, with_own_mounts
from tests.harness.models import sparse_file
from tests.loading.test_plan_promises import make_model

#: Python 3.12 says so of every fork where a library has threads; these forks use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
ROOT = Path(__file__).resolve().parents[2]
#: What depends on where the tests run: a container's own layer, or /tmp in memory.
WHERE = {"storage.overlay", "storage.memory"}


def found(*paths: Path, ranks: int = 1) -> list[Finding]:
    return findings_of(collect([str(p) for p in paths], ranks=ranks))


@pytest.fixture(scope="module")
def here() -> set[str]:
    """The rules that have a finding on this machine alone."""
    return {f.rule for f in found()} | WHERE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model in two files, with an index."""
    return make_model(tmp_path_factory.mktemp("doctor") / "qwen")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("doctor") / "steps"
    with sw.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(sw.TrainState(model=nn.Linear(4, 4)), step)
    return root


def check(findings: Iterable[Finding], here: set[str], *rules: str, words: str = "") -> None:
    """These rules and no others name it; one of their sentences has the words."""
    new = [f for f in findings if f.rule not in here - {*rules}]
    assert {f.rule for f in new} == {*rules}, [f.bites for f in new]
    assert any(words in text for f in new for text in (f.bites, f.why, f.where)) or not words, [
        f.bites for f in new
    ]


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
    first = findings[0]
    assert first.rule == "accelerate.device-mesh"
    assert "ShardwiseAccelerator" in first.do


FSDP2 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "Block",
    "fsdp_version": 2,
}
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
    several = {"network.loopback", "network.host-name"}  # as this machine's name has it
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


def arguments(path: Path, **changes: Any) -> Path:
    """TrainingArguments as the HF Trainer writes them."""
    from transformers import TrainingArguments

    own = json.loads(
        TrainingArguments(output_dir=str(path.parent), use_cpu=True, report_to=[]).to_json_string()
    )
    fsdp = {
        "fsdp": "full_shard",
        "fsdp_config": {"version": 2},
        "bf16": True,
        "gradient_checkpointing": False,
    }
    path.write_text(json.dumps({**own, **fsdp, **changes}))
    return path


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
    document["weight_map"][name] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(document))


def few_experts(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": 2}))


def four_bits(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "model.lost-file": (
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        "model-00002-of",
    ),
    "model.damaged-file": (truncate, "model-00001-of-00002.safetensors is damaged"),
    "model.outside": (lead_outside, "../../etc/passwd"),
    "model.lfs-pointer": (leave_pointer, "pointer of Git LFS"),
    "model.pickle": (pickle_it, "pytorch_model.bin"),
    "model.index": (store_twice, "can't be loaded"),
    "model.few-experts": (few_experts, "2 experts over 4 ranks"),
    "model.quant-storage": (four_bits, "uint8"),
}


@pytest.mark.parametrize("rule", MODELS)
def test_a_model(rule: str, copy: Path, here: set[str]) -> None:
    spoil, words = MODELS[rule]
    spoil(copy)
    check(found(copy, ranks=4), here | {"machine.cores"}, rule, words=words)


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
    ("checkpoint.per-rank", "checkpoint.pickle"): per_rank,
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


# ----------------------------------------------------------------------------------------------------
# Logs

#: As the programs write them.
LINES = {
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
    "nms": "RuntimeError: operator torchvision::nms does not exist",
}
NOISE = """\
[2026-11-24 10:00:01] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.
[2026-11-24 10:00:02] ProcessGroupNCCL initialization options: size: 8, global rank: 0, TIMEOUT(ms): 600000
[2026-11-24 10:00:03] loading optimizer.state, saved 400 files, device_mesh=DeviceMesh((8,))
{'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 1e-05, 'epoch': 0.1}
"""


@pytest.mark.parametrize("known", KNOWN, ids=lambda k: k.name)
def test_a_log(known: Any, tmp_path: Path, here: set[str]) -> None:
    path = tmp_path / "run.log"
    path.write_text(f"{NOISE * 50}{LINES[known.name]}\n{NOISE}")
    findings = found(path)
    check(findings, here, f"log.{known.name}", words=LINES[known.name][:60])


def test_a_long_log_is_read_at_both_ends(tmp_path: Path, here: set[str]) -> None:
    path = tmp_path / "run.out"
    with path.open("w") as file:
        file.write(f"{LINES['oom-kill']}\n")
        for _ in range(40):
            file.write("x" * 1024**2 + "\n")
        file.write(f"{LINES['no-space']}\n")
    began = time.monotonic()
    check(found(path), here, "log.oom-kill", "log.no-space")
    assert time.monotonic() - began < 20


# ----------------------------------------------------------------------------------------------------
# Limits, variables and file systems, in a process of their own


def forked(
    *paths: Path,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    limits: Mapping[int, int] | None = None,
) -> list[Finding]:
    """What is found in a fork with these variables and limits."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.environ.update(env or {})
            for limit, soft in (limits or {}).items():
                resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
            said = json.dumps([f.to_json() for f in found(*paths, ranks=ranks)]).encode()
            os.write(write, said)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return [Finding(**one) for one in json.loads(said)]


LIMITS = {
    "machine.open-files": ({resource.RLIMIT_NOFILE: 200}, "its limit is 200"),
    "machine.file-size": ({resource.RLIMIT_FSIZE: 1024**3}, "more than 1.0 GiB"),
}


@pytest.mark.parametrize("rule", LIMITS)
def test_a_limit(rule: str, here: set[str]) -> None:
    limits, words = LIMITS[rule]
    check(forked(limits=limits), here, rule, words=words)


def test_a_file_limit_that_the_probe_meets(tmp_path: Path, here: set[str]) -> None:
    findings = forked(tmp_path, limits={resource.RLIMIT_FSIZE: 4096})
    check(findings, here, "machine.file-size", "storage.not-writable", words="File too large")
    assert list(tmp_path.iterdir()) == []


VARIABLES: dict[str, tuple[dict[str, str], str]] = {
    "launch.incomplete": ({"RANK": "0", "WORLD_SIZE": "8"}, "MASTER_ADDR, MASTER_PORT are not"),
    "launch.numbers": ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=4"),
    "launch.master-loopback": (
        {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        },
        "MASTER_ADDR=localhost",
    ),
    "launch.port": ({"MASTER_PORT": "port"}, "is no port"),
    "launch.slurm-world": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "WORLD_SIZE": "4"}, "srun started 8"),
    "launch.torchrun-per-task": (
        {"SLURM_NTASKS_PER_NODE": "4", "TORCHELASTIC_RUN_ID": "x"},
        "torchrun 4 times",
    ),
    "launch.mpi-world": ({"OMPI_COMM_WORLD_SIZE": "8", "WORLD_SIZE": "1"}, "mpirun started 8"),
    "launch.devices": ({"CUDA_VISIBLE_DEVICES": "0", "LOCAL_WORLD_SIZE": "2"}, "1 are visible for 2 ranks"),
    "launch.ram-efficient-off": ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "True"}, "Every rank loads the whole"),
    "launch.fsdp1": ({"ACCELERATE_USE_FSDP": "true"}, "FSDP1"),
    "launch.no-watchdog": ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "wait for ever"),
    "machine.threads": ({"OMP_NUM_THREADS": "4096"}, "4096 threads"),
    "network.interface": ({"GLOO_SOCKET_IFNAME": "eth99"}, "no interface eth99"),
    "network.gloo-pattern": ({"GLOO_SOCKET_IFNAME": "^lo"}, "called '^lo'"),
}


@pytest.mark.parametrize("rule", VARIABLES)
def test_variables(rule: str, here: set[str]) -> None:
    env, words = VARIABLES[rule]
    beside = {"launch.incomplete", "machine.cores", "network.loopback", "network.host-name"} | (
        {"machine.threads"} if "SLURM_PROCID" in env else set()
    )
    check(forked(env=env, ranks=2), (here | beside) - {rule}, rule, words=words)


def test_processes_that_do_not_fit(here: set[str]) -> None:
    findings = forked(ranks=16_384)
    assert {"machine.memory", "machine.cores"} <= {f.rule for f in findings}


def _in_tmpfs(folder: Path, options: str, fill: int = 0) -> list[dict[str, str]]:
    mount_tmpfs(folder, options)
    for k in range(fill):
        (folder / f"file-{k}").touch()
    return [f.to_json() for f in found(folder)]


FILE_SYSTEMS = {
    "size=16m": ({"storage.memory", "storage.space"}, "are free"),
    "size=2g,nr_inodes=60": ({"storage.memory", "storage.inodes"}, "inodes are left"),
    "size=2g,ro": ({"storage.memory", "storage.not-writable"}, "Read-only file system"),
}


@pytest.mark.parametrize("options", FILE_SYSTEMS)
def test_a_file_system(options: str, tmp_path: Path, here: set[str]) -> None:
    """Real ones, in a mount namespace."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    rules, words = FILE_SYSTEMS[options]
    try:
        said = with_own_mounts(lambda: _in_tmpfs(folder, options), tmp_path / "result")
    except CanNotMount as error:
        pytest.skip(str(error))
    check([Finding(**one) for one in said], here - WHERE, *rules, words=words)


def _small_shm(folder: Path) -> list[Finding]:
    mount_tmpfs(Path("/dev/shm"), "size=64m")
    return found()


def _container_layer(folder: Path) -> list[Finding]:
    parts = [folder / name for name in ("lower", "upper", "work", "merged")]
    for part in parts:
        part.mkdir()
    lower, upper, work, merged = parts
    mount("overlay", merged, f"lowerdir={lower},upperdir={upper},workdir={work}")
    return found(merged)


def _named(host: str) -> list[Finding]:
    """This host under another name, as one of two."""
    unshare(NEW_NAMES)
    socket.sethostname(host)
    os.environ.update(
        RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="node1", MASTER_PORT="29500"
    )
    return found()


NAMESPACES: dict[str, tuple[Callable[[Path], list[Finding]], str]] = {
    "machine.shm": (_small_shm, "/dev/shm has 64.0 MiB"),
    "storage.overlay": (_container_layer, "gone with the container"),
    "network.loopback": (lambda folder: _named("localhost"), "its name leads to 127.0.0.1"),
    "network.host-name": (lambda folder: _named("no-such-host.invalid"), "can't be resolved"),
}


@pytest.mark.parametrize("rule", NAMESPACES)
def test_a_namespace(rule: str, tmp_path: Path, here: set[str]) -> None:
    work, words = NAMESPACES[rule]
    try:
        said = with_own_mounts(lambda: [f.to_json() for f in work(tmp_path)], tmp_path / "result")
    except CanNotMount as error:
        pytest.skip(str(error))
    check([Finding(**one) for one in said], here - WHERE, rule, words=words)


INSTALLED = {
    "software.requires": ("transformers", "5.1.0", "transformers is 5.1.0"),
    "software.peft": ("peft", "0.19.1", "peft 0.19.1 beside transformers"),
    "software.torchvision": ("torchvision", "0.20.0", "torchvision 0.20.0 beside torch"),
}


@pytest.mark.parametrize("rule", INSTALLED)
def test_an_installed_version(
    rule: str, tmp_path: Path, here: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that comes first in the path says that it is installed there."""
    name, version, words = INSTALLED[rule]
    info = tmp_path / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    check(found(), here, rule, words=words)


MOUNTS = {
    "storage.nfs-soft": "36 35 0:50 / {} rw,relatime shared:7 - nfs4 srv:/x rw,vers=4.2,soft,acdirmax=60",
    "storage.nfs-late": "36 35 0:50 / {} rw,relatime - nfs4 srv:/x rw,vers=4.2,hard,actimeo=600",
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
        check(found(model), here, "model.too-large", words="does not fit on this host")
    path = tmp_path / "config.yaml"
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2}
    path.write_text(yaml.safe_dump({**base, "fsdp_config": FSDP2}))
    model = huge(tmp_path / "half", int(0.7 * budget.free_bytes))
    check(
        found(model, path, ranks=2), here, "accelerate.not-ram-efficient", words="2 ranks hold 2 whole models"
    )


INJECTED = {
    "storage.fsync": ("fsync:error=EIO", "Input/output error"),
    "storage.no-rename": ("rename,renameat,renameat2:error=EXDEV", "Invalid cross-device link"),
    "storage.no-answer": ("statfs:delay_enter=18000000", "did not answer in 10 s"),
    "storage.slow-fsync": ("fsync:delay_enter=1500000", "one fsync of 4 KiB took 1.5 s"),
    "storage.slow-write": ("pwrite64:delay_enter=400000", "one process wrote"),
    "storage.slow-read": ("pread64:delay_enter=400000", "one process read"),
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("rule", INJECTED)
def test_system_calls_that_fail_or_wait(rule: str, tmp_path: Path, here: set[str]) -> None:
    """strace injects below Python."""
    what, words = INJECTED[rule]
    calls = what.partition(":")[0]
    (tmp_path / "run").mkdir()
    one_path = ("-P", str(tmp_path / "run")) if rule == "storage.no-answer" else ("--seccomp-bpf",)
    command = [
        *("strace", "-f", "-qq", *one_path, "-o", str(tmp_path / "trace"), "-e", f"trace={calls}"),
        *("-e", f"inject={what}", sys.executable, "-m", "shardwise", "doctor", str(tmp_path / "run")),
        *("--ranks", "1", "--json"),
    ]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1, done.stderr
    findings = [Finding(**one) for one in json.loads(done.stdout)["findings"]]
    slow = {"storage.slow-write"} if rule == "storage.slow-fsync" else set()
    check(findings, here | slow, rule, words=words)
    assert list((tmp_path / "run").iterdir()) == []
    # strace ends only when the call that it holds has gone on
    assert time.monotonic() - began < (60 if rule == "storage.no-answer" else 30)


# ----------------------------------------------------------------------------------------------------
# Healthy


def test_healthy_files_have_no_finding(model: Path, steps: Path, tmp_path: Path, here: set[str]) -> None:
    """Each kind of file, by itself and all at once, for one rank and for two."""
    good = tmp_path / "good.yaml"
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2}
    good.write_text(yaml.safe_dump({**base, "fsdp_config": FSDP2}))
    ddp = tmp_path / "ddp.yaml"
    ddp.write_text(yaml.safe_dump({"distributed_type": "MULTI_CPU", "num_processes": 2, "num_machines": 1}))
    log = tmp_path / "run.log"
    log.write_text(NOISE * 100)
    single = tmp_path / "single"
    single.mkdir()
    save_file({"w": torch.zeros(4)}, single / "model.safetensors")
    plain = arguments(tmp_path / "plain.json", fsdp="", fsdp_config={"xla": False, "min_num_params": 0})
    sharded = arguments(
        tmp_path / "sharded.json", fsdp_config={"version": 2, "activation_checkpointing": True}
    )
    files = [good, ddp, log, single, plain, sharded, model, steps / "step-00000001"]
    places = [steps, tmp_path / "not/there/yet"]
    for ranks in (1, 2):
        for path in files:
            check(found(path, ranks=ranks), here)
        check(found(*files, ranks=ranks), here)
    for path in places:
        check(found(path), here)
    assert not (tmp_path / "not").exists()
    check(found(*files, *places, ranks=2), here)


def test_the_command(tmp_path: Path, here: set[str]) -> None:
    from click.testing import CliRunner

    from shardwise.cli import main

    yaml_of_case_1 = str(ROOT / "examples/accelerate_fsdp.yaml")
    shown = CliRunner().invoke(main, ["doctor", yaml_of_case_1, "--ranks", "1"])
    assert shown.exit_code == 1
    assert "accelerate.device-mesh" in shown.stdout
    assert "3 findings" in shown.stdout or here > WHERE
    said = CliRunner().invoke(main, ["doctor", yaml_of_case_1, "--ranks", "1", "--json"])
    document = json.loads(said.stdout)
    assert not document["ok"]
    assert document["facts"]["accelerate"][0]["path"] == yaml_of_case_1
    lost = CliRunner().invoke(main, ["doctor", str(tmp_path / "no.yaml")])
    assert lost.exit_code == 1
    assert "no such file" in lost.stderr
    if here == WHERE:
        assert CliRunner().invoke(main, ["doctor", "--ranks", "1"]).exit_code == 0


def test_hostile_text_does_not_move_the_cursor(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from shardwise.cli import main

    path = tmp_path / "run.log"
    path.write_text("\x1b[2JOSError: [Errno 24] Too many open files \x1b]0;title\x07 [bold]x[/bold]\n")
    shown = CliRunner().invoke(main, ["doctor", str(path), "--ranks", "1"]).stdout
    assert "\x1b" not in shown
    assert "[bold]x[/bold]" in shown


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    path = arguments(
        tmp_path / "args.json", hub_token="hf_abcdef", fsdp_config={"version": 2, "api_key": "k-123"}
    )
    facts = collect([str(path)])
    assert "hf_abcdef" not in repr(facts)
    assert "k-123" not in repr(facts)
    assert facts.arguments[0].values["hub_token"] == "…"


def test_a_yaml_of_aliases_is_refused(tmp_path: Path) -> None:
    """Nine lists of nine: a few hundred bytes that stand for billions of values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 10)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(sw.errors.FormatError, match="holds more than 100000 values"):
        found(path)


def test_a_yaml_that_runs_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text("distributed_type: !!python/object/apply:os.system ['touch /nope']\n")
    with pytest.raises(sw.errors.FormatError, match="is not YAML"):
        found(path)
