"""``pip install shardwise`` into the environments that people have: what they pin leaves a release that shardwise takes.

The quick form chooses among recorded releases; the nightly one asks pip, and needs the package index.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.matrix.pairs import PAIRS, Pair
from tests.matrix.stacks import NEEDS, RELEASES, STACKS, Stack

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

#: Package → release → requirements.
KNOWN = {
    canonicalize_name(name): releases
    for name, releases in (
        *((name, dict.fromkeys(listed.split(), "")) for name, listed in RELEASES.items()),
        *NEEDS.items(),
    )
}

LEAVES = frozenset(map(canonicalize_name, RELEASES))


def resolved(lines: Iterable[str]) -> dict[str, str]:
    """A release of each known package that ``lines`` lead to, so that all fit together; AssertionError if there are none."""

    def choose(chosen: dict[str, str], wanted: dict[str, SpecifierSet]) -> dict[str, str] | None:
        left = {name: [v for v in KNOWN[name] if admits(specifier, v)] for name, specifier in wanted.items()}
        if any(version not in left[name] for name, version in chosen.items()) or not all(left.values()):
            return None
        # Those that require others come first: what is left for the rest then only has to be something.
        order = sorted(
            (name for name in wanted if name not in chosen), key=lambda n: (n in LEAVES, len(left[n]))
        )
        if not order:
            return chosen
        name = order[0]
        each = (choose({**chosen, name: v}, _joined(wanted, KNOWN[name][v].split())) for v in left[name])
        return next((found for found in each if found is not None), None)

    lines = list(lines)
    found = choose({}, _joined({}, lines))
    assert found is not None, f"no releases fit together: {', '.join(lines)}"
    return found


@functools.cache
def admits(specifier: SpecifierSet, version: str) -> bool:
    return specifier.contains(version)


def _joined(wanted: dict[str, SpecifierSet], lines: Iterable[str]) -> dict[str, SpecifierSet]:
    joined = dict(wanted)
    for required in map(Requirement, lines):
        name = canonicalize_name(required.name)
        if name in KNOWN:
            joined[name] = joined.get(name, SpecifierSet()) & required.specifier
    return joined


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_releases_fit(stack: Stack) -> None:
    assert SpecifierSet(PROJECT["requires-python"]).contains(stack.python)
    found = resolved([*PROJECT["dependencies"], *stack.requires])
    for line in (*PROJECT["dependencies"], *stack.requires):
        required = Requirement(line)
        name = canonicalize_name(required.name)
        assert name not in KNOWN or required.specifier.contains(found[name]), line


def test_every_requirement_has_recorded_releases() -> None:
    """Otherwise the test above would be silent about one. Its lowest release is recorded, too: floors are real releases."""
    for required in map(Requirement, PROJECT["dependencies"]):
        floor = next(iter(required.specifier)).version
        releases = KNOWN[canonicalize_name(required.name)]
        lowest = min(filter(required.specifier.contains, releases), key=Version)
        assert Version(lowest).release[: len(Version(floor).release)] == Version(floor).release, required


def test_what_does_not_fit_is_found() -> None:
    """By a pin, by two pins together, and by what a release of transformers asks of another package."""
    ours = PROJECT["dependencies"]
    for lines in (
        ["torch==2.8.0"],
        ["transformers==5.20.2", "huggingface_hub<1.31"],
        ["transformers>=5.16", "tokenizers<0.23"],
        ["datasets==5.2.0", "transformers<5.4", "huggingface_hub<1.30"],
    ):
        with pytest.raises(AssertionError, match="no releases fit together"):
            resolved([*ours, *lines])


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if any(pair.pins.values())], ids=lambda pair: pair.name
)
def test_the_matrix_is_within_the_requirements(pair: Pair) -> None:
    """Of the package and of its extra ``dev``, with which the matrix runs the tests."""
    extras = PROJECT["optional-dependencies"]
    for required in map(Requirement, (*PROJECT["dependencies"], *extras["peft"], *extras["dev"])):
        version = pair.pins.get(required.name)
        assert version is None or required.specifier.contains(version), (
            f"{required}, and {version} in {pair.name}"
        )


def test_the_matrix_has_each_floor() -> None:
    """Of torch and transformers: raising one of them, or dropping its pair, is a decision about the other."""
    for required in map(Requirement, PROJECT["dependencies"][:2]):
        floor = Version(next(iter(required.specifier)).version)
        lowest = min(Version(version) for pair in PAIRS if (version := pair.pins.get(required.name)))
        assert lowest.release[:2] == floor.release[:2], required


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the newest pip, which reads metadata without fetching whole wheels."""
    home = tmp_path_factory.mktemp("pip")
    venv.create(home, with_pip=True, upgrade_deps=True)
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(place.glob("*.whl"))


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_pip_resolves(stack: Stack, pip: Path, wheel: Path, tmp_path: Path) -> None:
    """For the stack's own Python, by what the package index says of all releases."""
    report = tmp_path / "report.json"
    command = [
        str(pip),
        "-m",
        "pip",
        "--quiet",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--report",
        str(report),
    ]
    command += [
        "--only-binary",
        ":all:",
        "--python-version",
        stack.python,
        "--target",
        str(tmp_path / "nowhere"),
    ]
    done = subprocess.run([*command, str(wheel), *stack.requires], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    installed = {
        canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"]
        for one in json.loads(report.read_text(encoding="utf-8"))["install"]
    }
    for required in map(Requirement, (*PROJECT["dependencies"], *stack.requires)):
        version = installed[canonicalize_name(required.name)]
        assert required.specifier.contains(version, prereleases=True), (required, version)
