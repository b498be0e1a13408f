"""Known lines of logs: what each means, and where that was met. Reading a log finds the first line of each kind."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, linear_regression, median, stdev
from typing import TypeVar

from ..errors import SourceError
from ..objects import frozen
from .facts import Log

__all__ = ["KNOWN", "Known", "LoggedLosses", "log_of_losses", "losses_of_log", "read_log"]

T = TypeVar("T")

#: Of a longer log, its beginning and its end are read.
_BEGIN_BYTES, _END_BYTES = 4 * 1024**2, 28 * 1024**2
_LINE_CHARS = 400
#: ``{'loss': 2.31, …``, ``loss=2.31``, ``loss: 2.31``; not ``eval_loss``.
_LOSS = re.compile(r"loss(?<![\w-]loss)['\"]?\s*[:=]\s*['\"]?(\d{1,9}\.\d{1,16}|nan\b|inf\b)", re.IGNORECASE)
#: A line in which a program says that it continues from a checkpoint.
_RESUMES = re.compile(
    r"\bresum(?:ed|ing)\b|\brestored step \d|\bcontinuing training from\b|\bload(?:ed|ing) checkpoint\b",
    re.IGNORECASE,
)
#: Lines that programs write as they start or end. The training that follows is a resume if its epochs continue.
_STARTS = re.compile(
    r"train_runtime|\*{5} Running training|Traceback \(most recent call last\)|Loading weights:|Loading checkpoint shards:|"
    r"\btrainable params:"
)
_RATE = re.compile(
    r"\b(?:learning_rate|lr)['\"]?\s{0,9}[:=]\s{0,9}['\"]?(\d{1,9}(?:\.\d{1,20})?(?:e[-+]?\d{1,3})?)",
    re.IGNORECASE,
)
_STEP = re.compile(r"\b(?:global_?)?step['\"]?\s{0,9}[:=]?\s{0,9}(\d{1,15})\b", re.IGNORECASE)
_EPOCH = re.compile(r"\bepoch['\"]?\s{0,9}[:=]\s{0,9}['\"]?(\d{1,9}(?:\.\d{1,16})?)", re.IGNORECASE)
#: Losses that are compared on either side of a resume.
_BEFORE, _AFTER, _WORST = 20, 8, 3
#: The last losses before a resume: a mean of more lags behind a loss that falls.
_LAST = 5
#: In a jump three losses are a tenth above the highest one before, and so many standard deviations above the level.
_JUMP, _DEVIATIONS = 1.1, 4.0
#: One loss, the first one, must be higher.
_SPIKE, _SPIKE_DEVIATIONS = 1.5, 8.0
#: The learning rate goes back if it grows by that factor, and by so many of its usual steps.
_BACK, _BACK_STEPS = 1.1, 3.0
#: A schedule with restarts has reached a smaller part of its highest rate when it restarts.
_RESTARTS = 0.1
#: With fewer losses before, their deviation says nothing: even the lowest of the next ones must be above the highest.
_LEAST_BEFORE = 5
#: The newest ones: a fall may have been steeper before. With fewer than so many, the last ones alone show a steep fall.
_FEW = 10
#: A line is a trend if it leaves this share of the variance, and a sure one if it leaves that share.
_TREND, _SURE_TREND = 0.25, 0.04
#: Losses before a checkpoint from which a run may or may not have resumed.
_LEAST_BEFORE_SAVE = 10
#: So many losses show a trend, and the last tenth is that much above the lowest one.
_LEAST_TREND, _RISE = 50, 1.5


@frozen(kw_only=True)
class Known:
    """A line that says what happened, and the three sentences for it."""

    name: str
    lines: tuple[str, ...]
    """The line contains one of these texts."""
    also: tuple[str, ...] = ()
    """Expressions that the same line matches, too. Each takes time in proportion to the line, which may have many MiB."""
    unless: str | None = None
    """A text that the line doesn't have."""
    source: str
    bites: str
    why: str
    do: str


