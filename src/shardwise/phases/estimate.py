"""From what a rank holds and what a step takes: the phases of a run, with formulas and error bars."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..planning import IOOptions
from .activations import Step
from .files import with_cached_reads
from .held import Held
from .records import Amount, Checkpoint, Files, Flow, Phase, RunPlan, Where
from .training import OPTIMIZERS
from .variant import Variant

__all__ = ["PHASES", "run_plan"]

PHASES = (
    "build",
    "load",
    "first step",
    "steady step",
    "save, sync",
    "save, async",
    "resume",
    "export",
)
_GIB, _MIB = 1024**3, 1024**2
#: A process that imported torch and transformers, before it holds a model; measured: 0.4 to 1 GiB.
_PROCESS_BYTES, _PROCESS_ERROR = 3 * _GIB // 4, 0.4
#: A CUDA context, its libraries' workspaces and NCCL's buffers: 0.5 to 2 GiB.
_CONTEXT_BYTES, _CONTEXT_ERROR = 5 * _GIB // 4, 0.6
#: A save's buffers besides the tensors, at most; an export's windows of 32 MiB for what is read and for what is written.
_SAVE_BYTES, _EXPORT_BYTES = 32 * _MIB, 64 * _MIB
#: Workspaces of kernels, autograd's graph, buffers of gloo, Python's objects; measured: up to 30 MiB.
_SMALL_BYTES, _SMALL_UPPER_BYTES = 16 * _MIB, 64 * _MIB
#: oneDNN keeps up to 1,024 compiled products, one for each shape; measured with experts in bf16: 0.5 MiB each.
_PRIMITIVES_BYTES = 640 * _MIB
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


class _Run:
    """The amounts of one run, by what they are."""

    def __init__(self, held: Held, step: Step, variant: Variant, io: IOOptions) -> None:
        training = variant.training
        self.held, self.step, self.training, self.io = held, step, training, io
        self.ranks = variant.ranks
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
            text = "context of the device, workspaces of its libraries, buffers of NCCL: 0.5 to 2 GiB"
            found.append(_amount("context", "device", _CONTEXT_BYTES, _CONTEXT_ERROR, text))
        return found

    def model(self) -> list[Amount]:
        held = self.held
        text = "elements of each parameter / shards, rounded up to whole rows of dim 0, x bytes of its dtype"
        nbytes = held.parameters
        if self.is_offloaded:
            nbytes, text = held.pinned_parameters, f"{text}; pinned: each rounded up to a power of two"
        return [
            _amount("parameters", self.keeps, nbytes, 0.01, text),
            _amount("buffers", self.works, held.buffers, 0.01, "whole on every rank"),
        ]

    def optimizer(self) -> list[Amount]:
        count, bytes_each = OPTIMIZERS[self.training.optimizer]
        each = (
            f"{bytes_each:.3f} bytes" if bytes_each is not None else f"bytes of {self.held.optimizer_dtype}"
        )
        text = f"{self.training.optimizer}: {self.held.trained} trained elements of the rank x {count} states x {each}"
        return [_amount("optimizer state", self.keeps, self.held.optimizer, 0.01, text)]

    def gradients(self, nbytes: int | None = None) -> list[Amount]:
        # On the host, gradients that are offloaded are pinned: at most twice the size.
        error = 1.0 if self.is_offloaded else 0.01
        text = "trained elements of the rank x bytes of their dtype, from the backward to zero_grad"
        return [
            _amount("gradients", self.keeps, self.held.gradients if nbytes is None else nbytes, error, text)
        ]

    # -- what comes and goes -----------------------------------------------------------------------------

    def forward_backward(self) -> list[Amount]:
        peak, place = self.step.peak, self.works
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
                f"whole gradients and reduce-scatter's buffers {at}",
            ),
            *self.gradients(peak.gradient_bytes),
            _amount(
                "activations", place, peak.activation_bytes, self.step.error, f"{self.step.formula}; {at}"
            ),
        ]

    def small(self) -> list[Amount]:
        text = "workspaces of kernels, autograd's graph, Python's objects: at most 64 MiB"
        found = [Amount("small objects", self.works, _SMALL_BYTES, _SMALL_UPPER_BYTES, text)]
        if self.works == "host" and self.step.has_narrow_experts:
            text = (
                "oneDNN compiles a product of two bytes an element for each number of tokens of an expert: "
                "at most 640 MiB"
            )
            found.append(_up_to("compiled products", "host", _PRIMITIVES_BYTES, text))
        return found

    def update(self) -> list[Amount]:
        on_cpu = self.keeps == "host"
        nbytes = 2 * self.held.largest_trained if on_cpu else self.held.gradients
        text = (
            "one parameter at a time: two temporary tensors of the largest"
            if on_cpu
            else "foreach: one temporary tensor for each"
        )
        if self.training.optimizer == "sgd":
            nbytes = 0
        return [*self.gradients(), _amount("optimizer's temporaries", self.keeps, nbytes, 0.1, text)]

    def a_step(self, before: list[Amount]) -> tuple[Amount, ...]:
        """The larger of forward with backward, and of the optimizer's update; of each pool of memory."""
        base = [*self.process(), *self.model(), *self.small()]
        ways = [*base, *before, *self.forward_backward()], [*base, *self.optimizer(), *self.update()]
        if self.training.device == "unified":
            return tuple(max(ways, key=lambda amounts: sum(a.upper_bytes for a in amounts)))
        found: list[Amount] = []
        for where in ("device", "host"):
            parts = [[a for a in amounts if a.where == where] for amounts in ways]
            found += max(parts, key=lambda amounts: sum(a.upper_bytes for a in amounts))
        return tuple(found)

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

    def at_rest(self) -> list[Amount]:
        return [*self.process(), *self.model(), *self.optimizer(), *self.gradients(), *self.small()]

    # -- phases ------------------------------------------------------------------------------------------

    def phases(self) -> Iterable[Phase]:
        reading = _up_to(
            "staging",
            "host",
            self.io.staging_bytes,
            f"at most IOOptions.staging_bytes = {self.io.staging_bytes}",
        )
        saving = _up_to("staging", "host", _SAVE_BYTES, "buffers of the writer: at most 32 MiB")
        export = _up_to("staging", "host", _EXPORT_BYTES, "windows for what is read and written: 64 MiB")
        steady = self.a_step(self.optimizer())
        amounts: dict[str, tuple[Amount, ...]] = {
            "build": (*self.process(), *self.model()[1:]),
            "load": (*self.process(), *self.model(), reading),
            "first step": self.a_step([]),
            "steady step": steady,
            "save, sync": (*self.at_rest(), saving, self.written()),
            "save, async": (*steady, self.staging(), saving, self.written()),
            "resume": (*self.process(), *self.model(), *self.optimizer(), reading),
            "export": (*self.at_rest(), export, self.written()),
        }
        return [Phase(name, amounts[name]) for name in PHASES]

    # -- checkpoint --------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        nbytes = self.held.stored_model + self.held.stored_optimizer
        files = self.ranks * _FILES_OF_A_RANK + _FILES_OF_ALL
        return Checkpoint(
            nbytes=nbytes,
            files=files,
            seconds=nbytes / self.training.bytes_per_s,
            requests=-(-nbytes // _PART_BYTES) + 2 * files,
        )


def run_plan(
    held: Held,
    step: Step,
    variant: Variant,
    io: IOOptions,
    network: tuple[Flow, ...],
    files: tuple[Files, ...],
) -> RunPlan:
    """The phases of a run."""
    run, training = _Run(held, step, variant, io), variant.training
    assumptions = list(step.assumptions)
    if training.device != "cpu":
        assumptions.append(
            "the device's memory is this process's alone, and its allocator wastes at most 10 %"
        )
    return RunPlan(
        phases=with_cached_reads(run.phases(), files, variant, io),
        nodes=variant.hosts,
        ranks_per_host=variant.ranks_per_host,
        is_unified=training.device == "unified",
        largest_gather_bytes=max((g.gathered_bytes for g in step.groups), default=0),
        largest_reduce_bytes=max((g.reduced_bytes for g in step.groups), default=0),
        network=network,
        files=files,
        checkpoint=run.checkpoint(),
        assumptions=tuple(assumptions),
    )
