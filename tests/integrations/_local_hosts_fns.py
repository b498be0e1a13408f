"""What ranks run in test_local_hosts.py: Accelerate and the Trainer on hosts with disks of their own. ``places[rank]``: the rank's host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.harness.logged import warnings_logged
from tests.integrations._accelerate_fns import launched
from tests.integrations._failing_saves_fns import _Script


def root(hosts: str, places: Sequence[int]) -> str:
    return os.path.join(hosts, f"host-{places[dist.get_rank()]}", "run")


def error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "", ""


def leads(places: Sequence[int]) -> bool:
    """Whether this rank is the first of its host."""
    return places.index(places[dist.get_rank()]) == dist.get_rank()


# -------------------------------------------------------------------------------------------- Accelerate


def accelerate(hosts: str, places: Sequence[int], automatic: bool) -> dict[str, Any]:
    """Five steps, with saves of the first three; the next life goes on from step 3. Then one host loses its newest folder."""
    at, found = root(hosts, places), dict[str, Any](losses=[], paths=[])
    with launched():
        script = _Script(at, automatic=automatic, local=True)
        for step in range(1, 6):
            found["losses"].append(script.train())
            if step <= 3:
                found["paths"].append(script.save().path)
        found["taken"] = error_of(
            lambda: script.accelerator.save_state(f"{at}/step-3") if not automatic else None
        )
    with launched():
        script = _Script(at, automatic=automatic, local=True)
        report = script.resume()
        found["resumed"] = report.step, report.path, report.exact
        found["after"] = [script.train(), script.train()]
    dist.barrier()
    if leads(places) and places[dist.get_rank()] == max(places):
        shutil.rmtree(found["paths"][-1])
    dist.barrier()
    with launched(), warnings_logged() as warned:
        script = _Script(at, automatic=automatic, local=True)
        report = script.resume()
        found["torn"] = report.step, report.path
        found["again"] = [script.train()]
        found["saved again"] = script.save().path
        found["warned"] = [text for text in warned if "lacks its part" in text or "killed" in text]
        found["digest"] = str(sw.digest(script.model))
        script = _Script(at, automatic=automatic, local=True)
        found["newest"] = script.resume().step
    return found


def accelerate_elsewhere(hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """The newest folder on other ranks and hosts; then with a host away; then what is refused."""
    at, found = root(hosts, places), dict[str, Any]()
    with launched():
        script = _Script(at, local=True)
        report = script.resume()
        found["resumed"] = report.step, str(sw.digest(script.model))
        found["left"] = [n for n in os.listdir(at) if n.startswith(".tmp")]
        alone = [0] * len(places)
        found["away"] = error_of(lambda: _Script(root(hosts, alone), local=True).resume())
        found["fallback"] = error_of(lambda: _Script(at, local=True, fallback=f"{at}-else"))
        found["url"] = error_of(lambda: script.accelerator.save_state("s3://bucket/a"))
        found["nothing"] = error_of(lambda: script.accelerator.load_state(f"{at}/no-such"))
        found["none below"] = script.accelerator.newest_checkpoint(f"{at}-none")
    return found
