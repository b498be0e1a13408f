"""The command line as a program: options, help, the terminal, and how a command ends."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import posixpath
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console

from .. import errors
from ..errors import PlanError, RankError, ShardwiseError
from ..objects import frozen
from ..operations.operation import Bars, following

if TYPE_CHECKING:
    from ..catalog.records import StoredTensor

# ----------------------------------------------------------------------------------------------------
# How a command ends: its exit status, and one paragraph for an error instead of a traceback.

FINE, WRONG_DATA, WRONG_USAGE = 0, 1, 2
ONLY_A_PART = 3  # of ``verify``: what is here is sound, and the rest of the step lies on other hosts
INTERRUPTED = 130  # the status that shells expect after Ctrl-C

#: Where no bar can be drawn, operations that take longer get lines on stderr.
LINES_AFTER_S = 5.0
#: Loggers of packages that transformers imports: which of their GPU extensions can't be loaded, and deprecations between them.
_NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes")
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
        for stream in (
            sys.stdout,
            sys.stderr,
        ):  # names of files and tensors may hold text that a terminal can't show
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        as_json = "--json" in options
        with _logging(debug="--debug" in options, with_progress=not as_json):
            try:
                with nullcontext() if as_json else following(Bars(lines_after_s=LINES_AFTER_S)):
                    status = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
                sys.stdout.flush()
            except BaseException as error:
                if isinstance(error, SystemExit) or (
                    isinstance(error, OSError) and error.errno == errno.EPIPE
                ):
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


def answer(report: Any, as_json: bool, show: Callable[[Console, Any], None]) -> None:
    """A command's report: its JSON, or what ``show`` prints of it."""
    if as_json:
        print_json(report.to_json())
    else:
        show(console(), report)


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
    try:
        rank, _ = rank_of_launcher()
    except click.UsageError:
        rank = 0
    if debug and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    elif isinstance(error, ShardwiseError) and helps(error):
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


# ----------------------------------------------------------------------------------------------------
# The process's streams


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


def _stop_writing(error: BaseException) -> int:
    """End silently when the reader of our output is gone (``| head``), also when the interpreter flushes."""
    if isinstance(error, SystemExit) and not isinstance(error.code, int):
        return FINE if error.code is None else WRONG_DATA
    if isinstance(error, SystemExit):
        return int(error.code or FINE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return WRONG_DATA


# ----------------------------------------------------------------------------------------------------
# Which step a command takes of a run's directory.


def one_step(path: str) -> str:
    """``path``; of a directory of steps the newest valid one, as a resume takes it, and a line on stderr says so.

    Under a launcher every rank must call it, and rank 0 decides: a run may publish a step meanwhile. Raises as :func:`.newest_step`.
    """
    from ..ranks.ranks import Ranks
    from ..runs.history import newest_step

    ranks = Ranks.current()

    def look() -> list[str]:
        found = newest_step(path) if ranks.rank == 0 else None
        if found is None:
            return [path, ""]
        what = "the newest one (not checked)" if found.ok is None else "the newest valid one"
        return [found.path, f"{path}: using step {found.step}, {what}: {found.path}"]

    taken, said = ranks.combine("choose the step", look, lambda found: found[0])
    if said and ranks.rank == 0:
        click.echo(said, err=True)
    return taken


# ----------------------------------------------------------------------------------------------------
# The sections of docs/errors.md, for people at a terminal.

#: The types that have a section.
ERRORS = tuple(name for name in errors.__all__ if name.endswith("Error"))

_PAGE = "docs/errors.md"  # errors.md of the package is a link to it, and a copy of it in a wheel
#: A row of a table: cause and fix.
_ROW = re.compile(r"^\| (`.+?) \| (.+) \|$", re.MULTILINE)
#: Characters of a part of an error's text that says more than a word.
_LEAST_PART = 8
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]+)\)")


def anchor_of(name: str) -> str:
    """The page and anchor of an error's section in the documentation."""
    return f"{_PAGE}#{name.lower()}"


