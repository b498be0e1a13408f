"""Words and shapes of sentences that readers stumbled over, each with what to write instead; and where texts for users are."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "SPELLINGS",
    "WORDS",
    "Found",
    "british_in_code",
    "found_in",
    "texts_of_messages",
    "texts_of_pages",
    "texts_of_the_interface",
]

ROOT = Path(__file__).resolve().parents[2]

#: What isn't written, and what is written instead.
WORDS: dict[str, str] = {
    r"\bbeside\b": "next to, in addition to, compared with",
    r"\b(?:go|goes|going|went) on\b": "continue, resume",
    r"\bby (?:itself|themselves)\b": "automatically, on its own",
    r"\banew\b": "again",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\blies?\b": "is, is stored",
    r"\bset(?:s|ting)? aside\b": "quarantine, move away",
    r"\bof which\b": "name the thing",
    r"\bas ever\b": "as usual",
    r"\balike\b": "the same, equally",
    r"\bfor good\b": "permanently",
    r"\bbites?\b": "goes wrong",
    r"\bstrange\b": "foreign, unknown",
    r"\bcures?\b": "fix",
    r"\bfall-back\b": "fallback",
    r"\bbegins? anew\b": "starts again",
    r"\bmakes? (?:no )?way\b": "make progress",
    r"\bhands? on\b": "pass on",
    r"(?:^|[.:;] )What (?=[^?]*\.(?: |$))(?![^.?]*\?)": "name the subject",
    r"(?:^|\. )Of (?:a|an|the|each|all|both|one|two|what|these|those|several)\b": "put the subject first",
    r"\bstands? (?:in|at|on|below|above)\b": "is, is written",
    r"\bby turns\b": "alternately, in turn",
}

#: British spellings, also inside identifiers, and the American ones, as PyTorch and transformers write.
SPELLINGS: dict[str, str] = {
    r"(?:author|categor|character|custom|emphas|factor|final|general|initial|local|material|maxim|minim|modular|normal|optim|organ"
    r"|parallel|priorit|quant|random|recogn|regular|real|sanit|serial|special|stabil|standard|summar|synchron|token|util|vector"
    r"|visual)is(?:e[ds]?|ers?|ing|able|ations?)(?![a-z])": "-ize",
    r"(?:anal|paral|catal)ys(?:ed?|ers?|ing)(?![a-z])": "-yze",
    r"(?:behavi|col|endeav|fav|flav|harb|hon|lab|neighb|rum)our": "-or",
    r"(?:cancel|channel|dial|fuel|label|level|marshal|model|panel|signal|total|travel|tunnel)l(?:ed|ing|ers?)(?![a-z])": "one l",
    r"(?:cent|fib|lit|met|theat)re[ds]?(?![a-z])": "-er",
    r"(?:catal|anal)ogue": "-og",
    r"licence|(?:def|off|pret)ence(?![a-z])": "-se",
    r"acknowledgement|(?<![a-z])ageing|judgement": "acknowledgment, aging, judgment",
    r"artefact|cheque|(?<![a-z])enrol(?!l)|fulfil(?!l)|grey|mould|plough|programmes?(?![a-z])|sceptic|skilful": "artifact, gray, …",
    r"(?<![a-z])(?:amongst|burnt|learnt|(?:mis)?spelt|towards|whilst)(?![a-z])": "among, learned, toward, while",
}
#: Words that others chose, in the files that need them: a state of SLURM's, another vocabulary.
_OF_OTHERS = {
    ("tests/harness/slurm.py", "CANCELLED"),
    ("tests/models/_tokenizers.py", "colour"),
}


@dataclass(frozen=True)
class Found:
    """A place where a text has such a word."""

    where: str
    match: str
    instead: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.where}: {self.match!r} (write: {self.instead}): {self.sentence}"


def found_in(where: str, text: str) -> Iterator[Found]:
    """Each such place of a text. Code in backticks isn't looked at."""
    plain = re.sub(r"``.*?``|`[^`\n]*`", "`x`", text, flags=re.DOTALL)
    plain = re.sub(r"\s+", " ", plain).strip()
    for patterns, flags in ((WORDS, re.NOFLAG), (SPELLINGS, re.IGNORECASE)):
        for pattern, instead in patterns.items():
            for match in re.finditer(pattern, plain, flags):
                around = plain[max(0, match.start() - 60) : match.end() + 60]
                yield Found(where, match.group().strip(" .:;"), instead, around)


def british_in_code() -> Iterator[Found]:
    """British spellings in Python files: comments, texts and names."""
    either = re.compile("|".join(f"(?:{one})" for one in SPELLINGS), re.IGNORECASE)
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if where in ("tests/meta/english.py", "tests/meta/test_english.py"):
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                for match in either.finditer(line):
                    if (where, match.group()) not in _OF_OTHERS:
                        yield Found(f"{where}:{number}", match.group(), "the American spelling", line.strip())


def texts_of_pages(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """The paragraphs, rows and list items of Markdown files, without code."""
    for path in paths:
        text = re.sub(
            r"^ *```.*?^ *```", "\n", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        text = re.sub(r"^    .*\n", "\n", text, flags=re.MULTILINE)
        text = re.sub(r"\]\([^)]*\)", "]", text)
        line = 1
        for block in re.split(r"\n(?=\s*\n|\s*[*-] |\||\d+\. |#)|(?<=\n)#[^\n]*\n", text):
            yield f"{path.relative_to(ROOT)}", block.strip("\n #*-|")
            line += block.count("\n") + 1


def texts_of_the_interface() -> Iterator[tuple[str, str]]:
    """Docstrings of what users import: names of ``sw`` and of the integrations, their methods and fields."""
    import shardwise as sw
    from shardwise.integrations import accelerate, trainer

    for module in (sw, sw.errors, sw.reports, accelerate, trainer):
        yield module.__name__, inspect.getdoc(module) or ""
        for name in module.__all__:
            yield from _of(f"{module.__name__}.{name}", getattr(module, name))


def _of(name: str, thing: Any) -> Iterator[tuple[str, str]]:
    yield name, inspect.getdoc(thing) or ""
    if not inspect.isclass(thing):
        return
    for base in thing.__mro__:
        if base.__module__.startswith("shardwise"):
            for method, found in vars(base).items():
                if not method.startswith("_") and (inspect.isfunction(found) or isinstance(found, property)):
                    yield f"{name}.{method}", inspect.getdoc(found) or ""
    if dataclasses.is_dataclass(thing):
        yield from _of_fields(name, thing)


def _of_fields(name: str, thing: type) -> Iterator[tuple[str, str]]:
    """The strings below the fields of a dataclass."""
    module = importlib.import_module(thing.__module__)
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
            for one in node.body:
                if (
                    isinstance(one, ast.Expr)
                    and isinstance(one.value, ast.Constant)
                    and isinstance(one.value.value, str)
                ):
                    yield f"{name} (line {one.lineno})", one.value.value


def texts_of_messages() -> Iterator[tuple[str, str]]:
    """What the package prints, logs and raises: string literals of a sentence's length outside of docstrings."""
    for path in sorted((ROOT / "src" / "shardwise").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                inside.add(node.value)
            if isinstance(node, ast.JoinedStr):
                inside.update(node.values)
                text = "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