KNOWN = (
    Known(
        name="model-only",
        lines=("the checkpoint only contains the model (save_only_model)",),
        source="case 5",
        bites="The run was resumed from a checkpoint that has only the model.",
        why="It was saved with save_only_model=True, so the optimizer's moments and the learning rate schedule started again.",
        do="Set save_only_model to false. Use the existing checkpoints only for inference, or to start a new run.",
    ),
    Known(
        name="device-mesh",
        lines=("'Tensor' object has no attribute 'device_mesh'",),
        source="case 1; accelerate#3898",
        bites="Accelerate's RAM-efficient loader found a tensor that isn't sharded.",
        why="It assumes that every entry in the state dict is a DTensor; persistent buffers and ignored parameters aren't.",
        do="Load with ShardwiseAccelerator (docs/cases/1-device-mesh.md), or set fsdp_cpu_ram_efficient_loading: false.",
    ),
    Known(
        name="nccl-timeout",
        lines=(
            "Watchdog caught collective operation timeout",
            "NCCL operations have failed or timed out",
            "watchdog got stuck for",
        ),
        source="transformers#48239; case 19",
        bites="A rank waited in a collective until NCCL timed out.",
        why="Another rank died, raised or was still loading: look for the rank whose log ends first.",
        do="Fix that rank's error; for slow loads, have each rank read its own bytes (sw.load_pretrained).",
    ),
    Known(
        name="cuda-oom",
        lines=(
            "CUDA out of memory",
            "torch.OutOfMemoryError",
            "torch.cuda.OutOfMemoryError",
            "HIP out of memory",
        ),
        source="docs/howto/does-it-fit.md",
        bites="The device ran out of memory.",
        why="Shards, gradients, optimizer state, the gathered module, and activations share its memory.",
        do="Use shardwise plan to see how much memory the weights take, then use smaller groups, more ranks or CPU offload.",
    ),
    Known(
        name="optimizer-key",
        lines=("Missing key", "optimizer.state.", "optim.state."),
        also=("optim", "Missing key|missing|not found"),
        source="case 13; accelerate#3971",
        bites="The optimizer state had no entry for a parameter.",
        why="A parameter that never got a gradient (a frozen tower, text-only training of a VLM) has no state, but DCP expects one.",
        do="Restore with shardwise.restore or swa.load_state, which resume without that state.",
    ),
    Known(
        name="no-space",
        lines=("No space left on device", "Errno 28", "Disk quota exceeded", "Errno 122"),
        unless="shared memory",
        source="case 15",
        bites="The file system was full, or a quota was exceeded.",
        why="torch's FileSystemWriter may report success although its writer thread failed.",
        do="Free up space, and check the newest checkpoint with shardwise verify before you resume.",
    ),
    Known(
        name="oom-kill",
        lines=(
            "oom-kill",
            "Out of memory: Killed process",
            "exitcode",
            "Signal 9 (SIGKILL)",
            "Memory cgroup out of memory",
        ),
        also=(
            r"oom-kill|Out of memory: Killed|exitcode\s{0,9}:\s{0,9}-9(?!\d)|Signal 9|Memory cgroup out of memory",
        ),
        source="case 2; case 3; ms-swift#9980",
        bites="The system killed a process, usually because the host ran out of memory.",
        why="Usually, every rank on the host loaded the full model.",
        do="Check the cgroup's memory.events or dmesg; load with sw.load_pretrained, which gives each rank only its own shards.",
    ),
    Known(
        name="hf-initialized",
        lines=("unexpected keyword argument '_is_hf_initialized'",),
        source="case 4",
        bites="A parameter class rejected an argument that transformers passes on the meta device.",
        why="device_map='meta' and init_empty_weights build each parameter again, with extra keyword arguments.",
        do="Build with sw.meta_init or sw.load_pretrained, which don't pass it any extra arguments.",
    ),
    Known(
        name="meta-copy",
        lines=("Cannot copy out of meta tensor",),
        source="case 3",
        bites="A model was moved from the meta device to a real one.",
        why="It was built on meta, and prepare or .to() ran before its weights were loaded.",
        do="Shard it on meta and load its weights (sw.load, swa.load, sw.init_weights) before prepare.",
    ),
    Known(
        name="mixed-dtensor",
        lines=("got mixed torch.Tensor and DTensor",),
        source="case 1",
        bites="An operator got a mix of DTensors and plain tensors.",
        why="One module was left out of the sharding, or a hook touches parameters outside of FSDP2's forward.",
        do="Wrap the root with fully_shard too, or list the unsharded parameter in allow_plain and keep it out of that operator.",
    ),
    Known(
        name="missing-weights",
        lines=("| MISSING",),
        also=(r"\b(?:layers?|blocks?|h|embed_tokens|wte)\.",),
        source="case 10; case 12",
        bites="from_pretrained found no weights for part of the model, which kept its random values.",
        why="The names don't match: PEFT renamed an adapter's base, or a file isn't the model's.",
        do="Load with sw.load_pretrained, which raises before it reads, and lists each tensor with its nearest name.",
    ),
    Known(
        name="initial-lr",
        lines=("param 'initial_lr' is not specified",),
        source="case 14",
        bites="A scheduler was created for parameter groups without initial_lr.",
        why="The optimizer was restored without initial_lr, or was built again after the scheduler.",
        do="Put the scheduler into sw.TrainState(scheduler=…): both are restored together.",
    ),
    Known(
        name="shared-memory",
        lines=(
            "Unexpected bus error encountered in worker",
            "killed by signal: Bus error",
            "workers are out of shared memory",
            "unable to allocate shared memory",
        ),
        source="pytorch#5040",
        bites="Data loader workers ran out of shared memory.",
        why="Their batches are in /dev/shm, which has 64 MiB in a container by default.",
        do="Start the container with --ipc=host or a larger --shm-size, or use fewer workers.",
    ),
    Known(
        name="open-files",
        lines=("Too many open files", "Errno 24]"),
        source="getrlimit(2)",
        bites="A process reached its open-file limit.",
        why="Each shard file, socket, and tensor shared by data loaders counts as one.",
        do="Raise the limit before you launch: ulimit -n 65536.",
    ),
    Known(
        name="gloo-loopback",
        lines=("Using the loopback address as fallback", "remote=[127.", "remote=[::1"),
        also=("onnect|Using the loopback", "refused|Using the loopback"),
        source="gloo#223; aws-do-eks#50",
        bites="Ranks on different hosts tried to connect to 127.0.0.1.",
        why="The host's name resolves to the loopback address, and gloo tells it to the other ranks.",
        do="Set GLOO_SOCKET_IFNAME to the interface between the hosts, or correct /etc/hosts.",
    ),
    Known(
        name="duplicate-gpu",
        lines=("Duplicate GPU detected",),
        source="prismatic-vlms#39",
        bites="Two ranks used the same GPU.",
        why="srun started torchrun once for each task, or LOCAL_RANK was not used to choose the device.",
        do="Start torchrun with --ntasks-per-node=1, and call torch.cuda.set_device(LOCAL_RANK).",
    ),
    Known(
        name="damaged-safetensors",
        lines=(
            "Error while deserializing header",
            "MetadataIncompleteBuffer",
            "HeaderTooLarge",
            "InvalidHeaderDeserialization",
            "InvalidHeaderLength",
        ),
        source="case 20",
        bites="A safetensors file is truncated, or isn't in that format.",
        why="A download or a copy was cut short, or the file is a Git LFS pointer.",
        do="Find it with shardwise doctor MODEL_DIRECTORY, and download it again.",
    ),
    Known(
        name="nms",
        lines=("operator torchvision::nms does not exist",),
        source="pytorch#157648",
        bites="torchvision was built for a different version of torch.",
        why="It registers its operators with the torch version that it was built for.",
        do="Install the torchvision for this torch version (for 2.N, that's 0.N+15), or remove it.",
    ),
)


