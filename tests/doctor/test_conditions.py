"""Real conditions: programs that fail as people's do, file systems and filters that refuse, clocks and devices as on sick hosts."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from shardwise.doctor.facts import Finding
from tests.doctor.real import FSDP2, ROOT, WHERE, check, found
from tests.doctor.test_system import forked
from tests.faults.mounts import NEW_NAMES, CanNotMount, mount, mount_tmpfs, unshare, with_own_mounts

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
FAILING = str(ROOT / "tests/doctor/failing.py")

# ----------------------------------------------------------------------------------------------------
# Logs that programs print as they fail


def _no_initial_lr(folder: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=3)


def _no_optimizer_state(folder: Path) -> None:
    dcp.save({"optimizer.state.used.weight.step": torch.zeros(1)}, checkpoint_id=folder, no_dist=True)
    dcp.load({"optimizer.state.unused.weight.step": torch.zeros(1)}, checkpoint_id=folder, no_dist=True)


def _full_disk(folder: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def _meta_copy(folder: Path) -> None:
    nn.Linear(2, 2, device="meta").to("cpu")


def _open_files(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        while True:
            kept.append((folder / "x").open("w"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in kept:
            file.close()


def _truncated(folder: Path) -> None:
    save_file({"w": torch.zeros(64)}, folder / "x.safetensors")
    os.truncate(folder / "x.safetensors", 100)
    safe_open(folder / "x.safetensors", "pt").__enter__()


RAISED: dict[str, Callable[[Path], None]] = {
    "log.optimizer-key": _no_optimizer_state,
    "log.no-space": _full_disk,
    "log.meta-copy": _meta_copy,
    "log.initial-lr": _no_initial_lr,
    "log.open-files": _open_files,
    "log.damaged-safetensors": _truncated,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("rule", RAISED)
def test_the_traceback_of_a_real_failure(rule: str, tmp_path: Path, here: set[str]) -> None:
    log = tmp_path / "run.log"
    try:
        RAISED[rule](tmp_path)
    except BaseException:
        log.write_text(traceback.format_exc())
    check(found(log), here, rule)


def _small_shm(command: list[str]) -> list[str]:
    return ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4m t /dev/shm && exec "$@"', "sh", *command]


def _no_name(command: list[str]) -> list[str]:
    return ["unshare", "-u", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh", *command]


def _torchrun(command: list[str]) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--master-port", "0", *command[1:]]


PRINTED: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "log.mixed-dtensor": ("mixed_dtensor", list),
    "log.shared-memory": ("shared_memory", _small_shm),
    "log.gloo-loopback": ("gloo_loopback", _no_name),
    "log.oom-kill": ("oom_kill", _torchrun),
}


@pytest.mark.processes
@pytest.mark.parametrize("rule", PRINTED)
def test_the_log_of_a_program_that_fails(rule: str, tmp_path: Path, here: set[str]) -> None:
    if PRINTED[rule][1] in (_small_shm, _no_name) and os.getuid():
        pytest.skip("needs root, for namespaces")
    name, inside = PRINTED[rule]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with (tmp_path / "run.log").open("w") as log:
        command = inside([sys.executable, FAILING, name])
        subprocess.run(command, env={**os.environ, **alone}, stdout=log, stderr=log, timeout=100, check=False)
    check(found(tmp_path / "run.log"), here, rule)


@pytest.mark.needs("transformers!=5.8.*", "leaves new weights in bf16 as the memory was")
def test_weights_that_from_pretrained_does_not_find(
    copy: Path, tmp_path: Path, here: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The base's names as PEFT has them; transformers' own report of it, and the first loss of such a model."""
    import transformers

    logger = transformers.utils.logging.get_logger("transformers")
    for file in copy.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors = {f"base_model.model.{n}": opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118
        save_file(tensors, file, metadata={"format": "pt"})
    index = copy / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] = {f"base_model.model.{n}": f for n, f in document["weight_map"].items()}
    index.write_text(json.dumps(document))
    logger.addHandler(caplog.handler)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(copy)
    finally:
        logger.removeHandler(caplog.handler)
    tokens = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    log = tmp_path / "run.log"
    log.write_text(
        f"{caplog.text}\n{{'eval_loss': 0.1}}\n{{'loss': {loss:.4f}, 'grad_norm': 1.0}}\n{{'loss': 2.0}}\n"
    )
    check(found(log, copy), here, "log.missing-weights", "log.random-loss", "model.internal-names")


@pytest.mark.needs("torch>=2.13", "does not refuse a parameter in two groups of FSDP2")
@pytest.mark.processes
def test_torch_refuses_a_tied_embedding_in_a_group_of_its_own() -> None:
    """What accelerate.tied-groups says beforehand."""
    command = [sys.executable, FAILING, "tied_groups"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False).stderr
    assert "is shared with a parameter already managed by another FSDP group" in said


