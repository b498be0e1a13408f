"""How a command ends: its exit status, and one paragraph for an error instead of a traceback."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import click

from ..errors import PlanError, RankError, ShardwiseError
from ..operations.bars import Bars
from ..operations.listeners import following

__all__ = [
    "FINE",
    "INTERRUPTED",
    "ONLY_A_PART",
    "WRONG_DATA",
    "WRONG_USAGE",
    "Program",
    "print_json",
    "rank_of_launcher",
]

FINE, WRONG_DATA, WRONG_USAGE = 0, 1, 2
ONLY_A_PART = 3  # of ``verify``: what is here is sound, and the rest of the step lies on other hosts
INTERRUPTED = 130  # the status that shells expect after Ctrl-C

#: Where no bar can be drawn, operations that take longer get lines on stderr.
LINES_AFTER_S = 5.0
#: Loggers of packages that transformers imports: which of their GPU extensions can't be loaded, and deprecations between them.
_NOISY = ("torchao", "torch.utils._pytree")
#: Findings of one error that are shown; ``--json`` gives all.
_SHOWN_PROBLEMS = 20


#: The commands of ``shardwise --help``, by what they are for.
GROUPS = {
    "Before a run": ("plan", "doctor", "demo"),
    "Look at files": ("inspect", "verify", "diff", "report"),
    "Write files": ("export", "convert", "copy"),
    "Help": ("explain",),
}


class Program(click.Group):
    """A group of commands that never ends in a traceback (except with ``--debug``, for unexpected errors).

    Commands return their exit status, or None for 0.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command line ``args`` (default: the process's own) and exit with its status."""
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        options = given[: given.index("--")] if "--" in given else given
        _take_any_text()
        as_json = "--json" in options
        with _logging(debug="--debug" in options, with_progress=not as_json):
            try:
                with nullcontext() if as_json else following(Bars(lines_after_s=LINES_AFTER_S)):
                    status = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
                sys.stdout.flush()
            except BaseException as error:
                if isinstance(error, SystemExit) or _is_broken_pipe(error):
                    status = _stop_writing(error)
                else:
                    status = _report(error, as_json=as_json, debug="--debug" in options)
        sys.exit(status or FINE)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands in groups, each with one line."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(60)) for name in names])


def print_json(document: Any) -> None:
    """The one JSON document of a command, on stdout."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def rank_of_launcher() -> tuple[int, int]:
    """(rank, world size) that torchrun or another launcher gave this process; (0, 1) without one."""
    try:
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise click.UsageError("RANK and WORLD_SIZE in the environment must be numbers") from None
    if not 0 <= rank < world_size:
        raise click.UsageError(
            f"RANK={rank} and WORLD_SIZE={world_size} in the environment contradict each other"
        )
    return rank, world_size


# ----------------------------------------------------------------------------------------------------
# Errors


def _report(error: BaseException, *, as_json: bool, debug: bool) -> int:
    """Tell people on stderr and, if JSON was asked for, programs on stdout. Returns the exit status."""
    status, message, document = _in_words(error)
    rank = _own_rank()
    if debug and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    elif isinstance(error, ShardwiseError):
        from .manual import helps  # not before there is an error

        if helps(error):
            message = "\n".join((message, *getattr(error, "__notes__", ())))  # the traceback has them, too
    if rank == 0 and as_json:
        print_json({"error": document})
    if rank == 0 or not isinstance(error, RankError | click.ClickException):
        head = click.style("error:", fg="red", bold=True)  # without colors where stderr is no terminal
        click.echo(f"{f'rank {rank}: ' if rank else ''}{head} {message}", err=True)
    return status


def _in_words(error: BaseException) -> tuple[int, str, dict[str, Any]]:
    """Exit status, paragraph, and the facts as JSON values."""
    document: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, click.ClickException):
        document["message"] = message = error.format_message()
        context = getattr(error, "ctx", None)
        if context is not None:
            message += f" (see '{context.command_path} --help')"
        return WRONG_USAGE, message, document
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED, "interrupted", {**document, "message": "interrupted"}
    if isinstance(error, ShardwiseError):
        facts = {
            name: value for name in ("path", "problems", "causes") if (value := getattr(error, name, None))
        }
        return WRONG_DATA, _shortened(error), {**document, **facts}
    if isinstance(error, MemoryError):
        message = "out of memory"
    elif isinstance(error, OSError):
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    else:
        summary = " ".join(str(error).split())
        message = f"unexpected {type(error).__name__}: {summary}; this is a bug, run again with --debug"
    return WRONG_DATA, message, {**document, "message": message}


def _shortened(error: ShardwiseError) -> str:
    """The error's text without empty lines, and with a limited number of findings."""
    text = str(error)
    if isinstance(error, PlanError) and len(error.problems) > _SHOWN_PROBLEMS:
        summary = text.partition("\n")[0]
        more = f"  - and {len(error.problems) - _SHOWN_PROBLEMS} more (--json lists all)"
        text = "\n".join([summary, *(f"  - {p}" for p in error.problems[:_SHOWN_PROBLEMS]), more])
    return "\n".join(line for line in text.splitlines() if line.strip())


def _own_rank() -> int:
    try:
        return rank_of_launcher()[0]
    except click.UsageError:
        return 0


# ----------------------------------------------------------------------------------------------------
# The process's streams


def _take_any_text() -> None:
    """Accept text that a terminal can't show: names of files and tensors may hold it."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _logging(*, debug: bool, with_progress: bool) -> Iterator[None]:
    """Show the package's log on stderr while a command runs; ``with_progress``: also the lines of operations without a bar.

    What other packages log while they are imported is not shown without ``debug``.
    """
    logger, lines, handler = (
        logging.getLogger("shardwise"),
        logging.getLogger("shardwise.progress"),
        logging.StreamHandler(),
    )
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    others = [] if debug else [logging.getLogger(name) for name in _NOISY]
    before = [(one, one.level) for one in (logger, lines, *others)]
    for one in others:
        one.setLevel(logging.ERROR)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    lines.setLevel(logging.INFO if with_progress else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for one, level in before:
            one.setLevel(level)


def _is_broken_pipe(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _stop_writing(error: BaseException) -> int:
    """End silently when the reader of our output is gone (``| head``), also when the interpreter flushes."""
    if isinstance(error, SystemExit) and not isinstance(error.code, int):
        return FINE if error.code is None else WRONG_DATA
    if isinstance(error, SystemExit):
        return int(error.code or FINE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return WRONG_DATA