def read_log(path: str) -> Log:
    """The known lines of a text file. Rank-local; reads at most 32 MiB. Raises :class:`SourceError`."""
    text, is_whole = _text_of(path)
    lines = {known.name: line for known in KNOWN if (line := _first_line(known, text))}
    losses = [(m.start(), float(m[1])) for m in _LOSS.finditer(text)]
    finite = [(place, loss) for place, loss in losses if math.isfinite(loss)]
    bad = next((place for place, loss in losses if not math.isfinite(loss)), None)
    return Log(
        path=path,
        lines=lines,
        first_loss=finite[0][1] if finite else None,
        losses=len(losses),
        jump=_jump_in(text, finite, counts_lines=is_whole),
        rate_jump=_rate_jump_in(text, finite, counts_lines=is_whole),
        resumed="model-only" in lines or bool(_resumes(text, finite)),
        not_a_number=None if bad is None else _line_at(text, bad),
        rise=_rise([loss for _, loss in finite]),
    )


def _text_of(path: str) -> tuple[str, bool]:
    """A log, or its beginning and its end, and whether it is all of the log. Raises :class:`SourceError`."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            is_whole = size <= _BEGIN_BYTES + _END_BYTES
            raw = file.read(_BEGIN_BYTES + _END_BYTES if is_whole else _BEGIN_BYTES)
            if not is_whole:
                file.seek(-_END_BYTES, os.SEEK_END)
                raw += b"\n" + file.read(_END_BYTES)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=path) from error
    return raw.decode(errors="replace"), is_whole


@frozen
class LoggedLosses:
    """The losses of a log by step."""

    points: Mapping[int, float]
    names_steps: bool
    """Whether each line with a loss names a step; otherwise the losses are numbered from 1."""
    resumes: tuple[int, ...]
    """The last step before each resume, as the lines or the epochs say."""
    digits: tuple[int, int]
    """The most significant digits and the most decimals that a loss is printed with."""


def losses_of_log(path: str) -> LoggedLosses:
    """The losses of a text file, and where resumes begin. Rank-local; reads at most 32 MiB. Raises :class:`SourceError`."""
    text, _ = _text_of(path)
    losses = [(m.start(), float(m[1])) for m in _LOSS.finditer(text) if math.isfinite(float(m[1]))]
    named = [_step_at(text, place) for place, _ in losses]
    steps = [step for step in named if step is not None]
    names_steps = bool(steps) and len(steps) == len(losses)
    if not names_steps:
        steps = list(range(1, len(losses) + 1))
    points = {step: loss for step, (_, loss) in zip(steps, losses, strict=True)}
    resumes = tuple(_last_below(steps[at], steps[:at]) for _, _, at in _resumes(text, losses))
    printed = [m[1] for m in _LOSS.finditer(text) if math.isfinite(float(m[1]))]
    significant = max((len(one.replace(".", "").lstrip("0")) for one in printed), default=0)
    decimals = max((len(one.partition(".")[2]) for one in printed), default=0)
    return LoggedLosses(points, names_steps, resumes, (significant, decimals))


def _last_below(step: int, before: Sequence[int]) -> int:
    """The last step from which a run can have continued with ``step``: a run that crashed had logged later ones."""
    return max((one for one in before if one < step), default=max(step - 1, 0))


def _step_at(text: str, place: int) -> int | None:
    """The step that the line of a loss names."""
    start = text.rfind("\n", max(0, place - _LINE_CHARS), place) + 1 or max(0, place - _LINE_CHARS)
    end = text.find("\n", place, place + _LINE_CHARS)
    found = _STEP.search(text, start, place + _LINE_CHARS if end < 0 else end)
    return None if found is None else int(found[1])


def log_of_losses(
    path: str, points: Mapping[int, float], saved: Mapping[int, str], rates: Mapping[int, float]
) -> Log:
    """The facts of losses and learning rates by step that a file of the Trainer's lists; a run may have resumed from each of the
    ``saved`` steps. Pure."""
    jump, rate_jump = _jump_after(points, saved), _rate_jump_after(rates, saved)
    losses = [points[step] for step in sorted(points)]
    finite = [loss for loss in losses if math.isfinite(loss)]
    bad = next((loss for loss in losses if not math.isfinite(loss)), None)
    return Log(
        path=path,
        lines={},
        first_loss=finite[0] if finite else None,
        losses=len(losses),
        jump=jump,
        rate_jump=rate_jump,
        resumed=jump is not None or rate_jump is not None,
        jump_is_certain=False,
        not_a_number=None if bad is None else f"loss {bad}",
        rise=_rise(finite),
    )


def _jump_in(
    text: str, losses: Sequence[tuple[int, float]], *, counts_lines: bool
) -> tuple[str, float, float] | None:
    """The line of the first resume after which the loss is higher than before, and the loss before and after."""
    values, epochs = [loss for _, loss in losses], _on_lines(_EPOCH, text, [place for place, _ in losses])
    for (place, first, at), (_, _, end) in pairwise([*_resumes(text, losses), (0, 0, len(values))]):
        before = _before_resume(values, epochs, first, at)
        if jump := _higher(before[-_BEFORE:], values[at : min(end, at + _AFTER)]):
            return _where(text, losses[at][0], epochs[at], place, counts_lines=counts_lines), *jump
    return None


def _where(text: str, loss: int, epoch: float | None, resume: int, *, counts_lines: bool) -> str:
    """Where a run continues: the line and the epoch of its first loss, and the line that speaks of a resume."""
    where = [f"line {text.count(chr(10), 0, loss) + 1}"] if counts_lines else []
    where += [] if epoch is None else [f"epoch {epoch:g}"]
    said = [_line_at(text, resume)] if _RESUMES.match(text, resume) else []
    return ", ".join([*where, *said]) or _line_at(text, loss)


def _rate_jump_in(
    text: str, losses: Sequence[tuple[int, float]], *, counts_lines: bool
) -> tuple[str, float, float] | None:
    """As :func:`_jump_in`, of the learning rate that the same lines name."""
    places = [place for place, _ in losses]
    rates, epochs = _on_lines(_RATE, text, places), _on_lines(_EPOCH, text, places)
    for (place, first, at), (_, _, end) in pairwise([*_resumes(text, losses), (0, 0, len(rates))]):
        before = [rate for rate in _before_resume(rates, epochs, first, at) if rate is not None]
        after = [rate for rate in rates[at : min(end, at + _LAST)] if rate is not None]
        if _goes_back(before, after):
            where = _where(text, places[at], epochs[at], place, counts_lines=counts_lines)
            return where, before[-1], after[0]
    return None


def _rate_jump_after(rates: Mapping[int, float], saved: Mapping[int, str]) -> tuple[str, float, float] | None:
    """As :func:`_jump_after`, of the learning rate. A schedule that restarts has come to its end before."""
    steps = sorted(rates)
    values = [rates[step] for step in steps]
    for step in sorted(saved):
        at = bisect(steps, step)
        before, after = values[:at], values[at : at + _LAST]
        if _goes_back(before, after) and before[-1] > _RESTARTS * max(before):
            return os.path.basename(saved[step]), before[-1], after[0]
    return None


def _goes_back(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether a learning rate grows all at once, or falls back to the start of a warmup that was over."""
    near = before[-_LAST:]
    if len(near) < 2 or not after:
        return False
    usual = max(abs(one - other) for part in (near, after) for one, other in pairwise(part))
    if after[0] > max(_BACK * near[-1], near[-1] + _BACK_STEPS * usual):
        return True
    return near[-1] <= near[0] and after[-1] > after[0] and _BACK * after[0] < near[-1]