#: The rules that the tests above show.
FAILED = (*RAISED, *PRINTED, "log.missing-weights", "log.random-loss")

# ----------------------------------------------------------------------------------------------------
# Files


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of torch.compile
def test_names_of_a_compiled_model(copy: Path, here: set[str]) -> None:
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    compiled = torch.compile(nn.Linear(2, 2))
    save_file(compiled.state_dict(), copy / "model.safetensors")
    check(found(copy), here, "model.internal-names", words="_orig_mod.bias")


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # PEFT asks for it
def test_an_adapter_of_one_rank(copy: Path, tmp_path: Path, here: set[str]) -> None:
    """PEFT's own files are healthy; rank 0's rows of each matrix are not."""
    peft = pytest.importorskip("peft")
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(copy)
    peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "lora"
    )
    check(found(tmp_path / "lora"), here)
    file = tmp_path / "lora/adapter_model.safetensors"
    with safe_open(file, "pt") as opened:
        rows = {n: opened.get_tensor(n).chunk(2)[0].contiguous() for n in opened.keys()}  # noqa: SIM118
    save_file(rows, file)
    check(found(tmp_path / "lora"), here, "model.adapter-slice", words="lora_A.weight has rank 2")


def test_an_architecture_that_transformers_cuts_first(copy: Path, here: set[str]) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "olmo_hybrid"}))
    findings = found(copy)
    check(findings, here, "model.conversion", words="olmo_hybrid")


@pytest.mark.parametrize("kind", [["olmo_hybrid"], {}, 1, None])
def test_an_architecture_that_is_no_name(copy: Path, kind: object) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    assert "model.conversion" not in {finding.rule for finding in found(copy)}


def test_parts_larger_than_the_memory(tmp_path: Path, here: set[str]) -> None:
    (tmp_path / ".metadata").touch()
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        file.truncate(1024**4)
    check(found(tmp_path), here, "checkpoint.merge", "checkpoint.pickle", words="1024.0 GiB of parts")


@pytest.mark.needs("torch>=2.13", "does not refuse a parameter in two groups of FSDP2")
def test_a_tied_embedding_in_a_group_of_its_own(copy: Path, tmp_path: Path, here: set[str]) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2}
    wrapped = {**FSDP2, "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer,Embedding"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**base, "fsdp_config": wrapped}))
    check(found(path, copy), here, "accelerate.tied-groups", words="names Embedding")


#: The rules that the tests above show.
FILES = (
    "accelerate.tied-groups",
    "model.internal-names",
    "model.adapter-slice",
    "model.conversion",
    "checkpoint.merge",
)

# ----------------------------------------------------------------------------------------------------
# System calls that a filter refuses, as a container's profile does

_CALLS = {"x86_64": {"fcntl": 72, "openat": 257}, "aarch64": {"fcntl": 25, "openat": 56}}


def _refuse(call: str, argument: int, mask: int, value: int, number: int) -> None:
    """seccomp(2): the call fails with this errno (0: does nothing, and reports success) if the argument has this value."""
    load, jump, mask_it, end = 0x20, 0x15, 0x54, 0x06
    program = [
        (load, 0, 0, 0),
        (jump, 0, 3, _CALLS[platform.machine()][call]),
        (load, 0, 0, 16 + 8 * argument),
        (mask_it, 0, 0, mask),
        (jump, 1, 0, value),
        (end, 0, 0, 0x7FFF0000),
        (end, 0, 0, 0x00050000 | number),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    whole = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, whole, 0, 0) == 0, os.strerror(ctypes.get_errno())


_SET_LOCK = getattr(fcntl, "F_OFD_SETLK", 37)
REFUSED: dict[str, tuple[tuple[str, int, int, int, int], str]] = {
    "storage.no-locks": (("fcntl", 1, 0xFFFFFFFF, _SET_LOCK, errno.ENOLCK), "No locks available"),
    "storage.no-exclusion": (("fcntl", 1, 0xFFFFFFFF, _SET_LOCK, 0), "grants the same lock twice"),
    "storage.no-direct": (("openat", 2, os.O_DIRECT, os.O_DIRECT, errno.EINVAL), "O_DIRECT fails"),
}


@pytest.mark.skipif(platform.machine() not in _CALLS, reason="numbers of system calls are not known here")
@pytest.mark.parametrize("rule", REFUSED)
def test_a_call_that_the_system_refuses(rule: str, tmp_path: Path, here: set[str]) -> None:
    refused, words = REFUSED[rule]
    check(forked(tmp_path, before=lambda: _refuse(*refused)), here, rule, words=words)


