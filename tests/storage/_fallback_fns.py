"""What the ranks of test_fallback.py run: runs whose own directory takes no step, with a store as the fall-back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.harness.errors import error_of
from tests.harness.object_store import use_store
from tests.harness.small_files import small_files


def _state() -> sw.TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 400), nn.Linear(400, 16))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


def _train(state: sw.TrainState, step: int) -> str:
    loss = state.model(torch.full((4, 16), float(step))).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(loss.detach()).hex()


def own_loop(endpoint: str, root: str, fallback: str, mode: Any) -> dict[str, Any]:
    """Steps 3 and 4 of 6 fail in the directory, on rank 1. A life that ends at 4, and the next one."""
    use_store(endpoint)
    found: dict[str, Any] = {"failures": [], "losses": [], "paths": []}
    failures = sw.FailurePolicy(fallback=fallback)
    options: dict[str, Any] = {"mode": mode, "failures": failures, "keep_last": 2}
    state = _state()
    with sw.Checkpointer(root, **options) as checkpoints:
        for step in range(1, 7):
            found["losses"].append(_train(state, step))
            if step > 4:
                continue
            with small_files(1, when=step in (3, 4)):
                report = checkpoints.save(state, step)
                checkpoints._settle()  # of an async save, while the files are small
            found["failures"].append(report.failure)
            found["paths"].append(report.path)
        found["failed"] = checkpoints._failures.total
    state = _state()
    with sw.Checkpointer(root, **options) as checkpoints:
        resumed = checkpoints.resume(state)
        assert resumed is not None
        found["resumed"] = resumed.step, resumed.path, resumed.exact
        found["after"] = [_train(state, step) for step in range(resumed.step + 1, 7)]
        checkpoints.save(state, 6)
    return found


def accelerate(endpoint: str, root: str, fallback: str, automatic: bool) -> dict[str, Any]:
    """Steps 3 and 4 of 6 fail in the directory, on rank 1."""
    from tests.integrations import _failing_saves_fns as failing
    from tests.integrations._accelerate_fns import launched

    use_store(endpoint)
    found: dict[str, Any] = {"paths": [], "losses": []}
    options: dict[str, Any] = {"automatic": automatic, "failures": sw.FailurePolicy(fallback=fallback)}
    with launched():
        script = failing._Script(root, **options)
        for step in range(1, 7):
            found["losses"].append(script.train())
            if step > 4:
                continue
            with small_files(1, when=step > 2):
                report = script.save()
            assert report.failure is None, report.failure
            found["paths"].append(report.path)
    with launched():
        script = failing._Script(root, **options)
        report = script.resume()
        found["resumed"] = report.step, report.path
        found["after"] = [script.train(), script.train()]
        found["next"] = script.save().path
    return found


def trainer(endpoint: str, hub: str, root: str, fallback: str) -> dict[str, Any]:
    """Steps 8 and 10 of 12 fail in the directory, on rank 1; the life ends at 10."""
    from tests.integrations import _failing_saves_fns as failing

    use_store(endpoint)
    found = {"whole": failing.trainer_life(hub, f"{root}/whole", set())}
    at_once = sw.FailurePolicy(max_failures=1, fallback=fallback)
    found["first"] = failing.trainer_life(hub, f"{root}/run", {8, 10}, stop=10, failures=at_once)
    found["again"] = failing.trainer_life(hub, f"{root}/run", set(), resume=True, failures=at_once)
    return found


def _of_accelerate(root: str, fallback: str) -> tuple[str, str]:
    from tests.integrations import _failing_saves_fns as failing
    from tests.integrations._accelerate_fns import launched

    with launched():
        return error_of(lambda: failing._Script(root, failures=sw.FailurePolicy(fallback=fallback)))


def refused(endpoint: str, root: str, fallback: str) -> dict[str, Any]:
    """How each way to make a run fails, with a fall-back that can take no step."""
    use_store(endpoint, retry_config={"max_retries": 1})
    found = {"own": error_of(lambda: sw.Checkpointer(root, failures=sw.FailurePolicy(fallback=fallback)))}
    found["accelerate"] = _of_accelerate(root, fallback)
    return found


def without_conditions(endpoint: str, root: str, fallback: str) -> dict[str, Any]:
    """How the first save of an own loop fails, and Accelerate's constructor."""
    use_store(endpoint)

    def first_save() -> None:
        with sw.Checkpointer(root, failures=sw.FailurePolicy(fallback=fallback)) as checkpoints:
            checkpoints.save(_state(), 1)

    found = {"own": error_of(first_save)}
    found["accelerate"] = _of_accelerate(root, fallback)
    return found