def section_of(name: str) -> str:
    """The section of an error, as Markdown. Links are text: ``words (docs/howto/own-loop.md)``."""
    return _LINK.sub(_as_text, f"## {_sections()[name].rstrip()}\n")


def rows_of(text: str) -> list[tuple[str, str, str]]:
    """The rows of all sections whose cause is in the text of an error: the section, the cause and the fix, as Markdown."""
    return [(name, *row) for name, section in _sections().items() for row in _matching(section, text)]


def doctors_rules(name: str) -> str:
    """What doctor's check of this name looks for, or those that mention this setting, as Markdown; empty if there are none."""
    from ..doctor.rules import RULES

    is_setting = re.fullmatch(r"[a-z]+(_[a-z]+)+", name) is not None
    found = [
        r for r in RULES if r.id == name or (is_setting and name in re.findall(r"\w+", f"{r.id} {r.about}"))
    ]
    return "\n\n".join(
        f"**{r.id}**: {r.about}\n\nshardwise doctor PATH… checks for it, and says why it happened and what to do "
        f"(docs/howto/doctor.md). Source: {r.source}"
        for r in found
    )


def helps(error: errors.ShardwiseError) -> bool:
    """Whether the section of an error says something of this one: a row of its table, or the section has none."""
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    causes = getattr(error, "causes", None)
    section = _sections()[name]
    return not _ROW.search(section) or bool(causes) or bool(_matching(section, str(error)))


def _sections() -> dict[str, str]:
    page = Path(errors.__file__).with_name("errors.md").read_text(encoding="utf-8")
    found = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {section.partition("\n")[0]: section for section in found if section.partition("\n")[0] in ERRORS}


def _matching(section: str, text: str) -> list[tuple[str, str]]:
    words = " ".join(text.split())
    return [
        (row[1], _LINK.sub(_as_text, row[2]))
        for row in _ROW.finditer(section)
        if any(
            _pattern(cause).search(words) or (len(words) > _LEAST_PART and words in cause)
            for cause in re.findall(r"`([^`]+)`", row[1])
        )
    ]


def _pattern(cause: str) -> re.Pattern[str]:
    """A text of the table, in which ``…``, a quoted name, a word in capitals and a number stand for any."""
    parts = re.split(r"…|'[^']*'|\b\d+\b", cause)
    return re.compile(".*?".join(re.escape(part.strip()) for part in parts), re.DOTALL)


def _as_text(link: re.Match[str]) -> str:
    target = link[2].partition("#")[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_PAGE), target))
    return f"{link[1]} ({path})" if target else link[1]


# ----------------------------------------------------------------------------------------------------
# Options that several commands share, and the types of their values.


class AnyPath(click.Path):
    """A path or URL, which need not exist; click's own fails with a traceback where it has a NUL character."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "\0" in str(value):
            self.fail("a path can't contain a NUL character", param, ctx)
        return super().convert(value, param, ctx)


#: The dtypes in which a model can be built or exported.
DTYPES = ("bfloat16", "float16", "float32", "float64")

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:[Ee]\+?\d{1,2})?)\s*([A-Za-z]*)\s*")
#: More bytes than this are a mistake, and do not fit into the numbers of other tools.
_LIMIT_BYTES = 2**63


def byte_count(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A number of bytes from ``500MB`` (powers of 1000), ``5GiB`` (powers of 1024), or a plain number, also as ``2e9``."""
    found = _SIZE.fullmatch(value)
    unit = _UNITS.get(found[2].upper()) if found else None
    nbytes = int(float(found[1]) * unit) if found and unit and len(found[1]) < 16 else 0
    if not 1 <= nbytes < _LIMIT_BYTES:
        raise click.BadParameter(
            f"{value!r} is not a size; write, for example, 5GB, 500MiB or a number of bytes (2000000000, 2e9)",
            context,
            parameter,
        )
    return nbytes


