"""What must never happen silently around saving and resuming, on one process."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import shardwise as sw
from shardwise.engine.files import FileReader
from shardwise.errors import CheckpointError, LockedError, NoCheckpointError, StateError, VersionError
from tests.harness.open_files import open_below


def net(*, seed: int = 0, sizes: tuple[int, ...] = (4, 3, 2)) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(kind: type[torch.optim.Optimizer] = torch.optim.Adam, **extra: Any) -> sw.TrainState:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    step(model, optimizer)
    return sw.TrainState(model=model, optimizer=optimizer, extra=extra)


def test_another_optimizer_class_is_refused(tmp_path: Path) -> None:
    sw.save(run(torch.optim.Adam), tmp_path / "c")
    for other in (torch.optim.AdamW, torch.optim.SGD):
        with pytest.raises(StateError, match=f"Adam, but the optimizer is {other.__name__}"):
            sw.restore(run(other), tmp_path / "c")


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    def state(*, swapped: bool) -> sw.TrainState:
        model = net()
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[1].parameters(), "lr": 0.001},
        ]
        optimizer = torch.optim.SGD(groups[::-1] if swapped else groups)
        return sw.TrainState(model=model, optimizer=optimizer)

    sw.save(state(swapped=False), tmp_path / "c")
    sw.restore(state(swapped=False), tmp_path / "c")
    with pytest.raises(StateError, match="the same in another order"):
        sw.restore(state(swapped=True), tmp_path / "c")


def test_state_that_a_resume_skips_is_reported_and_not_exact(tmp_path: Path) -> None:
    sw.save(run(old=1), tmp_path / "c")
    full = sw.restore(run(old=0), tmp_path / "c")
    assert full.exact
    assert full.skipped == ()
    one = sw.restore(run(), tmp_path / "c")
    assert one.skipped
    assert (one.differences, one.caveats) == ((), ())
    assert not one.exact
    part = sw.restore(sw.TrainState(model=net(), extra={"new": 3}), tmp_path / "c")
    assert not part.exact
    assert {line.split(":")[0] for line in part.skipped} == {"optimizer", "extra.old", "extra.new"}


class Counting(nn.Linear):
    """A module with state beside its tensors."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    model, other = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    model[0].count = 7
    sw.save(sw.TrainState(model=model), tmp_path / "c")
    report = sw.restore(sw.TrainState(model=other), tmp_path / "c")
    assert other[0].count == 7
    assert "modules" in report.documents


def test_optimizer_state_without_a_parameter_is_refused(tmp_path: Path) -> None:
    state = run()
    state.optimizer.state["global"] = {"best": 1}  # type: ignore[union-attr, index]
    with pytest.raises(StateError, match="not its parameters"):
        sw.save(state, tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_an_extra_that_can_only_be_saved_is_refused(tmp_path: Path) -> None:
    class Half:
        def state_dict(self) -> dict[str, int]:
            return {"x": 1}

    with pytest.raises(StateError, match=r"extra\.half .* no state_dict and load_state_dict"):
        sw.save(run(half=Half()), tmp_path / "c")


@pytest.mark.parametrize("bad", [-1, 2.0, "3"])
def test_steps_are_counts(tmp_path: Path, bad: Any) -> None:
    with pytest.raises((StateError, TypeError)):
        sw.save(run(), tmp_path / "c", step=bad)
    assert os.listdir(tmp_path) == []


def test_tied_modules_in_another_order(tmp_path: Path) -> None:
    def tied(first: str, second: str) -> nn.Module:
        model = nn.Module()
        shared = nn.Linear(3, 3)
        setattr(model, first, shared)
        setattr(model, second, shared)
        return model

    def optimized(model: nn.Module) -> sw.TrainState:
        optimizer = torch.optim.Adam(model.parameters())
        model.a(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return sw.TrainState(model=model, optimizer=optimizer)

    saved, live = optimized(tied("a", "b")), optimized(tied("b", "a"))
    sw.save(saved, tmp_path / "c")
    sw.restore(live, tmp_path / "c")
    assert torch.equal(live.model.a.weight, saved.model.a.weight)  # type: ignore[union-attr, arg-type]
    for mine, theirs in zip(live.model.parameters(), saved.model.parameters(), strict=True):
        state, expected = live.optimizer.state[mine], saved.optimizer.state[theirs]  # type: ignore[union-attr]
        assert torch.equal(state["exp_avg"], expected["exp_avg"])


def test_a_later_format_version_is_not_damage(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path) as checkpoints:
        for number in (1, 2):
            checkpoints.save(run(), number)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    document = {k: v for k, v in json.loads(manifest.read_text()).items() if k != "xxh3"} | {"version": 3}
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    manifest.write_text(json.dumps(document | {"xxh3": xxhash.xxh3_64_hexdigest(text.encode())}))
    with sw.Checkpointer(tmp_path) as checkpoints, pytest.raises(VersionError, match="update shardwise"):
        checkpoints.resume(run())
    assert (tmp_path / "step-00000002").is_dir()


def test_an_explicit_step_is_the_only_candidate(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path) as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(run(), number)
    (tmp_path / "step-00000002" / "state.json").write_text("{}")
    with (
        sw.Checkpointer(tmp_path) as checkpoints,
        pytest.raises(NoCheckpointError, match="step 2 is not valid"),
    ):
        checkpoints.resume(run(), step=2)
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith("step-")) == [
        f"step-0000000{k}" for k in (1, 2, 3)
    ]


def test_runs_do_not_mix_in_one_directory(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(run(), 10)
        with pytest.raises(CheckpointError, match="step 5 is not newer than the published step 10"):
            checkpoints.save(run(), 5)
    with sw.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="did not resume from"):
            checkpoints.save(run(), 20)
        checkpoints.resume(run())
        checkpoints.save(run(), 20)
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoints.save(run(), 30)


def test_one_holder_in_a_process(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path), pytest.raises(LockedError, match="in this process already holds it"):
        sw.Checkpointer(tmp_path)
    sw.Checkpointer(tmp_path).close()


def test_a_directory_with_another_steps_name_is_not_resumed(tmp_path: Path) -> None:
    sw.save(run(), tmp_path / "saved")  # step=0, by default
    (tmp_path / "saved").rename(tmp_path / "step-00000100")
    with sw.Checkpointer(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="contains step 0"):
        checkpoints.resume(run())


def test_reading_many_files_keeps_few_open(tmp_path: Path) -> None:
    paths = [tmp_path / str(k) for k in range(300)]
    for k, path in enumerate(paths):
        path.write_bytes(k.to_bytes(2, "little"))
    with FileReader() as reader:
        for _ in range(2):
            for k, path in enumerate(paths):
                found = bytearray(2)
                reader.read_into(str(path), 0, memoryview(found))
                assert int.from_bytes(found, "little") == k
        assert 0 < len(open_below(tmp_path)) <= 65
    assert open_below(tmp_path) == []
