"""The machine as the kernel's files describe it: limits of cgroups of both versions, before the machine's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardwise.doctor.examine import findings_of
from shardwise.doctor.facts import look_at_machine
from tests.doctor.healthy import GIB, HEALTHY

VERSION_2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/job/memory.current": f"{7 * GIB}\n",
    "sys/fs/cgroup/job/cpu.max": "max 100000\n",
    "sys/fs/cgroup/job/step/cpu.max": "150000 100000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "9:cpu,cpuacct:/job\n4:memory:/job\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{7 * GIB}\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    memory = {"proc/meminfo": f"MemTotal: {512 * 1024**2} kB\nMemAvailable: {500 * 1024**2} kB\n"}
    for name, text in {**memory, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def check(root: Path, memory_file: str, cpu_file: str) -> None:
    machine = look_at_machine(root)
    assert machine.memory is not None
    assert (machine.memory.limit_bytes, machine.memory.free_bytes) == (8 * GIB, GIB)
    assert machine.memory.limit_from == memory_file
    assert machine.memory.shm_bytes is None
    assert (machine.cores.usable, machine.cores.quota_from) == (1.5, cpu_file)
    found = {f.rule: f for f in findings_of(replace(HEALTHY, machine=replace(machine, gpus=8)))}
    assert found.keys() - {"machine.open-files", "machine.file-size"} == {"machine.memory", "machine.cores"}
    assert found["machine.memory"].where == memory_file
    assert cpu_file in found["machine.cores"].why


def test_version_2(tmp_path: Path) -> None:
    check(write(tmp_path, VERSION_2), "/sys/fs/cgroup/job/memory.max", "/sys/fs/cgroup/job/step/cpu.max")


def test_version_1(tmp_path: Path) -> None:
    check(
        write(tmp_path, VERSION_1),
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes",
        "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us",
    )


def test_devices_that_torch_can_not_use(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (write(tmp_path, {}) / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    machine = look_at_machine(tmp_path)
    assert machine.gpu_files == 2
    if machine.gpus == 0:
        found = findings_of(replace(HEALTHY, ranks=1, machine=machine))
        assert "machine.gpus-unseen" in {f.rule for f in found}
