"""Private names of other packages are used in ``internals/``, and elsewhere only as the tables here say."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shardwise"
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
OUTSIDE = [name for name in FILES if not name.startswith("internals/")]

#: Private names outside of ``internals/``: file → name → why it stands there. Keep it short.
ALLOWED: dict[str, dict[str, str]] = {
    "names.py": dict.fromkeys(
        ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"),
        "the one walk over a model's modules, which comes before internals in the order of imports; torch 2.12-2.14. "
        "torch's own iterators leave out what stands at a second place, and do not say what is persistent",
    ),
    "tensors/trace.py": dict.fromkeys(
        ("_to_copy", "_unsafe_view", "_reshape_alias"),
        "names of ATen operators, as torch hands them to __torch_dispatch__; torch 2.12-2.14",
    ),
    "handover/loaders.py": dict.fromkeys(
        ("_to_copy", "_local_scalar_dense"),
        "names of ATen operators, as torch hands them to __torch_dispatch__; torch 2.9-2.14",
    ),
    "models/meta.py": {
        "_to_copy": "the name of an ATen operator, as torch hands it to __torch_dispatch__; torch 2.9-2.14"
    },
    "integrations/trainer.py": {
        "_train_batch_size": "of the class that it derives from: what auto_find_batch_size left of the batch size; "
        "transformers 5.20-5.23. get_total_train_batch_size counts the ranks, which split_batches does not"
    },
}

#: Private methods of the HF Trainer that the integration overrides: they stay in their class. Read at transformers 5.23,
#: tried with 5.20-5.23. Under another name upstream, Trainer would not call ours, and say nothing: so a test asks.
OVERRIDDEN: dict[str, str] = {
    "_determine_best_metric": "an evaluation that a signal has stopped has no metric, and its step is saved",
    "_evaluate": "an evaluation that a signal stops ends on every rank at the same batch",
    "_finalize_training": "with save_total_limit=1 the best checkpoint alone stays at the end; Trainer sees none in a store",
    "_get_output_dir": "Trainer's small files go into a folder of their own; checkpoints lie where checkpoint_root says",
    "_init_training_state": "epochs that ended early, or have no length, begin where the checkpoint says",
    "_inner_training_loop": "begins again with the checkpoint before, where one turns out to be damaged",
    "_load_best_model": "the best model is one of our checkpoints",
    "_load_from_checkpoint": "ours are restored when everything is there, not here",
    "_load_optimizer_and_scheduler": "the first place where everything is there: all is restored here",
    "_load_rng_state": "random states once more, because Trainer draws when it skips batches",
    "_prepare_for_training": "the loader, before an epoch begins",
    "_run_epoch": "the loop gets a loader that counts, and that goes on where a save was",
    "_save": "no weights are written twice",
    "_save_checkpoint": "one directory, published whole",
    "_save_optimizer_and_scheduler": "part of our checkpoint",
    "_save_rng_state": "part of our checkpoint",
    "_save_scaler": "part of our checkpoint",
    "_wrap_model": "the last place before accelerator.prepare, where the optimizer is there",
}

#: Private methods and tables of hooks by which an object changes what torch saves and loads of it: state/ asks whether
#: there are any (docs/state.md). Torch 2.12-2.14; under another name, ``exact`` would be said of a state that lost
#: something.
LOOKED_AT: dict[str, tuple[Any, tuple[str, ...]]] = {
    "state/beyond.py, of modules": (
        nn.Module,
        (
            *("_save_to_state_dict", "_load_from_state_dict", "_state_dict_hooks", "_state_dict_pre_hooks"),
            *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        ),
    ),
    "state/beyond.py, of optimizers": (
        lambda: torch.optim.SGD([torch.zeros(1)]),
        (
            *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
            *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
        ),
    ),
}


def is_private(name: object) -> bool:
    """One underscore at the beginning, and a name after it."""
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name) is not None


#: What torch's own objects have: foreign also where a class of ours has an attribute of that name.
FOREIGN = {
    name
    for kind in (nn.Module(), torch.zeros(1), DTensor, Optimizer, LRScheduler)
    for name in dir(kind)
    if is_private(name)
}


def defined(tree: ast.AST) -> set[str]:
    """Private attributes that classes of a file give themselves."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(statement.name)
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
                for name in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                    found.add(name.id)
                    if name.id == "__slots__":
                        found |= {c.value for c in ast.walk(statement) if isinstance(c, ast.Constant)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return {name for name in found if is_private(name)}


def _is_own(holder: ast.expr) -> bool:
    return isinstance(holder, ast.Name) and holder.id in ("self", "cls")


def foreign_names(tree: ast.AST, everywhere: set[str]) -> Iterator[tuple[str, int]]:
    """Private names of other packages in a file, with lines. ``everywhere``: attributes that any class of ours has.

    Found: imports; attributes, also by ``getattr`` and the like with a constant; entries of an object's ``__dict__``.
    """
    here = defined(tree) - FOREIGN
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            dotted = []
        for name in dotted:
            if not name.startswith("shardwise.") and any(map(is_private, name.split("."))):
                yield name, node.lineno
        if isinstance(node, ast.Attribute):
            holder, name = node.value, node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _reads_attribute(node.func):
            holder, name = node.args[0], getattr(node.args[1], "value", None)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(
            (".__dict__", "vars(self)")
        ):
            holder, name = node.value, getattr(node.slice, "value", None)
        else:
            continue
        known = everywhere if _is_own(holder) else here
        is_super = isinstance(holder, ast.Call) and ast.unparse(holder.func) == "super"
        if is_private(name) and not (name in known or (is_super and name in OVERRIDDEN)):
            yield name, node.lineno


def _reads_attribute(called: ast.expr) -> bool:
    return ast.unparse(called) in ("getattr", "hasattr", "setattr", "delattr")


@functools.cache
def tree_of(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text(encoding="utf-8"))


@functools.cache
def everywhere() -> set[str]:
    return set().union(*(defined(tree_of(file)) for file in FILES))


def test_private_names_live_in_one_room() -> None:
    """Put a small function into ``internals/``, with versions and what breaks without it; or avoid the name."""
    found = [
        f"{file}:{line} uses {name}"
        for file in OUTSIDE
        for name, line in foreign_names(tree_of(file), everywhere())
        if name not in ALLOWED.get(file, {})
    ]
    assert not found


def test_the_tables_hold_nothing_that_is_gone() -> None:
    for file, names in ALLOWED.items():
        found = {name for name, _ in foreign_names(tree_of(file), everywhere())}
        assert set(names) <= found, f"{file}: take {sorted(set(names) - found)} out of ALLOWED"
    for file, (_, names) in LOOKED_AT.items():
        constants = {
            n.value for n in ast.walk(tree_of(file.partition(",")[0])) if isinstance(n, ast.Constant)
        }
        assert set(names) <= constants, file


@pytest.mark.needs("trainer")
def test_what_the_trainer_overrides_is_there() -> None:
    """With as many parameters as Trainer gives, so that a call of another form is no surprise in the middle of a run."""
    from transformers import Trainer

    from shardwise.integrations.trainer import ShardwiseTrainer

    ours = [kind for kind in ShardwiseTrainer.__mro__ if kind.__module__.startswith("shardwise.")]
    written = {name: method for kind in ours for name, method in vars(kind).items() if is_private(name)}
    assert {name for name in written if hasattr(Trainer, name)} == set(OVERRIDDEN)
    for name in OVERRIDDEN:
        given, taken = (inspect.signature(f).parameters for f in (getattr(Trainer, name), written[name]))
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in taken.values())
        assert takes_all or len(taken) == len(given), f"{name} takes {list(taken)}, Trainer's {list(given)}"


