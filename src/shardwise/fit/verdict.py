"""From what a rank holds and what a step takes: the phases of a run with formulas and error bars, and whether it fits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import torch

from ..errors import ShardwiseError
from ..objects import frozen
from ..planning.plan import IOOptions
from ..publish.write import BUFFER_BYTES, LARGE_BYTES
from .groups import COMPILED_BYTES, COMPILED_UPPER_BYTES
from .network import Step
from .records import (
    OPTIMIZERS,
    Amount,
    Checkpoint,
    Files,
    Flow,
    Held,
    Phase,
    RunPlan,
    Setup,
    Variant,
    Where,
    with_cached_reads,
)
from .step import StepPeak

_GIB, _MIB = 1024**3, 1024**2
#: A process that imported torch and transformers, before it holds a model; measured: 0.4 to 1 GiB.
_PROCESS_BYTES, _PROCESS_ERROR = 3 * _GIB // 4, 0.4
#: A CUDA context, its libraries' workspaces and NCCL's buffers: 0.5 to 2 GiB.
_CONTEXT_BYTES, _CONTEXT_ERROR = 5 * _GIB // 4, 0.6
#: A save's buffers besides the tensors, at most; an export's windows of 32 MiB for what is read and for what is written.
_SAVE_BYTES, _EXPORT_BYTES = 32 * _MIB, 64 * _MIB
#: Workspaces of kernels and buffers of gloo or of a device's libraries, where they are not known better.
_SMALL_BYTES, _SMALL_UPPER_BYTES = 5 * _MIB, 54 * _MIB
#: For each parameter: objects of FSDP2, DTensor, autograd and the optimizer, and what the heap keeps of small tensors. Measured on the
#: CPU after three steps, beside workspaces and compiled products: 22 to 75 KiB, 50 in the middle; after a load 10 to 27.
_OBJECT_BYTES, _OBJECT_UPPER_BYTES = 50 * 1024, 140 * 1024
_LOADED_OBJECT_BYTES, _LOADED_OBJECT_UPPER_BYTES = 20 * 1024, 60 * 1024
#: Model, optimizer, and two of the rank's own state; manifest, state, two configs.
_FILES_OF_A_RANK, _FILES_OF_ALL = 4, 4
#: Of an upload to an object store.
_PART_BYTES = 8 * _MIB


def _amount(what: str, where: Where, nbytes: int, error: float, formula: str) -> Amount:
    """An amount that may be larger by a fraction."""
    return Amount(what, where, nbytes, math.ceil(nbytes * (1 + error)), formula)


def _up_to(what: str, where: Where, nbytes: int, formula: str) -> Amount:
    """An amount of which no more is known than its upper bound: a quarter of it is expected."""
    return Amount(what, where, nbytes // 4, nbytes, formula)


def _less(what: str, where: Where, nbytes: int, missed: int, error: float, formula: str) -> Amount:
    """An amount of which a part is there only if images come, too."""
    if missed:
        formula += f"; without {missed} bytes for parameters that the forward pass doesn't reach"
    return Amount(what, where, nbytes - missed, math.ceil(nbytes * (1 + error)), formula)


def _larger(ways: Sequence[Sequence[Amount]], where: Where) -> list[Amount]:
    """The amounts of the way that is expected to take most, with the bar of the one that may take most."""
    found = list(max(ways, key=lambda amounts: sum(a.nbytes for a in amounts)))
    lacking = max(sum(a.upper_bytes for a in way) for way in ways) - sum(a.upper_bytes for a in found)
    if lacking:
        text = "the other half of the phase is expected to need less, but its error bar ends higher"
        found.append(Amount("error bar", where, 0, lacking, text))
    return found


class _Run:
    """The amounts of one run, by what they are."""

    def __init__(
        self, held: Held, step: Step, variant: Variant, io: IOOptions, load_staging_bytes: int | None
    ) -> None:
        training = variant.training
        self.held, self.step, self.training, self.io = held, step, training, io
        self.load_staging_bytes = load_staging_bytes
        self.ranks, self.shards = variant.ranks, variant.shards
        self.is_offloaded = variant.policy.cpu_offload and training.device != "cpu"
        self.works: Where = "host" if training.device == "cpu" else "device"
        self.keeps: Where = "host" if self.is_offloaded else self.works

    # -- what stays --------------------------------------------------------------------------------------

    def process(self) -> list[Amount]:
        found = [
            _amount(
                "process",
                "host",
                _PROCESS_BYTES,
                _PROCESS_ERROR,
                "torch and transformers, imported: 0.45 to 1.05 GiB",
            )
        ]
        if self.training.device != "cpu":
            text = "device context, library workspaces, NCCL buffers: 0.5 to 2 GiB"
            found.append(_amount("context", "device", _CONTEXT_BYTES, _CONTEXT_ERROR, text))
        return found

    def model(self) -> list[Amount]:
        held = self.held
        text = "elements of each parameter / shards, rounded up to full rows of dim 0, x bytes per element"
        nbytes = held.parameters
        if self.is_offloaded:
            nbytes, text = held.pinned_parameters, f"{text}; pinned: each rounded up to a power of two"
        return [
            _amount("parameters", self.keeps, nbytes, 0.01, text),
            _amount("buffers", self.works, held.buffers, 0.01, "whole on every rank"),
        ]

    def loaded(self) -> list[Amount]:
        """The model before its first step."""
        count = self.held.count
        text = f"objects for {count} parameters: 20 KiB each, at most 60"
        sizes = count * _LOADED_OBJECT_BYTES, count * _LOADED_OBJECT_UPPER_BYTES
        return [*self.model(), Amount("small objects", "host", *sizes, text)]

    def optimizer(self) -> list[Amount]:
        count, bytes_each = OPTIMIZERS[self.training.optimizer]
        each = (
            f"{bytes_each:.3f} bytes"
            if bytes_each is not None
            else f"bytes of {', '.join(self.held.trained_dtypes)}"
        )
        held, keeps = self.held, self.keeps
        text = f"{self.training.optimizer}: {held.trained} trained elements of the rank x {count} states x {each}"
        return [_less("optimizer state", keeps, held.optimizer, held.unreached_optimizer, 0.01, text)]

    def gradients(self, nbytes: int | None = None) -> list[Amount]:
        # On the host, gradients that are offloaded are pinned: at most twice the size.
        error = 1.0 if self.is_offloaded else 0.01
        text = "trained elements of the rank x bytes per element, from the backward pass to zero_grad"
        if nbytes is not None:
            return [_amount("gradients", self.keeps, nbytes, error, text)]
        held = self.held
        return [_less("gradients", self.keeps, held.gradients, held.unreached_gradients, error, text)]

    # -- what comes and goes -----------------------------------------------------------------------------

    def forward_backward(self, peak: StepPeak) -> list[Amount]:
        place = self.works
        at = f"at the peak ({peak.when})"
        # A caching allocator on a device keeps pools for several streams.
        error = 0.02 if self.training.device == "cpu" else 0.1
        return [
            _amount(
                "gathered", place, peak.gathered_bytes, error, f"FSDP2's buffers and whole parameters {at}"
            ),
            _amount(
                "reduced",
                place,
                peak.reduced_bytes,
                error,
                f"unsharded gradients and reduce-scatter buffers {at}",
            ),
            *self.gradients(peak.gradient_bytes),
            _amount(
                "activations", place, peak.activation_bytes, self.step.error, f"{self.step.formula}; {at}"
            ),
        ]

    def small(self) -> list[Amount]:
        nbytes, upper = _SMALL_BYTES, _SMALL_UPPER_BYTES
        text = "kernel workspaces: 5 MiB, at most 54"
        if self.works != "host":
            return [Amount("small objects", self.works, nbytes, upper, text)]
        count, workspaces = self.held.count, self.step.workspace_bytes
        if workspaces is not None:
            nbytes, upper = workspaces, upper + workspaces
            text = f"workspaces that MKL keeps after fp32 matmuls: {workspaces} bytes, at most 54 MiB more"
        nbytes, upper = nbytes + count * _OBJECT_BYTES, upper + count * _OBJECT_UPPER_BYTES
        text += f"; objects of {count} parameters: 50 KiB each, at most 140"
        return [Amount("small objects", self.works, nbytes, upper, text)]

    def compiled(self, count: int | None = None) -> list[Amount]:
        """The code of ``count`` matrix products. None: after many steps."""
        products = self.step.products
        if products is None or self.works != "host":
            return []
        most = products.after_many_steps()
        count = most if count is None else count
        text = (
            f"kernels that oneDNN compiles for 16-bit matmuls, 0.55 MiB x {count}: {products.dense} for dense layers and "
            f"{products.shapes} for each number of tokens that an expert gets, a third of them in the forward pass; at most {most} are kept"
        )
        sizes = count * COMPILED_BYTES, most * COMPILED_UPPER_BYTES
        return [Amount("compiled products", "host", *sizes, text)]

    def update(self) -> list[Amount]:
        on_cpu = self.keeps == "host"
        nbytes = 2 * self.held.largest_trained if on_cpu else self.held.gradients
        text = (
            "one parameter at a time: two temporary tensors as large as the largest parameter"
            if on_cpu
            else "foreach: one temporary tensor for each parameter"
        )
        if self.training.optimizer in ("sgd", "momentum"):  # in place
            nbytes = 0
        return [*self.gradients(), _amount("optimizer's temporaries", self.keeps, nbytes, 0.1, text)]

    def a_step(self, *, is_first: bool) -> tuple[Amount, ...]:
        """The larger of forward with backward, and of the optimizer's update; of each pool of memory."""
        base = [*self.process(), *self.model(), *self.small()]
        if is_first:
            products, peak = self.step.products, self.step.first_peak
            before, compiled = self.compiled(peak.compiled), []
            if products is not None:
                compiled = self.compiled(products.after_one_step())
        else:
            peak, compiled = self.step.peak, self.compiled()
            before = [*compiled, *self.optimizer()]
        return self._larger(
            [*base, *before, *self.forward_backward(peak)],
            [*base, *compiled, *self.optimizer(), *self.update()],
        )

    def _larger(self, *ways: list[Amount]) -> tuple[Amount, ...]:
        """The larger of two halves of a phase, of each pool of memory."""
        if self.training.device == "unified":
            return tuple(_larger(ways, self.works))
        places: tuple[Where, ...] = ("device", "host")
        return tuple(
            amount
            for where in places
            for amount in _larger([[a for a in way if a.where == where] for way in ways], where)
        )

    def staging(self) -> Amount:
        held = self.held
        needed = held.parameters + held.optimizer
        limit = self.training.max_staging_bytes
        nbytes = needed if limit is None else min(needed, limit)
        text = "a copy of the rank's parameters and optimizer state, kept for the next save"
        if limit is not None:
            text += f", at most max_staging_bytes = {limit}"
        return _amount("staging", "host", nbytes, 0.02, text)

    def written(self) -> Amount:
        nbytes = (self.held.stored_model + self.held.stored_optimizer) // self.ranks
        return _amount("files", "page cache", nbytes, 1.0, "what the rank writes; the system can reclaim it")

    def a_resume(self, reading: Amount) -> tuple[Amount, ...]:
        """The larger of the load, and of the restore after it, which has no casts to stage for."""
        restoring = replace(reading, nbytes=0 if self.keeps == "host" else reading.nbytes)
        base = [*self.process(), *self.loaded()]
        return self._larger([*base, reading], [*base, *self.optimizer(), restoring])

    def at_rest(self) -> list[Amount]:
        kept = [*self.small(), *self.compiled()]
        return [*self.process(), *self.model(), *self.optimizer(), *self.gradients(), *kept]

    # -- phases ------------------------------------------------------------------------------------------

    def reading(self) -> Amount:
        """Staging of a load."""
        most, planned = self.io.staging_bytes, self.load_staging_bytes
        text = f"at most IOOptions.staging_bytes = {most}"
        if self.works != "host":
            ring = self.io.ring_bytes
            return _up_to(
                "staging", "host", ring, f"pinned memory: at most twice IOOptions.staging_bytes = {ring}"
            )
        if planned is None:
            return _up_to("staging", "host", most, text)
        text = (
            f"the largest read that is cast or converted, or a module that is initialized; two buckets if the ranks on a host "
            f"share their reads; {text}"
        )
        return Amount("staging", "host", planned, max(planned, most), text)

    def writing(self, most: int, what: str) -> Amount:
        """Staging of a save or an export: tensors on the CPU are written from where they lie."""
        text = f"{what}: at most {most // _MIB} MiB; none for tensors on the CPU that are stored as they are"
        return Amount("staging", "host", 0 if self.keeps == "host" else most // 4, most, text)

    def written_through(self, saving: Amount) -> Amount:
        """The same where files are so large that they are written past the page cache, through buffers."""
        largest = max(self.held.stored_model, self.held.stored_optimizer) // self.shards
        if saving.nbytes or largest < LARGE_BYTES:
            return saving
        text = f"{saving.formula}; 16 MiB of buffers, shared pages, for a file of 16 MiB or more"
        return replace(saving, nbytes=2 * BUFFER_BYTES, formula=text)

    def phases(self) -> Iterable[Phase]:
        reading = self.reading()
        saving = self.writing(_SAVE_BYTES, "buffers of the writer")
        export = self.writing(_EXPORT_BYTES, "windows for what is read and written")
        steady = self.a_step(is_first=False)
        amounts: dict[str, tuple[Amount, ...]] = {
            "build": (*self.process(), *self.model()[1:]),
            "load": (*self.process(), *self.loaded(), reading),
            "first step": self.a_step(is_first=True),
            "steady state": steady,
            "save, sync": (*self.at_rest(), self.written_through(saving), self.written()),
            "save, async": (*steady, self.staging(), self.written_through(saving), self.written()),
            "resume": self.a_resume(reading),
            "export": (*self.at_rest(), export, self.written()),
        }
        return [Phase(name, found) for name, found in amounts.items()]

    # -- checkpoint --------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        nbytes = self.held.stored_model + self.held.stored_optimizer
        files = self.ranks * _FILES_OF_A_RANK + _FILES_OF_ALL
        return Checkpoint(
            nbytes=nbytes,
            files=files,
            seconds=nbytes / self.training.bytes_per_s,
            requests=-(-nbytes // _PART_BYTES) + 2 * files,
            kept=self.training.keep_last,
        )


def _setup(held: Held, variant: Variant, compute: str) -> Setup:
    training, precision = variant.training, variant.policy.mixed_precision
    states, bytes_each = OPTIMIZERS[training.optimizer]
    reduced = precision.reduce_dtype if precision is not None else None
    return Setup(
        optimizer=training.optimizer,
        parameters=held.dtypes,
        trained=held.trained_dtypes,
        compute=compute,
        reductions=compute if reduced is None else str(reduced).removeprefix("torch."),
        optimizer_states=() if not states else held.trained_dtypes if bytes_each is None else ("8 bits",),
        batch_size=training.batch_size,
        sequence_length=training.sequence_length if training.loss is None else None,
        bytes_per_s=training.bytes_per_s,
    )


def run_plan(
    held: Held,
    step: Step,
    variant: Variant,
    io: IOOptions,
    network: tuple[Flow, ...],
    files: tuple[Files, ...],
    *,
    compute_dtype: torch.dtype,
    load_staging_bytes: int | None = None,
) -> RunPlan:
    """The phases of a run. ``compute_dtype``: of the forward. ``load_staging_bytes``: what rank 0's load stages; None: not known."""
    run, training = _Run(held, step, variant, io, load_staging_bytes), variant.training
    assumptions, wrapped = list(step.assumptions), step.groups if variant.is_wrapped else ()
    if training.device != "cpu":
        assumptions.append("no other process uses the device's memory, and the allocator wastes at most 10%")
    return RunPlan(
        setup=_setup(held, variant, str(compute_dtype).removeprefix("torch.")),
        phases=with_cached_reads(run.phases(), files, variant, io),
        nodes=variant.hosts,
        ranks_per_host=min(variant.ranks_per_host, variant.ranks),
        is_unified=training.device == "unified",
        largest_gather_bytes=max((g.gathered_bytes for g in wrapped), default=0),
        largest_reduce_bytes=max((g.reduced_bytes for g in wrapped), default=0),
        network=network,
        files=files,
        checkpoint=run.checkpoint(),
        assumptions=tuple(assumptions),
    )


# ----------------------------------------------------------------------------------------------------
# Whether a run fits into the memory there is, and which changes make it fit, the cheapest first.

#: Devices of a host, where nothing says otherwise: more ranks than that are whole hosts.
RANKS_PER_HOST = 8
#: Numbers of ranks that are tried, as clusters are rented: parts of a host, and 2^n or 3 * 2^n hosts.
_SIZES = (1, 2, 4, *sorted(RANKS_PER_HOST * n for k in range(10) for n in {2**k, 3 * 2**k}))
#: So many changes that make it fit are shown.
_MOST_CHANGES = 3
_RANK_OF_LORA = 16
#: A number of ranks takes less than promised if it takes at most this part of it.
_LESS = 0.98
#: Amounts of a device that do not depend on the number of ranks.
_SAME = ("activations", "context", "buffers")


@frozen
class Limits:
    """The memory there is; None: not asked for."""

    device_bytes: int | None
    """Of one device."""
    host_bytes: int | None
    """Of one host."""


@frozen
class Need:
    """A phase that needs more than there is."""

    phase: str
    where: Literal["device", "host"]
    needed_bytes: int
    """At the upper end of the error bar."""
    limit_bytes: int
    largest: str
    """The amount that takes most."""


@frozen
class Change:
    """A change with which the run fits: it was planned with it."""

    what: str
    device_bytes: int
    host_bytes: int


@frozen
class Verdict:
    """Whether a run fits. At the upper ends of error bars, so that "fits" is not too optimistic."""

    outcome: Literal["fits", "fits if", "does not fit"]
    binds: tuple[Need, ...]
    """The phases that don't fit, starting with the one that lacks the most memory."""
    changes: tuple[Change, ...]
    """The cheapest first."""


@frozen
class Tried:
    """A number of ranks that was planned."""

    ranks: int
    device_bytes: int
    """Of one device, in the phase that takes most, at the upper end of the error bar."""
    binds: tuple[Need, ...]
    """The phases that do not fit; empty if the run does."""


@frozen
class Search:
    """How many ranks a run needs."""

    ranks: int | None
    """The smallest number that fits; None if none does."""
    tried: tuple[Tried, ...]
    """By the number of ranks."""
    change: str | None = None
    """What had to change, because no number of ranks fits without it."""
    unchanged: Need | None = None
    """What does not fit without that change, whatever the number of ranks."""

    @property
    def below(self) -> Tried | None:
        """The largest number that was tried and does not fit."""
        return max((one for one in self.tried if one.binds), key=lambda one: one.ranks, default=None)


def smallest_ranks(plan: Callable[[int], RunPlan], limits: Limits, *, unit: int) -> Search:
    """The smallest number of ranks with which a run fits: 1, 2, 4, or 1, 2, 3, 4, 6, 8, 12, ... hosts of 8; a multiple of ``unit``.

    ``plan`` plans the run with a number of ranks. Most of a device's memory is a part that every rank has, and shards: a + b / ranks.
    So two numbers say where to look, and the neighbors are planned to be sure. Experts are padded to a multiple of the ranks, so that
    two numbers can promise too little: the next larger one is tried, too, and those after it as long as they take less than promised.
    """
    assert limits.device_bytes is not None
    sizes = [n for n in _SIZES if n % unit == 0] or [unit]
    tried: dict[int, Tried] = {}
    promised = math.inf
    low, high = -1, len(sizes)  # that of low does not fit, that of high does
    index = min(bisect_left(sizes, RANKS_PER_HOST), len(sizes) - 1)
    while high - low > 1:
        run = plan(sizes[index])
        one = tried[sizes[index]] = Tried(sizes[index], run.device_bytes, _binding(run, limits))
        low, high = (index, high) if one.binds else (low, index)
        # What no number of ranks makes less, in the phase that has most of it.
        everywhere = max(
            sum(a.upper_bytes for a in p.amounts if a.where == "device" and a.what in _SAME)
            for p in run.phases
        )
        known = sorted(tried.values(), key=lambda tried: tried.ranks)[-2:]
        if len(known) < 2:
            index = bisect_left(sizes, 8 * one.ranks) if one.binds else 0
        else:
            (n, most), (m, least) = ((one.ranks, one.device_bytes) for one in known)
            shards = (most - least) / (1 / n - 1 / m)
            rest = least - shards / m
            if rest < limits.device_bytes:
                index = bisect_left(sizes, shards / (limits.device_bytes - rest))
            elif high < len(sizes):
                index = bisect_left(sizes, m)
            elif least > promised or everywhere > limits.device_bytes:
                break  # no number of ranks makes that less
            else:
                index = low + 1
                promised = _LESS * (rest + shards / sizes[min(index, len(sizes) - 1)])
        index = min(max(index, low + 1), high - 1)
    found = sizes[high] if high < len(sizes) else None
    return Search(found, tuple(tried[n] for n in sorted(tried)))


def verdict_of(run: RunPlan, limits: Limits, asked: Variant, plan: Callable[[Variant], RunPlan]) -> Verdict:
    """Compare ``run`` with ``limits``. If it does not fit, ``plan`` the changes of ``asked``, from the cheapest on."""
    binds = _binding(run, limits)
    if not binds:
        return Verdict("fits", (), ())
    changes: list[Change] = []
    for what, variant in _changes(asked):
        if changes and "batch size" in what and "batch size" in changes[-1].what:
            continue  # a larger batch fits
        try:
            changed = plan(variant)
        except (ShardwiseError, ValueError):  # this model can't be changed so
            continue
        if not _binding(changed, limits):
            changes.append(Change(what, changed.device_bytes, changed.host_bytes))
        if len(changes) == _MOST_CHANGES:
            break
    return Verdict("fits if" if changes else "does not fit", binds, tuple(changes))


def _binding(run: RunPlan, limits: Limits) -> tuple[Need, ...]:
    found: list[Need] = []
    for phase in run.phases:
        device, host = run.needed(phase)
        for where, needed, limit in (
            ("device", device, limits.device_bytes),
            ("host", host, limits.host_bytes),
        ):
            if limit is not None and needed > limit:
                places = ("device", "host") if run.is_unified else (where,)
                largest = max((a for a in phase.amounts if a.where in places), key=lambda a: a.upper_bytes)
                found.append(Need(phase.name, where, needed, limit, largest.what))  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda need: need.limit_bytes / need.needed_bytes))


