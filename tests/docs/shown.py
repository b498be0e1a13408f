"""Outputs that the pages show, and whether they are what is printed. Everything must be equal but what ``VARIES``.

In a ``text`` or ``console`` block a line of ``…`` stands for any lines, ``…`` in a line for any text, and at its end for the lines in which
it is continued, too. In Python a comment shows a
value: after ``print(…)`` or in the line below it, and after an expression if it begins as a value does (``# 75: start me again``). A comment
that begins with a path shows a file that the block writes.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["check", "check_values", "is_alike", "paths", "run_and_check", "values"]

#: What differs from run to run or from machine to machine, and what stands for it on both sides.
VARIES = (
    (r"\bin \d+(\.\d+)? s\b", "in # s"),
    (r"\b\d+(\.\d+)? [KMG]?i?B/s", "# B/s"),
    (r"\btook \d+\.\d+ times", "took # times"),
    (r"^( *took +)\d+(\.\d+)? s$", r"\1# s"),
    (r"\b(from|at) byte \d+ of the load", r"\1 byte # of the load"),
    (r"\b[0-9a-f]{16}\b", "#digest"),
    (r"(?<!-)\b[0-9a-f]{8}\b", "#run"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d\b", "#time"),
    (r"^(this host +)\S+ \S+ free of \S+ \S+ \(.*\)$", r"\1#"),
    (r"; using \d+ threads$", ""),
)
#: How a comment begins that shows the value of an expression. After an assignment only what no sentence begins with.
_VALUE = re.compile(
    r"(\d+(?:\.\d+)?(?=$|[:; ])|(?:None|True|False|'[^']*'|\[.*\]|\{.*\}|\(.*\)|[A-Z]\w*\(.*\)|[A-Z]\w*Error)(?=$|[:;]| that ))"
)
_PATH = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)+)(?=$|[,;])")
_ASSIGNED = re.compile(r"(\[.*\]|\{.*\}|\(.*\)|[A-Z]\w*\(.*\))(?=$|[:;])")


def _plain(text: str) -> str:
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")
    for pattern, replacement in VARIES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def _pattern(line: str) -> str:
    """Of a line and its end; for one that ends in dots also of the indented lines in which it goes on."""
    if line == "…":
        return r"(?:.*\n)*"
    rest = r"(?:\n +.*)*" if line.endswith("…") else ""
    return re.escape(line).replace("…", ".*") + rest + "\n"


def is_alike(shown: str, printed: str) -> bool:
    """Whether what is shown is all that was printed, but for what it leaves out with dots."""
    lines = [_pattern(line) for line in _plain(shown).split("\n")]
    return re.fullmatch("".join(lines), _plain(printed) + "\n") is not None


def check(where: object, shown: str, printed: str) -> None:
    """Fail unless ``shown`` is what was printed."""
    if is_alike(shown, printed):
        return
    lines = _plain(printed).split("\n")
    lost = [
        line
        for line in _plain(shown).split("\n")
        if line != "…" and not any(re.fullmatch(re.escape(line).replace("…", ".*"), one) for one in lines)
    ]
    reason = lost or "nothing: the order differs, or lines are left out"
    raise AssertionError(f"{where} shows\n{shown}\nand this is printed:\n{printed}\nNot printed: {reason}")


# ----------------------------------------------------------------------------------------------------
# Values in comments of Python blocks


def values(code: str) -> dict[int, str]:
    """The values that comments show, by the last line of their statements."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return {}
    found: dict[int, str] = {}
    comments, alone = _comments(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            line = node.end_lineno or 0
            if _calls(node.value, "print"):
                below = alone.get(line + 1)
                if text := comments.get(line) or below:
                    found[line] = text
            elif _VALUE.match(comments.get(line, "")) and not isinstance(node.value, ast.Constant):
                found[line] = comments[line]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            line = node.end_lineno or 0
            if _ASSIGNED.match(comments.get(line, "")):
                found[line] = comments[line]
    return found


def paths(code: str) -> list[str]:
    """The paths of files that comments say a Python block has written: comments that begin with one."""
    after, alone = _comments(code)
    found = [_PATH.match(text) for text in (*after.values(), *alone.values())]
    return [match[1] for match in found if match]


def _comments(code: str) -> tuple[dict[int, str], dict[int, str]]:
    """By line: comments after code, and those that have a line of their own."""
    after: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            is_alone = not token.line[: token.start[1]].strip()
            (alone if is_alone else after)[token.start[0]] = token.string.removeprefix("#").strip()
    return after, alone


def _calls(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def check_values(where: object, comment: str, value: str) -> None:
    """Fail unless a comment shows this value, and possibly a remark after it."""
    found = _VALUE.match(comment)
    shown = found[1] if found and not is_alike(comment, value) else comment
    check(where, shown, value)


class _Shown(ast.NodeTransformer):
    """Makes each statement whose value a comment shows hand its value to ``__shown__``."""

    def __init__(self, lines: dict[int, str]) -> None:
        self._lines = lines

    def _handed(self, node: ast.expr, line: int) -> ast.expr:
        hand = ast.parse(f"__shown__({line}, lambda: 0)", mode="eval").body
        assert isinstance(hand, ast.Call)
        assert isinstance(hand.args[1], ast.Lambda)
        hand.args[1].body = node
        return hand

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        line = node.end_lineno or 0
        if line in self._lines:
            if _calls(node.value, "sys.exit"):
                assert isinstance(node.value, ast.Call)
                node.value.args = [self._handed(node.value.args[0], line)]
            else:
                node.value = self._handed(node.value, line)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        line = node.end_lineno or 0
        if line in self._lines:
            node.value = self._handed(node.value, line)
        return node


def run_and_check(where: object, code: str, names: dict[str, Any], file: str = "", line: int = 1) -> None:
    """Run a Python block, and fail unless each value is what its comment shows. ``line``: where it begins in ``file``."""
    shown = values(code)
    waiting = dict(shown)

    def compare(at: int, run: Callable[[], Any]) -> Any:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                value = run()
        except Exception as error:
            if not shown[at].startswith(type(error).__name__):
                raise
            waiting.pop(at, None)
            return None
        check_values(f"{where}, its line {at},", shown[at], printed.getvalue() or repr(value))
        waiting.pop(at, None)
        return value

    tree = ast.increment_lineno(ast.fix_missing_locations(_Shown(shown).visit(ast.parse(code))), line - 1)
    names["__shown__"] = compare
    try:
        exec(compile(tree, file or str(where), "exec"), names)
    finally:
        del names["__shown__"]
    assert not waiting, f"{where}: no value for {list(waiting.values())}"
    for path in paths(code):
        assert Path(path).exists(), f"{where} writes no {path}"
