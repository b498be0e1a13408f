"""What the pages say exists: names, arguments, commands, options, links; and what exists has its place on a page."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import click
import pytest

import shardwise as sw
from shardwise import errors
from shardwise.cli import main
from tests.docs.blocks import DOCS, ROOT, Block, after_diff, blocks, pages
from tests.docs.every_block import ALONE, INTEGRATED, can_run, is_code, runner

MODULES = {"sw": "shardwise", "swa": "shardwise.integrations.accelerate"}
INTEGRATIONS = ("accelerate", pytest.param("trainer", marks=pytest.mark.needs("trainer")))

ALL = [block for page in pages() for block in blocks(page)]
_NEEDS_TRAINER = pytest.mark.needs("trainer")
PYTHON = [
    pytest.param(
        block, marks=_NEEDS_TRAINER if "shardwise.integrations.trainer" in block.text else (), id=str(block)
    )
    for block in (*ALL, *(after_diff(block) for block in ALL if block.language == "diff"))
    if block.language == "python"
]

#: What ``load_pretrained`` and its like take by name as ``from_pretrained`` does.
OPTIONS = set(get_type_hints(get_type_hints(sw.load_pretrained)["options"].__args__[0]))

#: The variables that pages use, and what they hold.
METHODS: dict[str, Any] = {
    "checkpoints": sw.Checkpointer,
    "sender": sw.handover.WeightSender,
    "receiver": sw.handover.WeightReceiver,
}


def reports() -> set[str]:
    """Fields and methods of everything that a plan, save, load, resume or export returns."""
    import shardwise.integrations.accelerate as swa

    calls = (sw.plan, sw.load, sw.save, sw.restore, sw.verify, sw.export_hf, sw.handover.WeightSender.publish)
    found: set[str] = set()
    for call in (*calls, swa.load_state, sw.Checkpointer.resume):
        returned = get_type_hints(call)["return"]
        for kind in (returned, *getattr(returned, "__args__", ())):
            if inspect.isclass(kind) and kind.__module__.startswith("shardwise"):
                found |= {name for name in dir(kind) if not name.startswith("_")}
    return found


def names_in(block: Block) -> Iterator[tuple[ast.AST, str, str]]:
    """(node, what stands before the dot, what stands after it)"""
    for node in ast.walk(ast.parse(block.text.replace("…", "..."))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node, node.value.id, node.attr


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_names_and_arguments_exist(block: Block) -> None:
    tree = ast.parse(block.text.replace("…", "..."))  # every block is valid Python
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert is_public(module, alias.name), alias.name
        if isinstance(node, ast.Call):
            check_arguments(node, block)
    for _, before, after in names_in(block):
        if before in MODULES:
            module = importlib.import_module(MODULES[before])
            assert after in (*module.__all__, "errors", "handover", "reports"), f"{before}.{after}"
        if before in METHODS:
            assert hasattr(METHODS[before], after), f"{before}.{after}"
        if before in ("report", "resumed", "resume_report"):
            assert after in reports(), f"{before}.{after}"


def is_public(module: ModuleType, name: str) -> bool:
    """Whether a module exports a name, or is a package with a module of that name, imported by now or not."""
    if name in getattr(module, "__all__", ()):
        return True
    return hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}") is not None


@pytest.mark.slow
def test_blocks_run() -> None:
    """With a model and a loader for those that the reader has."""
    check_run(ALONE)


@pytest.mark.slow
def test_blocks_of_integrations_run() -> None:
    """With accelerators and trainers, each block in a folder of its own, and S3."""
    check_run(INTEGRATED)


def check_run(test: str) -> None:
    """Run every block that every_block.py gives to a test, in one process."""
    ours = [str(block) for block in ALL if is_code(block) and runner(block) == test and can_run(block)]
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs._run_blocks", test, *dict.fromkeys(b.split(":")[0] for b in ours)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert re.findall(r"^\S+\.md:\d+$", done.stdout, re.MULTILINE) == ours


def check_arguments(call: ast.Call, block: Block) -> None:
    function = target_of(call.func)
    if function is None:
        return
    parameters = inspect.signature(function).parameters
    known = set(parameters)
    if function is sw.configure_storage:
        return  # those of a store, which its own package checks
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        known |= OPTIONS | set(inspect.signature(sw.load_pretrained).parameters)
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    assert given <= known, f"{block}: {ast.unparse(call)}: no argument {sorted(given - known)}"


def target_of(function: ast.expr) -> Any:
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return None
    before, after = function.value.id, function.attr
    if before in MODULES:
        return getattr(importlib.import_module(MODULES[before]), after, None)
    return getattr(METHODS.get(before), after, None)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of our command line, from blocks and from inline code."""
    for block in ALL:
        for line in block.text.split("\n"):
            if found := re.match(r"(?:\$ )?shardwise ([a-z]+\b[^#|]*)", line):
                yield str(block), shlex.split(re.split(r" {3,}", found[1])[0], posix=False)
    for page in pages():
        for found in re.finditer(r"(?<!`)`shardwise ([a-z]+\b[^`|]*)`(?!`)", page.read_text()):
            yield page.name, shlex.split(found[1], posix=False)


