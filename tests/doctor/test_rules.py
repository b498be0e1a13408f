"""The rules, which are pure: each names its pathology, and a hundred healthy runs of different kinds have no finding."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from shardwise.doctor.examine import findings_of
from shardwise.doctor.facts import Finding
from shardwise.doctor.rules import RULES
from tests.doctor import test_conditions, test_files, test_meet, test_system
from tests.doctor.healthy import HEALTHY, SOFTWARE, YAML, hundred, settings
from tests.doctor.pathologies import PATHOLOGIES, Pathology
from tests.storage import test_doctor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "doctor.md"


@pytest.mark.parametrize("case", PATHOLOGIES, ids=lambda c: f"{c.rule}: {c.words}")
def test_a_pathology_is_named(case: Pathology) -> None:
    """By its own rule, in its own words, and by no rule that has nothing to do with it."""
    found = findings_of(case.facts)
    assert {f.rule for f in found} == {case.rule, *case.beside}
    assert any(case.words in sentence for f in found if f.rule == case.rule for sentence in (f.bites, f.why))
    for finding in found:
        _is_three_sentences(finding)


def _is_three_sentences(finding: Finding) -> None:
    for sentence in (finding.bites, finding.why, finding.do):
        assert sentence.strip()
        assert "\n" not in sentence
    assert finding.where
    assert finding.source


def test_every_rule_has_a_pathology() -> None:
    assert {r.id for r in RULES} == {p.rule for p in PATHOLOGIES}
    assert [name for name, count in Counter(r.id for r in RULES).items() if count > 1] == []


def test_a_hundred_healthy_runs_have_no_finding() -> None:
    runs = list(hundred())
    assert len(runs) == 100
    assert len({repr(run) for run in runs}) == 100
    kinds = {
        name: sum(bool(getattr(run, name)) for run in runs)
        for name in (
            "places",
            "buckets",
            "accelerate",
            "arguments",
            "models",
            "checkpoints",
            "logs",
            "meeting",
        )
    }
    assert min(kinds.values()) >= 10, kinds
    assert [(f.rule, f.where, f.bites) for run in runs for f in findings_of(run)] == []


def test_a_rule_holds_for_the_versions_that_it_names() -> None:
    from dataclasses import replace

    efficient = replace(HEALTHY, accelerate=(settings(YAML, fsdp_cpu_ram_efficient_loading=True),))

    def rules(**versions: str) -> set[str]:
        return {f.rule for f in findings_of(replace(efficient, software={**SOFTWARE, **versions}))}

    both = {"accelerate.device-mesh", "accelerate.whole-model"}
    assert rules() == both
    assert rules(accelerate="1.16.0") == {"accelerate.whole-model"}
    assert "accelerate.whole-model" not in rules(transformers="4.57.0")
    without = {name: v for name, v in SOFTWARE.items() if name not in ("accelerate", "transformers")}
    assert {f.rule for f in findings_of(replace(efficient, software=without))} == both, "for another machine"


def shown_on() -> dict[str, str]:
    """By rule: the real thing that a test shows it on; rules without one are shown on facts alone."""
    found = dict.fromkeys((*test_files.YAMLS, *test_files.ARGUMENTS, *test_files.MODELS), "real file")
    found |= {f"log.{name}": "line" for name in test_files.LINES}
    found |= dict.fromkeys(test_conditions.FAILED, "failing program")
    found |= {rule: "real file" for rules in test_files.CHECKPOINTS for rule in rules}
    found |= dict.fromkeys(
        ("checkpoint.incomplete", "checkpoint.model-only", "checkpoint.resumed-model-only"), "real file"
    )
    found |= dict.fromkeys(test_files.CASE_1, "real file")
    found |= dict.fromkeys(
        (
            *test_files.INSTALLED,
            *test_files.LOSSES,
            "log.lr-jump",
            "path.absent",
            "path.unknown",
            "model.too-large",
            "accelerate.wrap-class",
        ),
        "real file",
    )
    found |= dict.fromkeys(("accelerate.not-ram-efficient", *test_conditions.FILES), "real file")
    found |= dict.fromkeys(test_files.MOUNTS, "line")
    found |= dict.fromkeys(test_conditions.REFUSED, "seccomp")
    found |= dict.fromkeys(test_conditions.SICK, "namespace")
    found |= {rule: "clock" for rules in test_conditions.CLOCKS for rule in rules}
    found |= dict.fromkeys(test_system.NAMESPACES, "namespace")
    found |= dict.fromkeys(test_system.INJECTED, "strace")
    found |= {rule: "namespace" for rules, _ in test_system.FILE_SYSTEMS.values() for rule in rules}
    found |= {rule: "S3 server" for rule, _, _ in test_doctor.SPOILT.values()}
    found |= dict.fromkeys(test_meet.NAMED, "ranks")
    found |= dict.fromkeys(test_system.VARIABLES, "variables")
    return found | dict.fromkeys((*test_system.LIMITS, "machine.memory", "machine.cores"), "process")


def test_the_page_lists_every_rule_as_the_table_has_it() -> None:
    """And says what shows it. All but a dozen are shown on the real thing."""
    real = shown_on()
    assert real.keys() <= {r.id for r in RULES}
    assert len([rule for rule, thing in real.items() if thing != "line"]) >= len(RULES) - 12
    row = r"^\| `([\w.-]+)` \| (.+?) \| (.+?) \| (.+?) \|$"
    text = PAGE.read_text("utf-8")
    rows = re.findall(row, text, re.MULTILINE)
    notes = {"note": " (note)", "problem": ""}
    assert rows == [(r.id, r.about + notes[r.kind], r.source, real.get(r.id, "facts")) for r in RULES]
    assert f"{len(PATHOLOGIES)} sets of facts describe broken setups for all {len(RULES)} rules" in text
    for thing, count in Counter(real.get(r.id, "facts") for r in RULES).items():
        assert f"| {thing} | {count} |" in text


def test_architectures_that_are_cut_on_dim_0() -> None:
    """As the page of supported models lists their conversions."""
    text = (PAGE.parents[1] / "supported-models.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| \w+ \| ([^|]*) \|", text, re.MULTILINE)
    cut = re.compile(r"\b(Chunk|Split|Concatenate|Transpose|Permute\w*|Ernie\w+)\(0\b")
    (rule,) = (rule for rule in RULES if rule.id == "model.conversion")
    assert {name for name, conversions in rows if cut.search(conversions)} == {*rule.model_types}


@pytest.mark.parametrize(
    ("peft", "transformers", "bites"),
    [
        ("0.18.1", "5.23.0", False),
        ("0.19.1", "5.5.4", False),
        ("0.19.0", "5.6.0", True),
        ("0.20.0", "5.6.0", False),
    ],
)
def test_releases_of_peft_that_open_converted_models(peft: str, transformers: str, bites: bool) -> None:
    from dataclasses import replace

    facts = replace(HEALTHY, software={**SOFTWARE, "peft": peft, "transformers": transformers})
    found = [f.rule for f in findings_of(facts) if f.rule != "software.gates"]
    assert found == ["software.peft"] * bites
