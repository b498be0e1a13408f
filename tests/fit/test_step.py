"""What FSDP2 holds in a step, event by event, and the events of blocks that did not run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.fit.groups import COMPILED_BYTES, Event, Products, StepGroup, whole_step
from shardwise.fit.step import StepPeak, peak_of

BLOCK = StepGroup(
    index=0,
    path="0",
    kind="block",
    module=nn.Identity(),
    parameters=(nn.Parameter(),),
    gathered_bytes=100,
    cast_bytes=0,
    reduced_bytes=100,
    gradient_bytes=25,
    last_gradient_bytes=0,
    is_reduced_apart=False,
)
ROOT = replace(
    BLOCK, path="", kind="root", parameters=(), gathered_bytes=0, reduced_bytes=0, gradient_bytes=0
)
#: Two blocks and a root without parameters.
GROUPS = (BLOCK, replace(BLOCK, index=1, path="1"), replace(ROOT, index=2))


def event(kind: str, group: int = -1, nbytes: int = 0, live: int = 0, peak: int = 0) -> Event:
    return Event(kind, group, nbytes, live, max(live, peak))


def peak(*events: Event, copies: bool = False) -> StepPeak:
    return peak_of(events, GROUPS, shards=4, copies=copies)


def reduced(*events: Event, has_replicas: bool = False, **changes: Any) -> int:
    """What a step holds of whole gradients and reductions at its peak, with blocks that are changed so."""
    blocks = (
        replace(GROUPS[0], gathered_bytes=0, **changes),
        replace(GROUPS[1], gathered_bytes=0, **changes),
    )
    return peak_of(events, (*blocks, GROUPS[2]), shards=4, has_replicas=has_replicas).reduced_bytes


FORWARD = (event("enter", 2), event("enter", 0), event("exit", 0))
SECOND = (event("enter", 1), event("exit", 1), event("exit", 2), event("loss"), event("back", 2))


def test_a_gather_takes_a_buffer_and_the_parameters() -> None:
    assert peak(*FORWARD[:2]).gathered_bytes == 200
    # The buffer of the first block is there until the second has been gathered.
    assert peak(*FORWARD, SECOND[0]).gathered_bytes == 200
    assert peak(*FORWARD, event("enter", 1, peak=500)) == StepPeak(100, 0, 0, 500, "enter 1")
    assert peak(*FORWARD[:2], copies=True).gathered_bytes == 200


def test_the_next_group_is_gathered_ahead_in_the_backward() -> None:
    late = event("grad", 1, 0, peak=1000)
    found = peak(*FORWARD, *SECOND, event("back", 1), late)
    assert (found.gathered_bytes, found.activation_bytes) == (200, 1000)
    # The first block has none before it.
    found = peak(*FORWARD, event("exit", 2), event("loss"), event("back", 0), event("grad", 0, peak=1000))
    assert (found.gathered_bytes, found.activation_bytes) == (100, 1000)


def test_gradients_are_whole_until_they_are_reduced() -> None:
    # Beside the whole gradients there are the input of the reduce-scatter and the group that is gathered ahead.
    in_fp32 = (replace(GROUPS[0], gathered_bytes=10), replace(GROUPS[1], reduced_bytes=200), GROUPS[2])
    events = (*FORWARD, *SECOND, event("back", 1), event("grad", 1, 100), event("back", 0))
    assert peak_of(events, in_fp32, shards=4) == StepPeak(10, 300, 0, 0, "reduce 1")
    # The input stays until the next group has its gradients.
    backward = (event("back", 1), event("grad", 1, 100), event("back", 0))
    assert peak(*FORWARD, *SECOND, *backward) == StepPeak(200, 100, 25, 0, "copy out 0")
    after = peak(*FORWARD, *SECOND, *backward, event("grad", 0, 100, peak=5000), event("end"))
    assert (after.gradient_bytes, after.reduced_bytes) == (25, 100)


def test_a_reduction_holds_the_last_gradient_of_its_group() -> None:
    backward = (*FORWARD, *SECOND, event("back", 1), event("grad", 1, 100), event("back", 0))
    # Gradients and the input of the reduction; then the input, its output, and the last gradient.
    assert reduced(*backward) == 100 + 100
    assert reduced(*backward, last_gradient_bytes=90) == 100 + 100 // 4 + 90


def test_a_block_is_reduced_before_what_comes_after_it() -> None:
    done = (event("back", 0), event("grad", 0, 100), event("done", 0))
    # The first block's parameters and whole gradients are gone when the embedding gets its gradient.
    found = peak(*FORWARD, event("exit", 2), event("loss"), *done, event("grad", 2, peak=1000), event("end"))
    assert (found.gathered_bytes, found.reduced_bytes, found.gradient_bytes) == (0, 100, 25)


def test_replicas_keep_what_they_reduced_in_another_dtype_until_the_end() -> None:
    backward = (event("back", 1), event("grad", 1, 100), event("back", 0), event("grad", 0, 100))
    events = (*FORWARD, *SECOND, *backward, event("end", peak=10_000))
    apart = {"is_reduced_apart": True, "gradient_bytes": 12}
    assert reduced(*events, **apart) == 200
    assert reduced(*events, has_replicas=True, **apart) == 200 + 100 // 4
    assert reduced(*events, has_replicas=True) == 200  # the gradient itself


def test_what_comes_after_a_block_is_none_of_its_backward() -> None:
    ran = (
        *(event("enter", 2), event("enter", 0), event("exit", 0), event("enter", 1), event("exit", 1)),
        *(event("loss"), event("back", 1), event("back", 0), event("grad", 0, 100), event("done", 0)),
        *(event("grad", 2, 50, peak=5000), event("end")),
    )
    whole = list(whole_step(ran, GROUPS, {0: 0, 1: 0}))
    assert [e.nbytes for e in whole if e.kind == "grad"] == [100, 100, 50]
    assert [e.peak for e in whole if e.peak] == [5000]  # once, not for each block


def test_blocks_that_are_alike_take_what_the_first_took() -> None:
    ran = (
        event("enter", 2),
        event("enter", 0, live=10),
        event("exit", 0, live=70, peak=90),
        event("enter", 1, live=70),
        event("exit", 1, live=70),
        event("loss", live=80),
        event("back", 1, live=75),
        event("back", 0, live=75),
        event("grad", 0, 100, live=75, peak=130),
        event("end", live=15),
    )
    whole = list(whole_step(ran, GROUPS, {0: 0, 1: 0}))
    assert next(e.peak for e in whole if e.kind == "inside") == 70 + 90 - 10
    lost = next(e for e in whole if e.kind == "loss")
    assert lost.live == 80 + 60
    seconds = [e for e in whole if e.kind == "grad" and e.group == 1]
    assert [(e.nbytes, e.peak) for e in seconds] == [(100, 75 + 60 + 55)]
    assert whole[-1].live == 15


def test_a_first_step_has_compiled_no_product_that_it_has_not_run() -> None:
    experts = replace(BLOCK, kind="experts")
    products = Products(
        dense=5, shapes=6, forward_shapes=2, layers=1, experts=4, tokens=8, tokens_of_expert=8.0
    )
    events = [
        replace(event("enter", 0), products=2),
        replace(event("exit", 0, peak=900), products=3),
        event("loss", peak=950),
        replace(event("back", 0), products=5),
    ]
    for is_wrapped in (True, False):
        given: dict[str, Any] = {"shards": 4, "is_wrapped": is_wrapped}
        found = peak_of(events, (experts, replace(ROOT, index=1)), compiles=products, **given)
        # The code of products in the backward is larger than all that these tensors take.
        assert found.compiled == 5 + 6
        assert found.total_bytes >= 11 * COMPILED_BYTES
        forward = peak_of(events[:3], (experts, replace(ROOT, index=1)), compiles=products, **given)
        assert forward.compiled == 3 + 2
        assert peak_of(events, (experts, replace(ROOT, index=1)), **given).compiled == 0