@pytest.mark.parametrize(("where", "words"), list(commands()), ids=lambda x: x if isinstance(x, str) else "")
def test_commands_and_options_exist(where: str, words: list[str]) -> None:
    command = main.commands[words[0]]
    options = {o for p in command.params for o in p.opts} | {"--help", "--version"}
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    assert given <= options, f"{where}: {words}: no option {sorted(given - options)}"
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    assert arguments


LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
TEXTS = [*pages(), *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:|#", target):
            continue
        path = (page.parent / target.partition("#")[0]).resolve()
        assert path.exists() or path == DOCS / "project/examples.md", f"{page}: {target}"
        assert path.is_relative_to(ROOT), target


def test_pages_say_the_number_of_faults_that_was_measured() -> None:
    total = re.search(
        r"^\| \*\*total\*\* \| \*\*([\d,]+)\*\*", (DOCS / "notes/measurements.md").read_text(), re.M
    )
    said = re.search(r"results of ([\d,]+) injected faults", (DOCS / "troubleshooting.md").read_text())
    assert total is not None
    assert said is not None
    assert said[1] == total[1]


def test_every_public_name_is_on_one_of_the_api_pages() -> None:
    """And the first of these pages leads to each."""
    folder = DOCS / "reference/api"
    text = "".join(page.read_text() for page in sorted(folder.glob("*.md")))
    shown = re.findall(r"^::: shardwise\.([\w.]+)$", text, re.MULTILINE)
    reports = {f"reports.{name}" for name in sw.reports.__all__}
    assert len(shown) == len(set(shown))
    handover = {f"handover.{name}" for name in sw.handover.__all__}
    assert set(shown) == (set(sw.__all__) | reports | handover) - {"__version__"}
    assert set(re.findall(r"\]\[shardwise\.([\w.]+)\]", (folder / "index.md").read_text())) == set(shown)


def test_the_package_has_at_most_thirty_names() -> None:
    assert len(set(sw.__all__) - {"__version__"}) <= 30


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_every_name_of_an_integration_is_on_its_page(name: str) -> None:
    page = (DOCS / "reference/integrations.md").read_text()
    module = f"shardwise.integrations.{name}"
    members = re.search(rf"^::: {re.escape(module)}\n.*?members: \[(.*?)\]", page, re.MULTILINE | re.DOTALL)
    assert members is not None
    assert set(members[1].split(", ")) == set(importlib.import_module(module).__all__)


def test_every_error_has_its_section() -> None:
    page = (DOCS / "errors.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    found = {section.split("\n")[0]: section for section in sections}
    types = {n for n in errors.__all__ if inspect.isclass(getattr(errors, n))}
    assert set(found) == types
    for name in types - {"ShardwiseError"}:
        assert "fix" in found[name].lower(), f"{name}: what to do is not said"
        assert name in sections[0] or name in page.split("## ")[0], f"{name} is not in the tree"
