"""An extension of griffe: docstrings are written for ``help()``; here their Sphinx roles become links."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|attr|mod):`~?([\w.]+)`")
_CODE = re.compile(r"``([^`]+)``")
_SEVERAL = re.compile(r"^( *)(\w+(?:, \w+)+): (?=\S)", re.MULTILINE)


class Roles(griffe.Extension):
    """``:func:`shardwise.load``` becomes a link to what the site has under that name, else code."""

    def __init__(self) -> None:
        package = Path(__file__).resolve().parents[2] / "src" / "shardwise"
        self._public = _exported(package / "__init__.py")
        self._errors = _exported(package / "errors.py")

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj``."""
        if obj.docstring:
            text = _CODE.sub(r"`\1`", obj.docstring.value)
            text = _ROLE.sub(lambda found: self._link(found[1], obj), text)
            if obj.is_function:
                text = _SEVERAL.sub(_one_by_one, text)
            obj.docstring.value = re.sub(r"::\n", ":\n", text)

    def _link(self, name: str, obj: griffe.Object) -> str:
        short = name.rpartition(".")[2]
        code = f"`{short}`"
        if hasattr(builtins, short):
            return code
        if short in self._errors:
            return f"[{code}][{short.lower()}]"
        if name.startswith("shardwise."):
            return f"[{code}][{name}]"
        module = obj.module.path
        home = obj if obj.is_class else obj.parent
        if home is not None and home.is_class and home.name in self._public and name in home.members:
            return f"[{code}][shardwise.{home.name}.{name}]"
        if module.startswith("shardwise.integrations.") and name in obj.module.members:
            return f"[{code}][{module}.{name}]"
        return f"[{code}][shardwise.{name}]" if name.partition(".")[0] in self._public else code


def _one_by_one(found: re.Match[str]) -> str:
    """``a, b: text`` describes two arguments; a table has a row for each."""
    indent, *names = found[1], *found[2].split(", ")
    rows = [f"{indent}{name}: See `{names[-1]}`.\n" for name in names[:-1]]
    return "".join(rows) + f"{indent}{names[-1]}: "


def _exported(file: Path) -> frozenset[str]:
    """The names in a module's ``__all__``."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()
