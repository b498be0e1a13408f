"""What goes wrong between a trainer and an engine is named, and leaves the engine with the version that it had."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, FormatError, IntegrityError, PlanError, StateError
from shardwise.handover import sender as handover
from shardwise.handover.changes import apply, encoded
from shardwise.handover.layout import Snapshot
from shardwise.handover.links import PIECE_BYTES, Address, Asker, _in_pieces


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))


def _mapping(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(t) for n, t in model.state_dict().items()}


@pytest.fixture
def sender() -> Iterator[sw.handover.WeightSender]:
    with sw.handover.WeightSender(_model()) as found:
        yield found


def test_one_process_needs_no_group(sender: sw.handover.WeightSender) -> None:
    model = _model()
    engine = _mapping(model)
    receiver = sw.handover.WeightReceiver(engine, sender.url)
    assert receiver.pull() is None
    assert sender.publish(5).version == 5
    report = receiver.pull()
    assert report is not None
    assert (report.version, receiver.version) == (5, 5)
    assert "memory: on the same host" in str(report)
    for name, tensor in model.state_dict().items():
        assert torch.equal(engine[name], tensor), name


def test_versions_increase(sender: sw.handover.WeightSender) -> None:
    sender.publish(3)
    for version in (3, 2):
        with pytest.raises(ValueError, match="versions must increase, and 3 was published"):
            sender.publish(version)


def test_a_changed_engine_is_found_and_healed(sender: sw.handover.WeightSender) -> None:
    model = _model()
    engine = _mapping(model)
    receiver = sw.handover.WeightReceiver(engine, sender.url, carry="tcp")
    sender.publish(1)
    receiver.pull()
    receiver.verify()
    engine["0.weight"][3, 4] += 1
    with pytest.raises(IntegrityError, match=r"'0\.weight' was changed since version 1 was switched on"):
        receiver.verify()
    sender.publish(2)
    report = receiver.pull()
    assert report is not None
    assert report.changed == 0, "all of it comes whole"
    receiver.verify()
    assert torch.equal(engine["0.weight"], model.state_dict()["0.weight"])


def test_a_sender_that_left_is_named(sender: sw.handover.WeightSender) -> None:
    sender.publish(1)
    receiver = sw.handover.WeightReceiver(engine := _mapping(_model()), sender.url)
    receiver.pull()
    held = {n: t.clone() for n, t in engine.items()}
    sender.close()
    with pytest.raises(CheckpointError, match=r"no new version: host 127.0.0.1 \(rank 0 of the sender\)"):
        receiver.pull(wait_s=0.2)
    assert receiver.version == 1
    assert all(torch.equal(t, held[n]) for n, t in engine.items())


def test_a_wrong_secret_gets_nothing(sender: sw.handover.WeightSender) -> None:
    sender.publish(1)
    url = re.sub(r"/\w+$", "/" + "0" * 32, sender.url)
    with pytest.raises(CheckpointError, match="no new version"):
        sw.handover.WeightReceiver(_mapping(_model()), url).pull()


def test_a_url_is_parsed_without_telling_the_secret() -> None:
    address = Address("::1", 80, "word")
    assert Address.parse(str(address)) == address
    for url in (
        "http://host:80/hush",
        "shardwise://host/hush",
        "shardwise://host:80",
        "shardwise://host:x/hush",
    ):
        with pytest.raises(ValueError, match="expected a sender's url") as caught:
            Address.parse(url)
        assert "hush" not in str(caught.value)


def test_a_trainer_that_was_replaced_is_planned_for_again() -> None:
    """The new one holds other tensors in another order, and publishes the same version."""

    def model(order: tuple[str, ...], value: float) -> nn.Module:
        found = nn.Module()
        for k, name in enumerate(order):
            found.register_parameter(name, nn.Parameter(torch.full((40,), float(value + k))))
        return found

    engine = {"a": torch.zeros(40), "b": torch.zeros(40)}
    with sw.handover.WeightSender(model(("a", "b"), 1)) as first:
        url = first.url
        first.publish(5)
        receiver = sw.handover.WeightReceiver(engine, url, carry="tcp")
        receiver.pull()
        plan = receiver._plan
        assert plan is not None
    with sw.handover.WeightSender(model(("b", "a"), 7), url=url) as second:
        second.publish(5)
        assert receiver._take_all(plan, 5, [])[0] == "gone", "between two questions of one pull"
        assert receiver.pull() is not None, "the version has the same number, and is another one"
        receiver.verify()
    assert (engine["a"][0], engine["b"][0]) == (8, 7)


def test_a_model_that_was_changed_is_noticed_on_both_sides() -> None:
    trainer, engine = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3)
    with sw.handover.WeightSender(trainer) as sender:
        receiver = sw.handover.WeightReceiver(engine, sender.url, carry="tcp")
        sender.publish(1)
        receiver.pull()
        engine.to(memory_format=torch.channels_last)
        sender.publish(2)
        receiver.pull()
        assert torch.equal(engine.weight, trainer.weight)
        engine.load_state_dict({n: torch.zeros_like(t) for n, t in engine.state_dict().items()}, assign=True)
        with pytest.raises(IntegrityError, match="was changed since version 2"):
            receiver.verify()
        sender.publish(3)
        receiver.pull()
        receiver.verify()
        assert torch.equal(engine.weight, trainer.weight)
        trainer.to(memory_format=torch.channels_last)
        with pytest.raises(StateError, match="'weight' has another shape, dtype or layout"):
            sender.publish(4)
        assert receiver.pull() is None


def test_tensors_on_meta_in_a_mapping_are_refused(sender: sw.handover.WeightSender) -> None:
    with pytest.raises(ValueError, match="1 tensors of the mapping are on meta"):
        sw.handover.WeightReceiver({"0.weight": torch.empty(30, 40, device="meta")}, sender.url)


def test_a_cast_is_verified_too(sender: sw.handover.WeightSender) -> None:
    sender.publish(1)
    engine = {n: t.to(torch.float64) if t.is_floating_point() else t for n, t in _mapping(_model()).items()}
    receiver = sw.handover.WeightReceiver(engine, sender.url)
    with pytest.raises(StateError, match="no version is on"):
        receiver.verify()
    receiver.pull()
    receiver.verify()
    engine["0.weight"] += 1
    with pytest.raises(IntegrityError, match="was changed since version 1"):
        receiver.verify()


def test_a_version_that_is_overwritten_on_its_way_is_not_damage() -> None:
    """A link that ends before the last piece: never the right number of wrong bytes."""

    def payload() -> Iterator[memoryview]:
        yield memoryview(bytes(PIECE_BYTES))
        raise ConnectionError("the version was overwritten")

    with pytest.raises(ConnectionError):
        assert list(_in_pieces(payload())) == []
    sizes = [len(piece) for piece in _in_pieces([memoryview(bytes(PIECE_BYTES + 5)), memoryview(b"abc")])]
    assert sizes == [PIECE_BYTES, 8]


def test_versions_that_are_overwritten_too_fast_are_an_error(sender: sw.handover.WeightSender) -> None:
    sender.publish(1)
    receiver = sw.handover.WeightReceiver(_mapping(_model()), sender.url, carry="tcp")
    for slot in sender._slots:
        slot.version = None  # as while they are written
    with pytest.raises(CheckpointError, match="overwritten faster than they are pulled"):
        receiver.pull()


def test_a_closed_sender_has_given_its_memory_back() -> None:
    before = _shared_kib()
    sender = sw.handover.WeightSender(nn.Linear(2000, 2000))
    sender.publish(1)
    assert _shared_kib() - before > 15_000
    sender.close()
    sender.close()
    assert _shared_kib() - before < 1_000
    with pytest.raises(StateError, match="was closed"):
        sender.publish(2)
    taken = socket.create_server(("127.0.0.1", 0))
    before_fds = len(os.listdir("/proc/self/fd"))
    with taken, pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "_PATIENCE_S", 0.3)
        url = f"shardwise://127.0.0.1:{taken.getsockname()[1]}/word"
        with pytest.raises(CheckpointError, match="can't listen"):
            sw.handover.WeightSender(nn.Linear(4, 4), url=url)
        assert len(os.listdir("/proc/self/fd")) == before_fds


def _shared_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssShmem:\s+(\d+)", status)[1])  # type: ignore[index]


def test_tensors_that_do_not_fit_are_listed(sender: sw.handover.WeightSender) -> None:
    sender.publish(1)
    engine = _mapping(_model())
    del engine["0.bias"]
    engine["extra"] = torch.zeros(3)
    engine["0.weight"] = torch.zeros(30, 41)
    with pytest.raises(PlanError) as caught:
        sw.handover.WeightReceiver(engine, sender.url).pull()
    text = str(caught.value)
    assert "extra" in text
    assert "0.bias" in text
    assert "[30, 41]" in text
    engine = _mapping(_model())
    del engine["0.bias"]
    assert sw.handover.WeightReceiver(engine, sender.url, allow_unused=["0.bias"]).pull() is not None


def test_weights_on_meta_are_not_published() -> None:
    with sw.meta_init():
        model = _model()
    with sw.handover.WeightSender(model) as sender, pytest.raises(StateError, match="is on meta"):
        sender.publish(1)


def test_unknown_requests_and_reads_outside_are_refused(sender: sw.handover.WeightSender) -> None:
    sender.publish(1)
    asker = Asker(0, Address.parse(sender.url), 5.0)
    for question in (
        {},
        {"ask": "shell"},
        {"ask": "take", "plan": "none"},
        {"ask": "register", "plan": "a", "reads": [["F32", 1 << 40, []]]},
        {"ask": "register", "plan": "a", "reads": [["F32", 0, [[1 << 40, 1]]]]},
        {"ask": "register", "plan": "a", "reads": [["F32", 0, [[1 << 40, 0]]]]},
        {"ask": "register", "plan": "a", "reads": [["F32", 2, []]]},
        {"ask": "register", "plan": "a", "reads": [["F32", 0, [[4, -1]]]]},
        {"ask": "register", "plan": "a", "reads": 7},
    ):
        if question.get("plan") == "none":
            more = {"run": sender._run, "reads": [0, 1], "version": 1, "have": None}
            assert asker.ask(question | more)[0] == {"unknown": True}
            assert asker.ask(question | more | {"run": "other"})[0] == {"gone": True}
            continue
        with pytest.raises(CheckpointError, match="Error"):
            asker.ask(question | {"run": sender._run} if question else question)
    asker.close()


def test_a_snapshot_is_never_read_outside() -> None:
    snapshot = Snapshot(torch.arange(64, dtype=torch.uint8))
    assert snapshot.strided("U8", 60, [(4, 1)]).tolist() == [60, 61, 62, 63]
    assert snapshot.strided("U8", 63, []).item() == 63
    for offset, loops in ((61, [(4, 1)]), (64, []), (-1, []), (0, [(3, 40)]), (0, [(100, 0)]), (0, [(0, 1)])):
        with pytest.raises(FormatError, match="leaves the snapshot"):
            snapshot.strided("U8", offset, loops)


@pytest.mark.parametrize("seed", range(6))
def test_changes_that_nobody_wrote_are_refused_or_harmless(seed: int) -> None:
    """Every truncation, and bytes changed at random: the later version, or an error; never an index outside."""
    import numpy as np

    generator = np.random.default_rng(seed)
    before = generator.integers(0, 65535, 3000, dtype=np.uint16)
    after = before.copy()
    after[generator.random(3000) < 0.05] += 1
    good = encoded(before, after, 10**9)
    assert good is not None
    found = before.copy()
    apply(memoryview(good), found)
    assert (found == after).all()
    for _ in range(300):
        bad = bytearray(good)
        if generator.random() < 0.5:
            bad = bad[: int(generator.integers(0, len(bad)))]
        for _ in range(int(generator.integers(0, 3))):
            if bad:
                bad[int(generator.integers(0, len(bad)))] = int(generator.integers(0, 256))
        try:
            apply(memoryview(bytes(bad)), before.copy())
        except FormatError:
            continue
