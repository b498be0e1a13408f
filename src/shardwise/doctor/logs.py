"""Known lines of logs: what each means, and where that was met. Reading a log finds the first line of each kind."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, linear_regression, median, stdev

from ..errors import SourceError
from ..objects import frozen
from .facts import Log
from .rules import RULES, Rule

#: The value before and after, if one jumps between those before and those after.
_Compare = Callable[[Sequence[float], Sequence[float]], tuple[float, float] | None]

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


#: The rules over known lines.
KNOWN = tuple(rule for rule in RULES if rule.lines)


def read_log(path: str) -> Log:
    """The known lines of a text file. Rank-local; reads at most 32 MiB. Raises :class:`SourceError`."""
    text, is_whole = _text_of(path)
    firsts = {known.line: [_first_place(known, sign, text) for sign in known.lines] for known in KNOWN}
    lines = {
        name: _line_at(text, min(one for one in found if one is not None))
        for name, found in firsts.items()
        if any(one is not None for one in found)
    }
    found = [(m.start(), float(m[1])) for m in _LOSS.finditer(text)]
    places = [place for place, loss in found if math.isfinite(loss)]
    losses = [loss for _, loss in found if math.isfinite(loss)]
    bad = next((place for place, loss in found if not math.isfinite(loss)), None)
    rates = _on_lines(_RATE, text, places)
    return Log(
        path=path,
        lines=lines,
        first_loss=losses[0] if losses else None,
        losses=len(found),
        jump=_jump_in(text, places, losses, _higher, _AFTER, counts_lines=is_whole),
        rate_jump=_jump_in(text, places, rates, _back, _LAST, counts_lines=is_whole),
        resumed="model-only" in lines or bool(_resumes(text, places)),
        not_a_number=None if bad is None else _line_at(text, bad),
        rise=_rise(losses),
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
    found = [m for m in _LOSS.finditer(text) if math.isfinite(float(m[1]))]
    places, printed = [m.start() for m in found], [m[1] for m in found]
    steps = [step for place in places if (step := _step_at(text, place)) is not None]
    names_steps = bool(steps) and len(steps) == len(found)
    if not names_steps:
        steps = list(range(1, len(found) + 1))
    points = dict(zip(steps, map(float, printed), strict=True))
    # The last step from which a run can have continued: one that crashed had logged later ones.
    resumes = tuple(
        max((one for one in steps[:at] if one < steps[at]), default=max(steps[at] - 1, 0))
        for _, _, at in _resumes(text, places)
    )
    significant = max((len(one.replace(".", "").lstrip("0")) for one in printed), default=0)
    decimals = max((len(one.partition(".")[2]) for one in printed), default=0)
    return LoggedLosses(points, names_steps, resumes, (significant, decimals))


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

    def higher(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
        return _higher(before, after) if len(before) >= _LEAST_BEFORE_SAVE else None

    def back(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
        """But for a schedule that restarts: it has come to its end before."""
        jump = _back(before, after)
        return jump if jump and before[-1] > _RESTARTS * max(before) else None

    jump = _jump_after(points, saved, higher, _AFTER)
    rate_jump = _jump_after(rates, saved, back, _LAST)
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
    text: str,
    places: Sequence[int],
    values: Sequence[float | None],
    compare: _Compare,
    most_after: int,
    *,
    counts_lines: bool,
) -> tuple[str, float, float] | None:
    """The line of the first resume at which ``compare`` sees a jump of the values, and the value before and after.

    ``values``: of the line of each loss, at ``places``; None where it has none. ``most_after``: those that are compared.
    """
    epochs = _on_lines(_EPOCH, text, places)
    for (place, first, at), (_, _, end) in pairwise([*_resumes(text, places), (0, 0, len(values))]):
        before = [one for one in _before_resume(values, epochs, first, at) if one is not None]
        after = [one for one in values[at : min(end, at + most_after)] if one is not None]
        if jump := compare(before, after):
            return _where(text, places[at], epochs[at], place, counts_lines=counts_lines), *jump
    return None


def _where(text: str, loss: int, epoch: float | None, resume: int, *, counts_lines: bool) -> str:
    """Where a run continues: the line and the epoch of its first loss, and the line that speaks of a resume."""
    where = [f"line {text.count(chr(10), 0, loss) + 1}"] if counts_lines else []
    where += [] if epoch is None else [f"epoch {epoch:g}"]
    said = [_line_at(text, resume)] if _RESUMES.match(text, resume) else []
    return ", ".join([*where, *said]) or _line_at(text, loss)


def _jump_after(
    points: Mapping[int, float], saved: Mapping[int, str], compare: _Compare, most_after: int
) -> tuple[str, float, float] | None:
    """The first of the ``saved`` steps after which ``compare`` sees a jump, as :func:`_jump_in` has it."""
    steps = [step for step in sorted(points) if math.isfinite(points[step])]
    values = [points[step] for step in steps]
    for step in sorted(saved):
        at = bisect(steps, step)
        if jump := compare(values[:at], values[at : at + most_after]):
            return os.path.basename(saved[step]), *jump
    return None


def _back(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """The learning rate before and after, if it grows all at once, or falls back to the start of a warmup that was over."""
    near = before[-_LAST:]
    if len(near) < 2 or not after:
        return None
    usual = max(abs(one - other) for part in (near, after) for one, other in pairwise(part))
    grows = after[0] > max(_BACK * near[-1], near[-1] + _BACK_STEPS * usual)
    begins = near[-1] <= near[0] and after[-1] > after[0] and _BACK * after[0] < near[-1]
    return (near[-1], after[0]) if grows or begins else None


def _before_resume(
    values: Sequence[float | None], epochs: Sequence[float | None], first: int, at: int
) -> Sequence[float | None]:
    """The values of a run before its resume, without those of steps that the resume replays."""
    epoch = epochs[at]
    if epoch is None:
        return values[first:at]
    return [values[k] for k in range(first, at) if (own := epochs[k]) is None or own < epoch]


def _resumes(text: str, places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Resumes in a log: the place of the line, the index of the run's first loss, and that of the first one after the resume.

    A line says so, or epochs continue after a start, or an epoch is lower than the one before. A run whose epochs begin where
    those of the last one began is another run.
    """
    epochs = _on_lines(_EPOCH, text, places)
    said = {bisect(places, m.start()): m.start() for m in reversed([*_RESUMES.finditer(text)])}
    started = {bisect(places, m.start()): m.start() for m in reversed([*_STARTS.finditer(text)])}
    found, first = list[tuple[int, int, int]](), 0
    for at in range(1, len(places)):
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


def _higher(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """The loss before and after, if it jumped: at the first step, or over several, as fresh moments make it grow."""
    before = before[-_BEFORE:]
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


def _first_place(known: Rule, sign: str, text: str) -> int | None:
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
