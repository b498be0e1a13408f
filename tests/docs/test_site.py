"""The site: its charts are drawn from what was measured, every page is in its navigation, and it asks no other host for anything."""

from __future__ import annotations

import json
import os
import re

import pytest

from benchmarks.charts.__main__ import HERE, OUT, pictures
from tests.docs.blocks import DOCS, ROOT

MKDOCS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

#: Pages that mkdocs makes of files outside of docs/.
MADE = "project/"


@pytest.mark.parametrize(("name", "drawn"), list(pictures()), ids=lambda x: x if x.endswith(".svg") else "")
def test_a_chart_is_what_the_measured_data_draw(name: str, drawn: str) -> None:
    """After a change of the data or the drawing: python -m benchmarks.charts"""
    assert (OUT / name).read_text(encoding="utf-8") == drawn


def test_every_chart_is_drawn_and_shown() -> None:
    drawn = {name for name, _ in pictures()}
    assert {file.name for file in OUT.iterdir()} == drawn
    text = "".join((DOCS / page).read_text() for page in ("index.md", "figures.md"))
    assert set(re.findall(r"assets/charts/([\w-]+\.svg)", text)) == drawn


def test_the_first_page_says_what_the_charts_measured() -> None:
    crash = json.loads((HERE / "crash.json").read_text())
    assert crash["steps that differ from the run without a stop"] == 0
    again, whole = (crash["losses"][name] for name in ("resumed", "never stopped"))
    assert all(whole[step] == loss for step, loss in again.items())
    peaks = json.loads((HERE / "host_memory.json").read_text())["peak of a rank, MiB"]
    ours, plain = (8 * peaks[way]["8"] / 1024 for way in ("shardwise", "from_pretrained"))
    for page in (DOCS / "index.md", ROOT / "README.md"):
        text = " ".join(page.read_text().split())
        assert f"8 ranks need {ours:.1f} GiB in total, vs. {plain:.1f} GiB with `from_pretrained`" in text
    assert f"The losses of all {len(again)} steps after that are bit-identical" in " ".join(
        (DOCS / "index.md").read_text().split()
    )


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/install.md"])
def test_pages_where_people_decide_link_what_was_never_run(page: str) -> None:
    assert links(page) & {"docs/status.md"}
    status = (DOCS / "status.md").read_text()
    assert "\n## Never tested\n" in status


def test_pages_about_a_loss_spike_name_the_trainer_and_say_that_it_was_not_reproduced() -> None:
    case = "docs/cases/5-loss-spike.md"
    text = (ROOT / case).read_text()
    assert "\n## Not reproduced\n" in text
    assert {"docs/howto/trainer.md", "docs/status.md"} <= links(case)
    (row,) = (line for line in (ROOT / "README.md").read_text().splitlines() if "loss spikes after" in line)
    _, section = (DOCS / "troubleshooting.md").read_text().split("\n## Loss jumps after resume\n")
    for told, at in ((row, "README.md"), (section.split("\n## ")[0], "docs/troubleshooting.md")):
        assert f"{case}#not-reproduced" in links(at, told)
        assert "Trainer" in told
    assert "docs/troubleshooting.md#loss-jumps-after-resume" in links("docs/index.md")


def links(page: str, text: str | None = None) -> set[str]:
    """What a page links, or a part of it, from the root of the repository; with and without anchors."""
    text = (ROOT / page).read_text() if text is None else text
    found = {m[1] for m in re.finditer(r"\]\(([\w./#-]+)\)", text)}
    ends = {os.path.normpath(os.path.join(os.path.dirname(page), link)) for link in found}
    return ends | {link.partition("#")[0] for link in ends}


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r"^ +- (?:[^#\n]*: )?([\w./-]+\.md)$", MKDOCS, re.MULTILINE)
    assert len(named) == len(set(named))
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert {page for page in named if not page.startswith(MADE)} == written


def test_the_performance_page_is_short() -> None:
    text = (DOCS / "figures.md").read_text()
    assert len(text.split()) <= 1200
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 4


def test_the_site_makes_no_request_to_another_host() -> None:
    """Browsers get no script, style, font or picture from elsewhere, and none asks another host for stars or facts."""
    assert "font: false" in MKDOCS
    assert not re.search(r"^\s*(extra_javascript|extra_css):.*https?:", MKDOCS, re.MULTILINE)
    assert "data-md-component" not in (DOCS / ".site/theme/partials/source.html").read_text()
    assert "http" not in (DOCS / "assets/extra.js").read_text()
    for picture in OUT.iterdir():
        assert "http" not in picture.read_text().replace("http://www.w3.org/2000/svg", "")
