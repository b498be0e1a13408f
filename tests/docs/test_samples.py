"""Outputs on the pages are what the commands print."""

from __future__ import annotations

import pytest

from tests.docs.samples import SAMPLES, Sample


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(
            sample, id=sample.title, marks=[pytest.mark.needs("plans")] if "--ep" in sample.words else []
        )
        for sample in SAMPLES
    ],
)
def test_the_page_shows_what_the_command_prints(sample: Sample) -> None:
    text, start, stop = sample.block()
    assert text[start:stop] == sample.printed(), "python -m tests.docs.samples writes it"
