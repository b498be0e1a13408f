"""Runs commands of the command line inside the test."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner, Result

__all__ = ["runner"]


def runner() -> CliRunner:
    """A runner whose results have stdout and stderr apart, and both in ``output``, as click 8.2 has them.

    click before 8.2 puts both into stdout unless told otherwise, and then stdout alone into ``output``.
    """
    is_old = "mix_stderr" in inspect.signature(CliRunner).parameters
    return _Apart(mix_stderr=False) if is_old else CliRunner()  # type: ignore[call-arg]


class _Apart(CliRunner):
    def invoke(self, *args: Any, **options: Any) -> Result:
        result = super().invoke(*args, **options)
        result.__class__ = _Both
        return result


class _Both(Result):
    @property
    def output(self) -> str:
        return self.stdout + self.stderr