def _before_resume(values: Sequence[T], epochs: Sequence[float | None], first: int, at: int) -> Sequence[T]:
    """The values of a run before its resume, without those of steps that the resume replays."""
    epoch = epochs[at]
    if epoch is None:
        return values[first:at]
    return [values[k] for k in range(first, at) if (own := epochs[k]) is None or own < epoch]


def _resumes(text: str, losses: Sequence[tuple[int, float]]) -> list[tuple[int, int, int]]:
    """Resumes in a log: the place of the line, the index of the run's first loss, and that of the first one after the resume.

    A line says so, or epochs continue after a start, or an epoch is lower than the one before. A run whose epochs begin where
    those of the last one began is another run.
    """
    places = [place for place, _ in losses]
    epochs = _on_lines(_EPOCH, text, places)
    said = {bisect(places, m.start()): m.start() for m in reversed([*_RESUMES.finditer(text)])}
    started = {bisect(places, m.start()): m.start() for m in reversed([*_STARTS.finditer(text)])}
    found, first = list[tuple[int, int, int]](), 0
    for at in range(1, len(losses)):
        before, epoch, began = epochs[at - 1], epochs[at], epochs[first]
        goes_back = epoch is not None and before is not None and epoch < before
        if at in said:
            found.append((said[at], first, at))
        elif (at in started or goes_back) and epoch is not None and began is not None:
            if epoch > began:
                found.append((started.get(at, places[at]), first, at))
            else:
                first = at
    return found