def _changes(asked: Variant) -> Iterator[tuple[str, Variant]]:
    """Changes by their price: time of a step, other results, more machines, another method."""
    training = asked.training
    leaner, named = asked, ""
    if not training.checkpointing:
        leaner = replace(asked, training=replace(training, checkpointing=True))
        named = "activation checkpointing"
        yield named, leaner
    batch = training.batch_size
    while batch > 1:
        batch //= 2
        what = f"batch size {batch} with gradient accumulation"
        smaller = replace(leaner, training=replace(leaner.training, batch_size=batch))
        yield _and(named, what), smaller
    if training.batch_size > 1:
        leaner, named = smaller, _and(named, "batch size 1 with gradient accumulation")
    if training.optimizer == "adamw":
        what = "an 8-bit AdamW (torchao)"
        yield what, replace(asked, training=replace(training, optimizer="adamw8bit"))
        if named:
            eight = replace(leaner, training=replace(leaner.training, optimizer="adamw8bit"))
            yield _and(named, what), eight
    if not asked.policy.cpu_offload and training.device == "cuda":
        offloaded = replace(leaner, policy=replace(leaner.policy, cpu_offload=True))
        yield _and(named, "offload to the host (ShardPolicy(cpu_offload=True))"), offloaded
    for times in (2, 4, 8):
        yield (
            _and(named, f"{times * asked.ranks} ranks, {asked.ranks_per_host} on each host"),
            replace(leaner, ranks=times * asked.ranks),
        )
    if asked.adapter is None and find_spec("peft") is not None:
        from peft import LoraConfig

        lora = LoraConfig(r=_RANK_OF_LORA, target_modules="all-linear", task_type="CAUSAL_LM")
        yield _and(named, f"LoRA of rank {_RANK_OF_LORA} on all linear layers"), replace(leaner, adapter=lora)


def _and(first: str, second: str) -> str:
    return f"{first}, {second}" if first else second
