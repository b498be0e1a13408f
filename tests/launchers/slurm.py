"""SLURM: ``sbatch examples/slurm.sbatch`` on two nodes, stopped in each way that SLURM has."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.harness.slurm import Cluster, NotInstalled, cluster, slurm_version

from .curves import Curve, curve_of, until_step
from .rows import NotHere, Row

__all__ = ["CASES", "NAME", "SHORT", "run", "run_case", "running", "version", "whole"]

NAME = "SLURM"
STEPS, STEP_SECONDS = 60, 0.05


def version() -> str:
    """Raises :class:`NotHere`."""
    try:
        return slurm_version()
    except NotInstalled as error:
        raise NotHere(str(error)) from error


@contextmanager
def running() -> Iterator[Cluster]:
    """A cluster in a folder with a short name: munge's socket needs one."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with cluster(folder) as found:
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def submit(slurm: Cluster, out: Path, *options: str, step_seconds: float = STEP_SECONDS) -> str:
    """The example's job, with options that override its own."""
    program = ["--out", str(out), "--steps", str(STEPS), "--step-seconds", str(step_seconds)]
    log = f"--output={out.parent / out.name}.log"
    return slurm.submit("--time=10", log, *options, "examples/slurm.sbatch", *program)


def whole(slurm: Cluster, out: Path) -> Curve:
    """The curve of a job that nothing stops."""
    slurm.wait(submit(slurm, out), "COMPLETED")
    return curve_of(out / "losses.jsonl")


def _at_step(slurm: Cluster, out: Path, step: int) -> None:
    log = out.parent / f"{out.name}.log"
    until_step(
        out / "losses.jsonl",
        step,
        of_life=0,
        timeout_s=90,
        said=lambda: (log.read_text() if log.exists() else "") + slurm.said(),
    )


def _higher(slurm: Cluster) -> str:
    """A job of another partition that needs both nodes for a second."""
    return slurm.submit(
        "-p", "high", "-N2", "--ntasks-per-node=1", "--output=/dev/null", "--wrap", "srun sleep 1"
    )


def _preempted(slurm: Cluster, out: Path, *, partition: str) -> str:
    job = submit(slurm, out, "-p", partition)
    _at_step(slurm, out, 7)
    _higher(slurm)
    slurm.until_requeued(job)
    return job


def _requeued(slurm: Cluster, out: Path) -> str:
    job = submit(slurm, out)
    _at_step(slurm, out, 7)
    slurm.run("scontrol", "requeue", job)
    slurm.until_requeued(job)
    return job


def _time_limit(slurm: Cluster, out: Path) -> str:
    """SLURM looks at limits twice a minute and sends the signal up to half a minute early, here 25 to 55 s after the start."""
    job = submit(slurm, out, "--time=1", "--signal=USR1@5", step_seconds=0.7)
    slurm.until_requeued(job)
    return job


def _before_it_listens(slurm: Cluster, out: Path) -> str:
    """Preempted while Python imports torch: no handler is there yet."""
    job = submit(slurm, out, "-p", "grace")
    slurm.wait(job, "RUNNING")
    _higher(slurm)
    slurm.until_requeued(job)
    return job


def _node_down(slurm: Cluster, out: Path) -> str:
    """A node that is taken out of service: SLURM kills and requeues."""
    job = submit(slurm, out)
    _at_step(slurm, out, 27)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    slurm.until_requeued(job)
    return job


#: What happens to the job. Each returns its number once it is requeued.
CASES: dict[str, Callable[[Cluster, Path], str]] = {
    "`--signal` before the time limit": _time_limit,
    "preempted by a higher partition, GraceTime 60": partial(_preempted, partition="grace"),
    "preempted by a higher partition, no GraceTime": partial(_preempted, partition="low"),
    "preempted while it imports torch": _before_it_listens,
    "`scontrol requeue`": _requeued,
    "a node goes down": _node_down,
}


#: The one that CI runs.
SHORT = "preempted by a higher partition, GraceTime 60"


def run_case(slurm: Cluster, name: str, out: Path, expected: Curve) -> Row:
    """One way to be stopped: the job goes on to its end, with the losses of one that was not stopped."""
    job = CASES[name](slurm, out)
    end = slurm.wait(job, "COMPLETED", "FAILED", timeout_s=300)
    found = curve_of(out / "losses.jsonl")
    bitwise = found.repeated_alike and found.losses == expected.losses
    figure = f"steps by life: {found.words}; {end['Restarts']} restarts, then {end['JobState'].lower()}; {len(found.losses)} losses bitwise: {bitwise}"
    return Row(name, figure, bitwise and end["JobState"] == "COMPLETED" and int(end["Restarts"]) >= 1)


def run(out: Path) -> list[Row]:
    """Every case, one after another, on one cluster."""
    version()
    rows = []
    with running() as slurm:
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=out.resolve()))
        expected = whole(slurm, folder / "whole")
        rows.append(
            Row("two nodes, not stopped", f"{len(expected.losses)} steps", len(expected.losses) == STEPS)
        )
        for number, name in enumerate(CASES):
            try:
                rows.append(run_case(slurm, name, folder / f"case-{number}", expected))
            except (RuntimeError, TimeoutError) as error:
                rows.append(Row(name, str(error).splitlines()[0][:300], False))
                (out / f"case-{number}.error").write_text(str(error))
    return rows
