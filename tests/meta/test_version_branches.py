"""Releases of other packages are told apart in ``internals/`` and ``gates.py``, and elsewhere only as the table here says.

So raising a minimum in pyproject.toml deletes lines of two places.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from tests.meta.test_internals import FILES, OUTSIDE, tree_of

#: The other places: file, function and what it asks → why.
ALLOWED = {
    "loading/adapters.py::_import_peft try: import peft": "an optional package: the error names the extra",
    "checkpoint/take.py::_version version(": "versions are written into the manifest, and compared by whoever resumes",
    "checkpoint/take.py::software_versions torch.__version__": "as above",
    "demo/course.py::default_model importlib.util.find_spec(": "the package whose files the demo takes",
    "demo/run.py::draw_loss try: import matplotlib.figure": "an optional package: no picture without it",
    "doctor/facts.py::is_version SpecifierSet(": "doctor's rules are about installed versions",
    "doctor/facts.py::is_version Version(": "as above",
    "doctor/conditions.py::_software_requires Requirement(": "as above",
    "doctor/conditions.py::_release Version(": "as above",
    "doctor/facts.py::versions metadata.version(": "as above",
    "doctor/facts.py::_folder_of util.find_spec(": "where transformers' source is, without importing it",
    "models/classes.py::_diffusers_class diffusers.__version__": "an error names the version",
    "models/classes.py::_unknown transformers.__version__": "the error says which release lacks the class",
    "fit/verdict.py::_changes find_spec(": "an optional package: plans with adapters only where PEFT is installed",
    "report/records.py::plotting try: import matplotlib": "an optional package: the error names the extra",
    "storage/other_clients.py::FsspecStore.__init__ try: import fsspec.core": "an optional package: the error names it",
    "storage/by_obstore.py::_credentials try: import obstore.auth.boto3": "an optional package: the error names it",
    "storage/by_obstore.py::ObstoreStore.__init__ try: import obstore": "an optional package: the error names the extra",
}

_READERS = {
    "version",
    "metadata.version",
    "Version",
    "SpecifierSet",
    "Requirement",
    "find_spec",
    "util.find_spec",
}
_READERS |= {
    "importlib.util.find_spec",
    "importlib.metadata.version",
    "parse_version",
    "is_torch_greater_or_equal",
}
_CAUGHT = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"}


def imported(tree: ast.Module) -> set[str]:
    """Names in a file that stand for modules, classes and functions of other packages, the standard library aside."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_foreign(alias.name):
                    found.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_foreign(node.module or ""):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "shardwise"}


def branches(tree: ast.Module) -> Iterator[tuple[str, str, ast.AST]]:
    """Function, what it asks, and the node: what tells releases of other packages apart, or whether they are installed."""
    names = imported(tree)
    yield from _branches(tree, "", names)


def _branches(node: ast.AST, function: str, names: set[str]) -> Iterator[tuple[str, str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".lstrip(".")
        for asked in _asked(child, names):
            yield inner, asked, child
        yield from _branches(child, inner, names)


def _asked(node: ast.AST, names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and node.attr == "__version__":
        yield ast.unparse(node)
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in _READERS:
            yield f"{called}("
        elif called in ("hasattr", "getattr") and len(node.args) > (called == "getattr") + 1:
            root, name = node.args[0], node.args[1]
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(name, ast.Constant) and isinstance(root, ast.Name) and root.id in names:
                yield f"{called}({ast.unparse(node.args[0])}, {ast.unparse(name)})"
    elif isinstance(node, ast.Try) and any(_CAUGHT & _caught(handler) for handler in node.handlers):
        for module in (
            module for statement in node.body for module in _modules(statement) if _is_foreign(module)
        ):
            yield f"try: import {module}"
            break


def _caught(handler: ast.ExceptHandler) -> set[str]:
    return (
        set() if handler.type is None else {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
    )


def _modules(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [statement.module or ""] if isinstance(statement, ast.ImportFrom) and not statement.level else []


def test_branches_stand_in_two_places() -> None:
    """Put a small function into ``internals/`` whose docstring says between which releases it is needed, or add a row to the gates."""
    found = {
        f"{file}::{function} {asked}"
        for file in OUTSIDE
        if file != "gates.py"
        for function, asked, _ in branches(tree_of(file))
    }
    assert found - set(ALLOWED) == set()
    assert set(ALLOWED) - found == set(), "take these out of ALLOWED"


#: ``hasattr`` in internals/ that doesn't tell releases apart: file::function → what it does.
NO_BRANCHES = {
    "internals/torch.py::keep_metadata": "only state dicts that modules made have it",
    "internals/transformers.py::can_be_built": "Auto classes have the one, model classes the other",
    "internals/trainers.py::counts_as_grpo": "trainers of one release differ",
    "internals/trainers.py::keeps_completions": "trainers of one release differ",
}

_NAMED = re.compile(
    r"\b(torch|transformers|diffusers|accelerate|peft|trl|torchao|bitsandbytes|compressed-tensors)\b[^.\n]{0,24}\s\d+\.\d+"
)


def unnamed(file: str) -> Iterator[str]:
    """Functions at the top of a file of internals/ with a branch, and no release in their docstring or comments."""
    lines = FILES[file].read_text(encoding="utf-8").splitlines()
    tree = tree_of(file)
    for node in tree.body:
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        asks = any(True for _ in _branches(ast.Module([node], []), "", imported(tree)))
        asks = asks or any(
            isinstance(n, ast.Call) and ast.unparse(n.func) == "hasattr" for n in ast.walk(node)
        )
        if asks and _NAMED.search(text) is None:
            yield f"{file}::{getattr(node, 'name', ast.unparse(node)[:40])}"


def test_branches_name_their_releases() -> None:
    found = {one for file in FILES if file.startswith("internals/") for one in unnamed(file)}
    assert found - set(NO_BRANCHES) == set()
    assert set(NO_BRANCHES) - found == set(), "take these out of NO_BRANCHES"


def test_rules_find_what_they_forbid() -> None:
    """A guard that can't fail guards nothing."""
    tree = ast.parse(
        """
import json
import torch
import torch.distributed as dist
from importlib import metadata
from packaging.version import Version
from transformers import Trainer

from .internals import fsdp

LATE = Version(torch.__version__) >= Version("2.10")

def ask(model):
    hasattr(model, "config"), hasattr(json, "loads"), getattr(torch, "Tensor"), hasattr(fsdp, "x"), hasattr(torch, model)
    hasattr(dist.tensor, "Shard"), getattr(Trainer, "_run_epoch", None), metadata.version("peft")

class Kind:
    def of(self):
        try:
            import tomllib
        except ImportError:
            pass
        try:
            from transformers.optimization import GreedyLR
        except ImportError:
            GreedyLR = None
        try:
            import torch
        except OSError:
            pass
"""
    )
    assert {f"{function} {asked}".lstrip() for function, asked, _ in branches(tree)} == {
        *("Version(", "torch.__version__"),
        *("ask hasattr(dist.tensor, 'Shard')", "ask getattr(Trainer, '_run_epoch')"),
        *("ask metadata.version(", "Kind.of try: import transformers.optimization"),
    }
