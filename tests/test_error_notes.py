"""Each error says below its text where causes and cures stand: once, and nowhere in the text itself."""

from __future__ import annotations

import copy
import json
import pickle
import re
import traceback
from pathlib import Path

import pytest

from shardwise import errors
from shardwise.cli import main
from shardwise.cli.manual import ERRORS
from shardwise.errors import (
    IntegrityError,
    PlanError,
    RankError,
    ShardwiseError,
    SourceError,
    StateError,
)
from tests.harness.command import runner

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
HEADINGS = {h.lower(): h for h in re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)}
NOTE = re.compile(r"Causes and cures: shardwise explain (\w+), or docs/errors\.md#(\w+)")

by_name = pytest.mark.parametrize("name", ERRORS)


def make(name: str) -> ShardwiseError:
    made = RankError("save", {1: "it failed"}) if name == "RankError" else getattr(errors, name)("it failed")
    assert isinstance(made, ShardwiseError)
    return made


def traced(error: ShardwiseError) -> str:
    """The traceback of the error, raised."""
    try:
        raise error
    except ShardwiseError as caught:
        return "".join(traceback.format_exception(caught))


def sections(text: str) -> list[str]:
    """The sections to which a text leads. Command and page are the same one."""
    assert all(HEADINGS[anchor] == name for name, anchor in NOTE.findall(text))
    return [name for name, _ in NOTE.findall(text)]


@by_name
def test_a_traceback_leads_to_the_section_once(name: str) -> None:
    error = make(name)
    assert sections(traced(error)) == [name]
    assert traced(error).rstrip().endswith(f"docs/errors.md#{name.lower()}")
    assert "errors.md" not in str(error)


@by_name
def test_a_copy_has_the_same_text_and_note(name: str) -> None:
    error = make(name)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
        assert sections(traced(other)) == [name]


def test_pickled_facts_stay() -> None:
    error = RankError("save", {3: "OSError: full"}, (1, 2), 30.0)
    other = pickle.loads(pickle.dumps(error))
    assert (other.label, other.causes, other.missing) == ("save", {3: "OSError: full"}, (1, 2))
    assert str(other) == str(error)
    plan = pickle.loads(pickle.dumps(PlanError("not complete", ("missing: a", "unused: b"))))
    assert (plan.problems, str(plan).count("missing: a")) == (("missing: a", "unused: b"), 1)
    source = pickle.loads(pickle.dumps(SourceError("damaged", path="a/b")))
    assert (source.path, str(source)) == ("a/b", "a/b: damaged")


def test_an_error_that_quotes_another_leads_to_its_own_section() -> None:
    quoted = StateError(f"the checkpoint can't be taken: {IntegrityError('a flipped bit', path='x')}")
    assert sections(traced(quoted)) == ["StateError"]


def test_a_users_subclass_has_the_section_of_its_base() -> None:
    class TooOldError(StateError):
        pass

    assert sections(traced(TooOldError("from last year"))) == ["StateError"]


@pytest.mark.parametrize(
    ("causes", "missing", "section"),
    [
        ({1: "IntegrityError: f: cut"}, (), "IntegrityError"),
        ({1: "IntegrityError: f: cut", 5: "IntegrityError: g: cut"}, (), "IntegrityError"),
        ({1: "IntegrityError: f: cut", 5: "FormatError: g"}, (), "RankError"),
        ({1: "IntegrityError: f: cut"}, (2,), "RankError"),
        ({1: "OSError: disk full"}, (), "RankError"),
        ({1: "RankError: 'read' failed"}, (), "RankError"),
        ({1: "unreachable"}, (), "RankError"),
        ({}, (0,), "RankError"),
    ],
)
def test_ranks_that_fail_alike_lead_to_their_cause(
    causes: dict[int, str], missing: tuple[int, ...], section: str
) -> None:
    assert sections(traced(RankError("load", causes, missing))) == [section]


# ----------------------------------------------------------------------------------------------------
# The command line


def test_the_command_line_shows_it_once(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for words in (("verify", nowhere), ("inspect", nowhere, "--json")):
        result = runner().invoke(main, words)
        assert result.exit_code == 1
        assert sections(result.stderr) == ["SourceError"]
        assert sections(result.stdout) == []
        assert result.stderr.rstrip().endswith("docs/errors.md#sourceerror")


def test_tracebacks_of_the_command_line_have_it_and_the_text_below_has_not(tmp_path: Path) -> None:
    result = runner().invoke(main, ["verify", str(tmp_path / "nowhere"), "--debug"])
    shown, _, text = result.stderr.rpartition("\nerror: ")
    errors_of_the_chain = shown.count("\nshardwise.errors.SourceError: ")
    assert sections(shown) == ["SourceError"] * errors_of_the_chain != []
    assert (sections(text), "nowhere" in text) == ([], True)


@by_name
def test_explain_prints_the_section(name: str) -> None:
    result = runner().invoke(main, ["explain", name])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.strip().startswith(name)  # rich 13 centres it
    assert "](" not in result.stdout
    for path in re.findall(r"\(([\w/-]+\.md)\)", result.stdout):
        assert (PAGE.parents[1] / path).is_file(), path
    told = json.loads(runner().invoke(main, ["explain", name, "--json"]).stdout)
    assert told["text"].startswith(f"## {name}\n")
    assert HEADINGS[told["page"].partition("#")[2]] == told["name"] == name


def test_the_page_of_the_package_is_that_of_the_documents() -> None:
    assert Path(errors.__file__).with_name("errors.md").read_text() == PAGE.read_text()


def test_explain_knows_no_other_name() -> None:
    result = runner().invoke(main, ["explain", "KeyError"])
    assert result.exit_code == 2
    assert "PlanError" in result.stderr
