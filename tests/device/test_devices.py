"""State on a device that is not the CPU: saved and resumed where the process has other devices, or none."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from tests.device import _alike_fns as alike
from tests.device import _fns as fns
from tests.device import _save_fns as saves
from tests.device import schedules
from tests.harness import models
from tests.harness.launch import Launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("simgpu")]
MIB = 1024**2
Parts = list[dict[str, tuple[str, Any]]]


def results(world_size: int, fn: Any, *args: Any) -> list[Any]:
    with Launch(world_size, fn, *args) as job:
        assert job.wait(300) == [0] * world_size
        return [job.result(rank) for rank in range(world_size)]


def of(parts: Parts, name: str) -> list[Any]:
    """What a part gave on each rank; fails with its traceback if it raised."""
    failed = [f"rank {r}:\n{p[name][1]}" for r, p in enumerate(parts) if p[name][0] != "ok"]
    assert not failed, "\n".join(failed)
    return [found[name][1] for found in parts]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("gpt2")
    models.write_hub_directory("gpt2", directory, torch.float32)
    return str(directory)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("sources")
    alike.write_sources(directory)
    return str(directory)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def two(simgpu: None, source: str, root: str, sources: str) -> Parts:
    """Both ranks see both devices."""
    return results(2, fns.on_two_visible, source, root, sources)


@pytest.fixture(scope="module")
def others(two: Parts, source: str, root: str) -> Parts:
    """Rank 0 sees four devices, rank 1 one."""
    return results(2, fns.on_others_visible, source, root)


@pytest.fixture(scope="module")
def none(two: Parts, source: str, root: str, sources: str) -> Parts:
    """Both ranks on the CPU."""
    return results(2, fns.on_none, source, root, sources)


def assert_same_steps(found: Any, expected: Any) -> None:
    assert found[0] == expected[0], "losses"
    assert found[1].keys() == expected[1].keys()
    differing = [name for name, t in expected[1].items() if not torch.equal(found[1][name], t)]
    assert not differing
    assert found[2] == expected[2], "draws"


@pytest.fixture(scope="module")
def shown(simgpu: None) -> dict[str, Any]:
    """What one process finds out about the device."""
    (found,) = results(1, fns.what_the_device_shows)
    return found


def test_the_device_is_none_that_a_cpu_could_be(shown: dict[str, Any]) -> None:
    found = shown
    assert found["unused"], "asking for the generators initializes no device"
    assert found["reused"] == 2, "a host buffer that was used again too early shows"
    assert (found["early"], found["late"]) == (0, 2), "a copy to the host that nothing waited for shows"
    assert found["peek"] == -signal.SIGSEGV
    unfinished, finished = found["streams"]
    assert finished == 4
    assert unfinished != 4, "a kernel that nothing waited for shows on another stream"
    assert "same device" in found["add"]
    assert "No backend type associated with device type cpu" in found["sum"]
    assert found["product"] == [[5, 14], [14, 50]]


def test_the_ring_of_a_load_has_no_races(shown: dict[str, Any]) -> None:
    """100,000 schedules: ``python -m tests.device.schedules``."""
    assert shown["races"] == ("ok", [])


def test_a_load_takes_as_long_as_the_slower_of_reads_and_copies(shown: dict[str, Any]) -> None:
    """In simulated time, so that it is the same on every machine."""
    status, found = shown["ratios"]
    assert status == "ok", found
    assert len(found) == 9
    assert all(1 <= ratio <= 1.02 for ratio in found.values()), found


@pytest.mark.parametrize("name", schedules.MUTANTS)
def test_schedules_find_errors_in_the_ring(shown: dict[str, Any], name: str) -> None:
    status, found = shown["mutants"][name]
    assert (status, len(found)) == ("ok", 1), found


def test_resume_where_other_devices_are_visible(two: Parts, others: Parts) -> None:
    for uninterrupted, (report, resumed) in zip(of(two, "begin"), of(others, "now"), strict=True):
        assert_same_steps(resumed, uninterrupted)
        assert report["exact"], report["differences"]
        assert report["rng"] == "restored per rank"


def test_checkpoints_with_the_generators_of_all_devices(two: Parts, others: Parts) -> None:
    for uninterrupted, (report, resumed) in zip(of(two, "begin"), of(two, "as before"), strict=True):
        assert_same_steps(resumed, uninterrupted)
        assert report["exact"], report["differences"]
    for rank, (report, _) in enumerate(of(others, "before")):
        now = 4 if rank == 0 else 1
        (line,) = report["differences"]
        assert line == f"RNG state: saved for all 2 simgpu devices on a host, but {now} are visible now"
        assert f"of the simgpu device: RNG states derived with blake2b from (seed {100}" in report["rng"]
        assert f"step 2, rank {rank})" in report["rng"]
        assert not report["exact"]


def test_resume_on_the_cpu(two: Parts, none: Parts) -> None:
    for rank, (report, resumed) in enumerate(of(none, "now")):
        expected = of(two, "begin")[rank]
        assert not report["exact"]
        lost = "RNG state: saved on a simgpu device, but this process has no accelerator"
        assert lost in report["differences"]
        assert any(
            line.startswith("device: simulated accelerator when saved, ") for line in report["differences"]
        )
        assert report["rng"] == "restored per rank, on the host"
        assert len(resumed[0]) == len(expected[0])


def test_equal_state_on_each_ranks_device_is_shared(two: Parts) -> None:
    assert of(two, "extra") == [["rng"]] * 2


def test_hyper_parameters_on_the_device(two: Parts) -> None:
    assert of(two, "small") == [["extra.own", "rng"]] * 2


def test_tensors_of_documents_come_back_to_the_device(two: Parts) -> None:
    for rank, found in enumerate(of(two, "restored extra")):
        own, moved = f"simgpu:{rank}", ("extra.host: a tensor on cpu when saved, on simgpu now",)
        assert found == [(own, [1, 2, 3, 4], own, moved), (own, [1, 2, 3, 4], "cpu", ())]


def test_tensors_of_documents_follow_the_live_ones(others: Parts, none: Parts) -> None:
    for parts, own in ((others, "simgpu:0"), (none, "cpu")):
        for rank, (places, device, said, exact) in enumerate(of(parts, "small")):
            assert {name: value for name, (_, value) in places.items()} == {
                "lr": 0.5,
                "beta": pytest.approx(0.99),
                "base_lr": 0.5,
                "extra": 0.5,
                "own": 0.5 + rank,
                "holder": 0.5,
                "module": 0.5,
                "host": 0.5,
            }
            devices = {name: place for name, (place, _) in places.items()}
            assert devices == dict.fromkeys(devices, own) | {"host": "cpu"}
            if own == "cpu":
                assert not exact
                assert "extra.baseline.value: a tensor on simgpu when saved, on cpu now" in said
                assert sum("a tensor on simgpu when saved" in line for line in said) >= len(devices) - 1
            else:
                assert (said, exact, device) == ((), True, own)


def test_a_load_copies_through_a_ring(two: Parts) -> None:
    for one in of(two, "load"):
        for name, found in one.items():
            counts = found["counts"]
            assert (found["differing"], found["names"]) == ([], 7), name
            assert found["staging"] == 2 * MIB
            assert found["pinned"] == 0, "torch's cache of pinned memory gave it back"
            assert counts["waits for a stream"] == 1, "at the end"
            if name == "in lanes":
                assert found["reads"].startswith("plain: all bytes were in the page cache")
                continue  # a thread's counts are its own, and which thread reads what is chance
            assert counts["copies to a device, pinned, late"] >= 17, "slots are used again and again"
            # The second copy of the tied weight is compared on the device, in two parts.
            assert counts["waits for an event"] == counts["copies to a device, pinned, late"] - 8 - 2, (
                "before a slot is read into again"
            )
            assert counts["copies to the host, pageable, blocking"] == counts["waits for a copy"] == 1
            assert {kind for kind in counts if "pageable" in kind} == {
                "copies to the host, pageable, blocking"
            }


def test_a_load_waits_once_and_takes_one_slot_of_the_device(two: Parts) -> None:
    for one in of(two, "one kind"):
        for name, found in one["kinds"].items():
            counts = found["counts"]
            copies = counts["copies to a device, pinned, late"]
            placed = counts.get("copies on a device", 0)  # cast or scattered by a kernel
            assert counts["waits for a stream"] == 1, "at the end"
            assert (found["staging"], found["pinned"]) == (2 * MIB, 0), "eight slots, given back"
            if name == "second copy":
                assert counts["waits"] == 2 + counts["waits for an event"], "for the answer"
                assert counts["waits for an event"] == copies - 16, "two rings"
                assert counts["copies to the host, pageable, blocking"] == 1
                assert found["beyond the shards"] <= 3 * MIB // 4
                continue
            assert {kind for kind in counts if "host" in kind or "pageable" in kind} == set(), name
            assert counts["waits"] == 1 + counts["waits for an event"], "no other wait for the device"
            assert counts["waits for an event"] == copies - 8, "before a slot is filled again"
            if name == "experts":
                assert found["beyond the shards"] <= MIB // 4
            else:
                assert placed == (0 if name == "direct" else copies), name
                assert found["beyond the shards"] == (MIB // 4 if placed else 0), name
                assert found["shards"] == 24576 * 64 // 2 * (2 if "cast" in name else 4), name


def test_a_second_copy_that_differs_is_refused(two: Parts) -> None:
    """On the rank that holds the element, and so on both."""
    for one in of(two, "one kind"):
        assert "'1.weight', a second copy of '0.weight' that differs from the first" in one["refused"]


def test_ranks_read_for_each_other_under_a_group_of_the_device(two: Parts) -> None:
    both = of(two, "strategies")
    for one in both:
        for strategy, found in one.items():
            assert (found["differing"], found["names"]) == ([], 7), strategy
            assert found["strategy"].startswith(strategy)
            assert "copies to a device, pinned, late" in found["counts"]
    read = {strategy: sum(one[strategy]["read"] for one in both) for strategy in both[0]}
    stored = both[0]["own"]["file"]
    assert 0.99 * stored < read["node"] == read["once"] < stored <= read["own"], (
        "each byte once, without headers"
    )


def test_a_load_onto_a_device_and_the_cpu(two: Parts) -> None:
    for rank, (same, counts, devices) in enumerate(of(two, "both")):
        assert same == [True, True]
        assert devices == ["cpu", f"simgpu:{rank}"]
        assert {kind for kind in counts if "to a device" in kind} == {"copies to a device, pinned, late"}


def test_an_async_save_waits_for_no_copy(two: Parts) -> None:
    for part in ("async", "waves"):
        for steps in of(two, part):
            for found in steps.values():
                assert (found["differing"], found["ok"]) == ([], True)
                # Scalars of optimizers, tensors that ranks compare, tensors of documents: one wait each.
                assert found["counts"]["waits"] == found["counts"]["waits for a copy"] == 3, found["counts"]
                assert found["counts"]["copies to the host, pageable, blocking"] == 3
                assert found["counts"]["copies to the host, pinned, late"] >= 15
                assert not {k for k in found["counts"] if k.startswith("copies to a device")}
                assert {k for k in found["counts"] if "to the host" in k} == {
                    "copies to the host, pageable, blocking",
                    "copies to the host, pinned, late",
                }


def test_pinned_memory_is_what_reports_say(two: Parts) -> None:
    for part in ("async", "waves"):
        for steps in of(two, part):
            for found in steps.values():
                assert found["pinned"] == found["staging"], "after the buffer has grown, too"
                if part == "waves":
                    assert found["staging"] <= saves.BUDGET < found["bytes"]
                else:
                    assert found["bytes"] <= found["staging"] <= found["bytes"] + 8192
    assert [found["pinned"] for found in of(two, "on the cpu")] == [0, 0]


def test_a_save_copies_through_a_small_ring(two: Parts) -> None:
    for found in of(two, "sync"):
        assert (found["differing"], found["ok"]) == ([], True)
        assert found["counts"]["waits for a copy"] == 3
        assert found["counts"]["waits for an event"] <= found["bytes"] // (8 * saves.MIB) + 2
        assert found["counts"]["copies to the host, pageable, blocking"] == 3
        assert found["pinned"] == found["staging"] == 16 * saves.MIB < found["bytes"]
        restored = found["restored"]
        assert restored["copies to a device, pinned, late"] >= 15
        assert restored["waits for a stream"] == 2, "model and optimizer"
        assert restored["copies to the host, pageable, blocking"] == 2, "sums of digests of each"
        assert restored["copies to a device, pageable, blocking"] == 21, (
            "tensors of documents; scalars, in one"
        )


def test_scalars_of_an_optimizer_travel_together(two: Parts) -> None:
    for found in of(two, "scalars"):
        assert found["steps"] == [1] * 5
        assert found["out"]["copies to the host, pageable, blocking"] == found["out"]["waits"] == 1
        assert found["back"]["copies to a device, pageable, blocking"] == found["back"]["waits"] == 1


def test_digests_of_many_tensors_wait_once(two: Parts) -> None:
    for both in of(two, "digests"):
        for counts in both:  # tables of weights lie on the device since the loads
            assert {k: n for k, n in counts.items() if "copies" not in k} == {
                "waits": 1,
                "waits for a copy": 1,
            }
            assert counts["copies to the host, pageable, blocking"] == 1
            assert not {k for k in counts if "to a device" in k}


def test_a_ledger_asks_the_allocator_of_any_device(two: Parts) -> None:
    """By ``torch.accelerator``: of all devices of the process."""
    for ended, before, used, peak in of(two, "ledger"):
        assert (used - before, peak - before) == (5 * MIB, 8 * MIB)
        assert ended["device_allocated_bytes"] == used
        assert ended["device_high_water_bytes"] == peak
        assert ended["device_reserved_bytes"] >= peak


def test_a_save_from_a_device_without_a_name(two: Parts) -> None:
    assert of(two, "nameless") == [True, True]


def test_tensors_of_an_optimizer_that_are_no_shards(two: Parts) -> None:
    """They come to the parameter's device, as by torch's ``load_state_dict``; the report names what was elsewhere."""
    for rank, found in enumerate(of(two, "own tensors")):
        for kept, differences in found:
            own = f"simgpu:{rank}"
            assert kept == {"rows": (own, [1, 1, 1]), "seen": (own, [1, 1])}
            moved = "optimizer.opaque.weight.seen: a tensor on cpu when saved, on simgpu now"
            assert moved in differences
            assert not [line for line in differences if "rows" in line]


def test_an_async_save_on_a_side_stream(two: Parts) -> None:
    assert of(two, "side stream") == [[3.0] * 5] * 2


def test_an_async_save_from_two_devices(two: Parts) -> None:
    assert of(two, "two devices") == [{"same": [True] * 4, "ok": True}] * 2


def test_exports_are_cast_on_the_device(two: Parts) -> None:
    for exports in of(two, "export"):
        for name, found in exports.items():
            assert found["same"], name
            kinds = {kind for kind in found["counts"] if "to the host" in kind}
            assert kinds == {"copies to the host, pinned, late"}, (
                "no copy is pageable: none is cast on the host"
            )
            assert found["counts"]["waits"] == found["counts"]["waits for an event"]
            assert found["counts"]["waits"] <= found["bytes"] // (8 * saves.MIB) + 2


def test_full_tensors_of_a_cpu_model_under_a_group_of_the_device(two: Parts) -> None:
    for rank, (on_cpu, on_device) in enumerate(of(two, "full")):
        assert on_cpu == (["cpu"], [True, True])
        assert on_device == ([f"simgpu:{rank}"], [True, True])


def test_generators_of_another_process(two: Parts) -> None:
    for rank, found in enumerate(of(two, "generators")):
        derived = f"RNG states derived with blake2b from (seed 1, step 2, rank {rank})"
        for name, why in (
            ("unused", "RNG state: simgpu wasn't in use when saved, but is now"),
            ("another kind", "RNG state: saved on a cuda device, but this process has a simgpu device"),
            (
                "two of one process",
                "RNG state: saved for 2 simgpu devices, but this process uses 1",
            ),
            (
                "nine visible, before",
                "RNG state: saved for all 9 simgpu devices on a host, but 2 are visible now",
            ),
        ):
            rule, differences, host, device = found[name]
            assert differences == (why,)
            assert rule == f"restored per rank; of the simgpu device: {derived}"
            assert (host, device) == (True, False)
        assert found["one visible, before"] == ("restored per rank", (), True, True)


def test_generators_of_a_process_with_several_devices(two: Parts) -> None:
    assert of(two, "several") == [[True] * 4] * 2


@pytest.mark.parametrize("part", alike.PARTS)
def test_the_device_gives_the_bits_of_the_cpu(two: Parts, none: Parts, part: str) -> None:
    for rank, (found, expected) in enumerate(zip(of(two, part), of(none, part), strict=True)):
        alike.assert_alike(found, expected, f"rank {rank}")


#: Operators that differ between the device and the CPU, and why.
OTHER_OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": "the CPU's attention is one fused kernel",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "and so are its gradients",
    "_safe_softmax": "torch makes the device's attention of these: sums in another order",
    "_softmax_backward_data": "",
    "bmm": "",
    "expand": "",
    "ones": "",
    "scalar_tensor": "",
    "tril": "",
    "where": "",
}


def test_attention_alone_rounds_otherwise(two: Parts, none: Parts) -> None:
    for found, expected in zip(of(two, "attention"), of(none, "attention"), strict=True):
        alike.assert_alike(found["eager"][0], expected["eager"][0])
        assert found["eager"][1] == expected["eager"][1]
        assert found["sdpa"][1] ^ expected["sdpa"][1] == OTHER_OPERATORS.keys()
        for name, gradient in expected["sdpa"][0].items():
            torch.testing.assert_close(found["sdpa"][0][name], gradient, rtol=1e-4, atol=1e-6)