#: A device or a disk with less than this is a number without its unit.
_LEAST_MEMORY_BYTES = 64 * 1024**2


def memory_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """As :func:`byte_count`, for memory and bandwidth: refuses ``80``, which is 80 bytes, and names what was probably meant."""
    if value is None:
        return None
    nbytes = byte_count(context, parameter, value)
    if nbytes < _LEAST_MEMORY_BYTES and not value.strip()[-1].isalpha():
        raise click.BadParameter(
            f"{value} without a unit is {nbytes:,} bytes; did you mean {value.strip()}GiB?",
            context,
            parameter,
        )
    return nbytes


def check_axes(*, ranks: int, nodes: int, replicas: int, tp: int, ep: int) -> None:
    """Raise ``BadParameter`` for counts of ranks that can't be arranged so."""
    for name, value, of in (
        ("nodes", ranks >= nodes, f"{nodes} nodes need at least as many ranks, got {ranks}"),
        ("replicas", ranks % replicas == 0, f"{replicas} does not divide {ranks} ranks"),
        ("tp", ranks % (replicas * tp) == 0, f"{tp} does not divide the ranks of a replica"),
        ("ep", ranks % (replicas * ep) == 0, f"{ep} does not divide the ranks of a replica"),
        ("ep", ep == 1 or ep % tp == 0, f"{ep} is not a multiple of --tp {tp}"),
    ):
        if not value:
            raise click.BadParameter(of, param_hint=f"'--{name}'")


Command = Callable[..., Any]


def options(*given: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A group of options as one decorator, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(given):
            command = option(command)
        return command

    return decorate


option = partial(click.option, default=None)
#: For the program and for each command: people write it before a command and after it. The program itself reads both this
#: and ``--json``, also when parsing fails.
debug = click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks.")
common = options(
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."), debug
)
#: A path or URL, unchecked: the readers raise better errors.
source_path = click.argument("path", type=AnyPath(path_type=str))
config = option(
    "--config",
    type=AnyPath(path_type=str),
    metavar="DIR",
    help="Directory with config.json, tokenizer and custom code, if PATH has none.",
)
one_model = option(
    "--model-name", "--model", metavar="NAME", help="Model to use, if the checkpoint has several."
)
trust_remote_code = click.option(
    "--trust-remote-code", is_flag=True, help="Run the Python files that come with the model."
)
_CLASS_HELP = "Model class or Auto class, from transformers or MODULE. Default: the class in the config."
_PATTERNS: dict[str, Any] = {"multiple": True, "metavar": "PATTERN"}
#: The arguments of ``load_pretrained`` that choose the model and its source.
as_load_pretrained = options(
    option("--auto-class", metavar="[MODULE:]CLASS", help=_CLASS_HELP),
    click.option(
        "--key-mapping", nargs=2, multiple=True, metavar="REGEX TEXT", help="Rename stored tensors."
    ),
    click.option("--allow-unused", help="Stored tensors that the model may leave unused.", **_PATTERNS),
    click.option("--allow-missing", help="Tensors that may be missing from PATH.", **_PATTERNS),
    option(
        "--adapter",
        metavar="DIR",
        help="Adapter to load, or to create if DIR contains only adapter_config.json.",
    ),
    click.option(
        "--quantized",
        type=click.Choice(("dequantize", "keep", "nf4", "fp4")),
        default="dequantize",
        show_default=True,
        help="Dequantize, keep the stored codes, or quantize plain weights to 4 bits.",
    ),
    option("--revision", help="Branch, tag, or commit on the Hub."),
    click.option("--subfolder", default="", metavar="DIR", help="Folder in PATH that contains the model."),
    option("--variant", help="Use model.VARIANT.safetensors."),
    option("--cache-dir", metavar="DIR", help="Hub cache. Default: HF_HUB_CACHE."),
)


def model_class(name: str | None) -> Any:
    """The class that ``--auto-class`` names, of transformers or of a module. Raises ``BadParameter``."""
    if name is None:
        return None
    from ..internals.transformers import can_be_built

    module, _, kind = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module or "transformers"), kind, None)
    except ImportError as error:
        raise click.BadParameter(
            f"{module} can't be imported: {error}", param_hint="'--auto-class'"
        ) from error
    if not can_be_built(found):
        where = module or "transformers"
        raise click.BadParameter(f"{where} has no model class {kind!r}", param_hint="'--auto-class'")
    return found


