"""Each error says below its text where causes and cures stand: once, and nowhere in the text itself."""

from __future__ import annotations

import copy
import json
import pickle
import re
import tomllib
import traceback
from pathlib import Path

import pytest

from shardwise import errors
from shardwise.cli import main
from shardwise.cli.program import ERRORS
from shardwise.errors import IntegrityError, PlanError, RankError, ShardwiseError, SourceError, StateError
from tests.harness.command import runner

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
HEADINGS = {h.lower(): h for h in re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)}
NOTE = re.compile(r"Causes and fixes: shardwise explain (\w+)$", re.MULTILINE)

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
    """The sections to which a text leads."""
    assert {*NOTE.findall(text)} <= {*HEADINGS.values()}
    return NOTE.findall(text)


@by_name
def test_a_traceback_leads_to_the_section_once(name: str) -> None:
    error = make(name)
    assert sections(traced(error)) == [name]
    assert traced(error).rstrip().endswith(f"shardwise explain {name}")
    assert "docs/" not in traced(error), "people who installed the package have no such directory"
    assert "explain" not in str(error)


def test_the_note_has_the_address_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is one; the site's configuration and the package's metadata have the same."""
    root = PAGE.parents[1]
    configured = re.search(r"^site_url: *(\S+)$", (root / "mkdocs.yml").read_text(), re.MULTILINE)
    assert ("" if configured is None else configured[1].rstrip("/")) == errors.DOCS_URL
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})
    assert urls.get("Documentation", "").rstrip("/") == errors.DOCS_URL
    monkeypatch.setattr(errors, "DOCS_URL", "https://example.org/docs")
    assert traced(StateError("no")).rstrip().endswith(", or https://example.org/docs/errors/#stateerror")


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
    for words in (("diff", nowhere, nowhere), ("diff", nowhere, nowhere, "--json")):
        result = runner().invoke(main, words)
        assert result.exit_code == 1
        assert sections(result.stderr) == ["SourceError"]
        assert sections(result.stdout) == []
        assert result.stderr.rstrip().endswith("shardwise explain SourceError")


@pytest.mark.parametrize(
    ("error", "has_row"),
    [
        (SourceError("no such file or directory", path="a"), True),
        (SourceError("something else", path="a"), False),
        (PlanError("not complete", ("missing: parameter 'a.weight' [4] is not stored",)), True),
        (PlanError("not complete", ("prefix: 12 of 13 missing tensors are stored under 'x.'",)), True),
        (PlanError("something else"), False),
        (errors.VersionError("of a later release"), True),  # its section has no table
        (RankError("load", {1: "IntegrityError: f"}), True),
    ],
)
def test_the_command_line_leads_to_a_section_only_if_that_has_a_row(
    error: ShardwiseError, has_row: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardwise.cli.program import _report

    _report(error, as_json=False, debug=False)
    assert bool(sections(capsys.readouterr().err)) == has_row


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
    assert result.stdout.strip().startswith(name)  # rich 13 centers it
    assert "](" not in result.stdout
    for path in re.findall(r"\(([\w/-]+\.md)\)", result.stdout):
        assert (PAGE.parents[1] / path).is_file(), path
    told = json.loads(runner().invoke(main, ["explain", name, "--json"]).stdout)
    assert told["text"].startswith(f"## {name}\n")
    assert HEADINGS[told["page"].partition("#")[2]] == told["name"] == name


def test_the_page_of_the_package_is_that_of_the_documents() -> None:
    assert Path(errors.__file__).with_name("errors.md").read_text() == PAGE.read_text()


def test_explain_takes_a_part_of_an_error_s_text() -> None:
    for text in ("missing: parameter", "runs/a: no such file or directory; did you mean runs/b?"):
        shown = runner().invoke(main, ["explain", text])
        assert shown.exit_code == 0, shown.stderr
        told = json.loads(runner().invoke(main, ["explain", text, "--json"]).stdout)
        name = "PlanError" if text.startswith("missing") else "SourceError"
        assert name in shown.stdout
        assert told["page"] == f"docs/errors.md#{name.lower()}"
        assert "## " not in told["text"]


def test_explain_knows_no_other_name() -> None:
    result = runner().invoke(main, ["explain", "KeyError"])
    assert result.exit_code == 2
    assert "PlanError" in result.stderr