def _on_lines(number: re.Pattern[str], text: str, places: Sequence[int]) -> list[float | None]:
    """The number that the line of each loss names after it, in the same order."""
    found: list[float | None] = [None] * len(places)
    for m in number.finditer(text):
        at = bisect(places, m.start()) - 1
        if (
            at >= 0
            and found[at] is None
            and m.start() - places[at] < _LINE_CHARS
            and text.find("\n", places[at], m.start()) < 0
        ):
            found[at] = float(m[1])
    return found


def _jump_after(points: Mapping[int, float], saved: Mapping[int, str]) -> tuple[str, float, float] | None:
    """The first of the ``saved`` steps after which the loss is higher than before, as :func:`_jump_in` has it."""
    steps = [step for step in sorted(points) if math.isfinite(points[step])]
    values = [points[step] for step in steps]
    for step in sorted(saved):
        at = bisect(steps, step)
        if at >= _LEAST_BEFORE_SAVE and (
            jump := _higher(values[max(0, at - _BEFORE) : at], values[at : at + _AFTER])
        ):
            return os.path.basename(saved[step]), *jump
    return None


def _higher(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """The loss before and after, if it jumped: at the first step, or over several, as fresh moments make it grow."""
    if not before or not after:
        return None
    if len(before) < _LEAST_BEFORE:
        highest, lowest = max(before), min(after[:_WORST])
        return (highest, lowest) if lowest > _JUMP * highest else None
    near = before[-_LAST:]
    newest = before[-_FEW:]
    flat = _without_trend(newest, _TREND)
    if flat is newest:
        flat = _without_trend(before, _TREND)
    level = fmean(flat) if flat is before else max(fmean(flat), median(near))
    highest, deviation = max(flat), stdev(flat)
    if after[0] > max(level + _SPIKE_DEVIATIONS * deviation, _SPIKE * highest):
        return level, after[0]
    worst = sorted(after)[-_WORST:]
    if len(worst) == _WORST and worst[0] > max(level + _DEVIATIONS * deviation, _JUMP * highest):
        return level, fmean(worst)
    falls = all(one > other for one, other in pairwise(near))
    flat = _without_trend(near, _SURE_TREND)
    first = after[:_WORST]
    if len(before) >= _FEW or len(first) < _WORST or not falls or flat is near:
        return None
    least = max(fmean(flat) + _SPIKE_DEVIATIONS * stdev(flat), _JUMP * max(flat))
    return (fmean(flat), fmean(first)) if min(first) > least else None


def _without_trend(losses: Sequence[float], share: float) -> Sequence[float]:
    """Losses that fall along a line, moved along it to its end; others as they are. The line leaves at most ``share`` of the variance."""
    places = range(1 - len(losses), 1)
    slope = linear_regression(places, losses).slope
    flat = [loss - slope * k for k, loss in zip(places, losses, strict=True)]
    return flat if slope < 0 and stdev(flat) ** 2 < share * stdev(losses) ** 2 else losses


def _rise(losses: Sequence[float]) -> tuple[float, float] | None:
    """The median of the lowest tenth of a log and that of the last one, if that is much higher."""
    if len(losses) < _LEAST_TREND:
        return None
    tenth = len(losses) // 10
    medians = [median(losses[k * tenth : (k + 1) * tenth]) for k in range(9)]
    low, last = min(medians), median(losses[-tenth:])
    return (low, last) if last > _RISE * low else None


def _line_at(text: str, place: int) -> str:
    start, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
    line = text[max(start, place - 200) : len(text) if end < 0 else min(end, place + 10 * _LINE_CHARS)]
    return " ".join(line.split())[:_LINE_CHARS]


def _first_line(known: Known, text: str) -> str | None:
    """The first line of a kind, cut. Looks at each line once for each of the kind's texts."""
    found = [place for sign in known.lines if (place := _first_place(known, sign, text)) is not None]
    if not found:
        return None
    return _line_at(text, min(found))


def _first_place(known: Known, sign: str, text: str) -> int | None:
    at = text.find(sign)
    while at >= 0:
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        end = len(text) if end < 0 else end
        if (known.unless is None or text.find(known.unless, start, end) < 0) and all(
            re.compile(one).search(text, start, end) for one in known.also
        ):
            return at
        at = text.find(sign, end)
    return None
