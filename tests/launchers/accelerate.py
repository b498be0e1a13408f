"""`accelerate launch --num_machines 2` on two hosts, by examples/accelerate_fsdp.py: stopped, and gone on with."""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version as installed
from pathlib import Path

from tests.harness.process import ROOT
from tests.hosts.hosts import SHARED, Hosts, why_not
from tests.launchers.rows import NotHere, Row

__all__ = ["NAME", "run", "version"]

NAME = "Accelerate"


def version() -> str:
    if why := why_not():
        raise NotHere(why)
    return installed("accelerate")


def _launch(hosts: Hosts, out: str, steps: int, port: int) -> list[dict[str, float]]:
    """One launch on both hosts; its losses."""
    logs = [hosts.folder / f"{out}-{host.name}.log" for host in hosts.hosts]
    processes = [
        host.start(
            *(host.python, "-m", "accelerate.commands.launch"),
            *("--config_file", str(ROOT / "examples/accelerate_fsdp.yaml"), "--dynamo_backend", "eager"),
            *("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(host.number)),
            *("--main_process_ip", hosts[0].address, "--main_process_port", str(port)),
            str(ROOT / "tests/harness/accelerate_on_cpu.py"),
            *(str(ROOT / "examples/accelerate_fsdp.py"), "--out", str(SHARED / out), "--steps", str(steps)),
            log=log,
        )
        for host, log in zip(hosts.hosts, logs, strict=True)
    ]
    codes = [process.wait(240) for process in processes]
    assert codes == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    return [json.loads(line) for line in (hosts.shared / out / "losses.jsonl").read_text().splitlines()]


def run(out: Path) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as hosts:
        whole = _launch(hosts, "whole", 7, 29601)
        first = _launch(hosts, "stopped", 5, 29602)
        again = _launch(hosts, "stopped", 7, 29603)
    (out / "accelerate.json").write_text(json.dumps({"whole": whole, "stopped": again}))
    same = first == whole[:5] and again == whole and len(whole) == 7
    figure = (
        f"{len(first)} steps, then {len(again) - len(first)} after the restart; bitwise as without it: {same}"
    )
    return [Row("two machines (--num_machines 2 --machine_rank …), stopped and resumed", figure, same)]