# ----------------------------------------------------------------------------------------------------
# Namespaces: file systems, networks and devices


def _layer_on_ramfs(folder: Path) -> list[Finding]:
    mount("ramfs", folder, "")
    parts = [folder / name for name in ("lower", "upper", "work", "merged")]
    for part in parts:
        part.mkdir()
    mount("overlay", parts[3], f"lowerdir={parts[0]},upperdir={parts[1]},workdir={parts[2]}")
    return found(parts[3])


def _gpu_without_driver(folder: Path) -> list[Finding]:
    mount_tmpfs(folder, "size=1m")
    os.mknod(folder / "nvidia0", 0o20666, os.makedev(195, 0))
    subprocess.run(["mount", "--move", str(folder), "/dev"], check=True)
    return found()


def _node(**more: str) -> None:
    os.environ.update(
        RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="node1", MASTER_PORT="29500", **more
    )


def _rdma(folder: Path) -> list[Finding]:
    mount_tmpfs(Path("/sys/class"), "size=1m")
    Path("/sys/class/infiniband/mlx5_0").mkdir(parents=True)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65_536, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
    _node(GLOO_SOCKET_IFNAME="lo")
    return found()


def _past_infiniband(folder: Path) -> list[Finding]:
    """Two interfaces, one of them called as InfiniBand's are; the host's name leads to the other."""
    unshare(NEW_NAMES | 0x40000000)
    socket.sethostname("node3")
    (folder / "hosts").write_text("10.1.0.3 node3\n")
    script = f"""mount --bind {folder}/hosts /etc/hosts && ip link set lo up && ip link add eth0 type veth peer name ib0
    ip addr add 10.1.0.3/24 dev eth0 && ip addr add 10.2.0.3/24 dev ib0 && ip link set eth0 up && ip link set ib0 up"""
    if subprocess.run(["sh", "-ec", script], capture_output=True, check=False).returncode:
        raise CanNotMount("no pair of interfaces can be made")
    _node()
    return found()


SICK: dict[str, tuple[Callable[[Path], list[Finding]], str]] = {
    "storage.no-direct": (_layer_on_ramfs, "O_DIRECT fails (Invalid argument)"),
    "machine.gpus-unseen": (_gpu_without_driver, "torch sees none of 1 GPUs"),
    "machine.locked-memory": (_rdma, "may be locked"),
    "network.slow-interface": (_past_infiniband, "goes through eth0, not through ib0"),
}


@pytest.mark.skipif(bool(os.getuid()), reason="needs root, for namespaces")
@pytest.mark.parametrize("rule", SICK)
def test_a_sick_host(rule: str, tmp_path: Path, here: set[str]) -> None:
    if rule == "machine.gpus-unseen" and torch.accelerator.current_accelerator(check_available=True):
        pytest.skip("torch sees devices here")
    work, words = SICK[rule]
    folder = tmp_path / "own"
    folder.mkdir()
    try:
        said = with_own_mounts(lambda: [asdict(f) for f in work(folder)], tmp_path / "result")
    except CanNotMount as error:
        pytest.skip(str(error))
    check([Finding(**one) for one in said], here | WHERE, rule, words=words)


# ----------------------------------------------------------------------------------------------------
# A clock of its own: time namespaces leave the wall clock alone, so that a library answers in libc's place

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec += atol(getenv("CLOCK_AHEAD_S"));
  return status;
}
"""


def other_clock(folder: Path, ahead_s: int) -> dict[str, str]:
    """Variables under which a program's wall clock is so far ahead; skips where there is no compiler."""
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("no compiler")
    (folder / "clock.c").write_text(CLOCK)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "clock.so"), str(folder / "clock.c"), "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(folder / "clock.so"), "CLOCK_AHEAD_S": str(ahead_s)}


CLOCKS: dict[tuple[str, ...], tuple[int, str]] = {
    ("storage.clock",): (3600, "3600 s behind"),
    ("storage.clock", "machine.clock"): (-1_700_000_000, "clock is set to a date before 2024"),
}


@pytest.mark.processes
@pytest.mark.parametrize("rules", CLOCKS, ids="+".join)
def test_a_clock_that_is_wrong(rules: tuple[str, ...], tmp_path: Path, here: set[str]) -> None:
    ahead_s, words = CLOCKS[rules]
    run = tmp_path / "run"
    run.mkdir()
    env: dict[str, Any] = {**os.environ, **other_clock(tmp_path, ahead_s)}
    command = [sys.executable, "-m", "shardwise", "doctor", "--ranks", "1", "--json", str(run)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    check([Finding(**one) for one in json.loads(done.stdout)["findings"]], here, *rules, words=words)