def quantized_as(name: str) -> Any:
    """The value of ``quantized=`` for ``--quantized``."""
    if name in ("dequantize", "keep"):
        return name
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=name)


def new_adapter(directory: str | None) -> Any:
    """The value of ``adapter=`` for ``--adapter``: the directory, or its config if it holds nothing else."""
    if directory is None or not os.path.isfile(os.path.join(directory, "adapter_config.json")):
        return directory
    if any(name.startswith("adapter_model.") for name in os.listdir(directory)):
        return directory
    from ..loading.adapters import read_adapter_config

    return read_adapter_config(directory)


# ----------------------------------------------------------------------------------------------------
# The console of a command. Needs no torch.

#: Width without a terminal: wide enough for tensor names.
_WIDTH_WITHOUT_TERMINAL = 140


def console(*, err: bool = False) -> Console:
    """The console of a command: stdout, or stderr."""
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


# ----------------------------------------------------------------------------------------------------
# Stored tensors as a tree of modules. Identical numbered siblings are folded into one.

# A file may give its tensors any names; these limits bound the tree.
_MAX_DEPTH = 64
_MAX_DIGITS = 9


@frozen
class Node:
    """A module prefix, or a tensor (then with dtype and shape).

    ``name`` is one part of the path, or a range such as ``0-27`` for ``copies`` identical siblings; ``tensors`` and
    ``nbytes`` count all copies.
    """

    name: str
    copies: int
    tensors: int
    nbytes: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    children: tuple[Node, ...] = ()


@dataclass(slots=True)
class _Branch:
    """A module while the tree grows; a name may be both a tensor and a prefix."""

    tensor: StoredTensor | None = None
    children: dict[str, _Branch] = field(default_factory=dict)


def tree_of(tensors: Iterable[StoredTensor]) -> tuple[Node, ...]:
    """The top of the tree. Siblings are sorted, so the order of a file does not matter."""
    root = _Branch()
    for tensor in tensors:
        branch = root
        for part in tensor.name.split(".", _MAX_DEPTH - 1):
            branch = branch.children.setdefault(part, _Branch())
        branch.tensor = tensor
    return _children(root)


def _children(branch: _Branch) -> tuple[Node, ...]:
    nodes: list[Node] = []
    numbered: dict[object, list[tuple[int, Node]]] = {}  # those that differ only in their number
    for name, child in sorted(branch.children.items()):
        found = []
        if (one := child.tensor) is not None:
            found.append(Node(name, 1, 1, one.nbytes, one.dtype, one.shape))
        if child.children:
            inner = _children(child)
            tensors, nbytes = sum(c.tensors for c in inner), sum(c.nbytes for c in inner)
            found.append(Node(name, 1, tensors, nbytes, children=inner))
        if name.isdecimal() and name.isascii() and len(name) <= _MAX_DIGITS:
            for node in found:
                numbered.setdefault((node.dtype, node.shape, node.children), []).append((int(name), node))
        else:
            nodes += found
    for alike in numbered.values():
        alike.sort(key=lambda pair: pair[0])
        count, first = len(alike), alike[0][1]
        name = _ranges([number for number, _ in alike])
        totals = first.tensors * count, first.nbytes * count
        nodes.append(replace(first, name=name, copies=count, tensors=totals[0], nbytes=totals[1]))
    return tuple(nodes)


def _ranges(numbers: list[int]) -> str:
    """``0-2,5,7-8`` for sorted numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