def test_what_state_looks_at_is_there() -> None:
    for file, (make, names) in LOOKED_AT.items():
        made = make()
        assert [name for name in names if not hasattr(made, name)] == [], file


#: A sentence, or a part of one after a colon or semicolon, that says what is so where a function is missing.
WITHOUT = re.compile(r"(?:^|[.;:] )(?:without|otherwise|or else)\b", re.IGNORECASE)


def unexplained(tree: ast.Module) -> list[str]:
    """Public functions and classes at the top of a file whose docstrings do not say what is so without them."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and WITHOUT.search(" ".join((ast.get_docstring(node) or "").split())) is None
    ]


def names_versions(tree: ast.Module) -> bool:
    """Whether a file's docstring does."""
    return re.search(r"\b\d+\.\d+", ast.get_docstring(tree) or "") is not None


def test_internals_say_versions_and_what_breaks_without_them() -> None:
    files = [name for name in FILES if name.startswith("internals/")]
    assert files
    for file in files:
        assert names_versions(tree_of(file)), f"{file}: say the versions that it was tried with"
        assert unexplained(tree_of(file)) == [], f"{file}: say what breaks without these"


def test_rules_find_what_is_unexplained() -> None:
    """Also a docstring that only has the word in it."""
    tree = ast.parse(
        '''"""Of torch 2."""
def bare(): pass
def short():
    """What it does, without haste."""
async def waits():
    """What it does."""
class Kind:
    """What it is."""
    def method(self): pass
def _helper(): pass
def good():
    """What it does. Without
    it, all is lost."""
class Good:
    """What it is; otherwise all is lost."""
'''
    )
    assert unexplained(tree) == ["bare", "short", "waits", "Kind"]
    assert not names_versions(tree)
    assert names_versions(ast.parse('"""torch 2.12-2.14."""'))


def test_rules_find_what_they_forbid() -> None:
    """A guard that can't fail guards nothing."""
    source = """
import torch._C
import os.path
from torch.utils._pytree import tree_map
from torch.distributed.tensor.placement_types import _StridedShard
from ._prepare import adopt
from shardwise.integrations._accelerate import adopt

class Ours:
    __slots__ = ("_slot",)
    _mine: int = 0

    def __init__(self, other):
        self._kept = self._modules = other
        object.__setattr__(self, "_set", 1)
        self._kept._foreign
        self._inherited
        self._mine, self._slot, other._slot, other._set

    def _wrap_model(self):
        super()._wrap_model()
        super()._new_one()

def f(x):
    x._modules, x.y._buffers[0], x.__dict__["_parameters"], x._mine, x._wrap_model, x.__class__, x._1
    getattr(x, "_hidden", None), hasattr(x, "shown"), setattr(x, f"_{x}", 1), str("_text")
"""
    tree = ast.parse(source)
    assert defined(tree) == {"_slot", "_mine", "_kept", "_modules", "_set", "_wrap_model"}
    found = {name for name, _ in foreign_names(tree, defined(tree))}
    assert found == {
        *("torch._C", "torch.utils._pytree.tree_map"),
        "torch.distributed.tensor.placement_types._StridedShard",
        *("_foreign", "_inherited", "_new_one", "_modules", "_buffers", "_parameters", "_hidden"),
    }
