"""Which step a command takes of a run's directory."""

from __future__ import annotations

import click

__all__ = ["one_step"]


def one_step(path: str) -> str:
    """``path``; of a directory of steps the newest valid one, as a resume takes it, and a line on stderr says so.

    Under a launcher every rank must call it, and rank 0 decides: a run may publish a step meanwhile. Raises as :func:`.newest_step`.
    """
    from ..ranks.ranks import Ranks
    from ..runs.history import newest_step

    ranks = Ranks.current()

    def look() -> list[str]:
        found = newest_step(path) if ranks.rank == 0 else None
        if found is None:
            return [path, ""]
        what = "the newest one (not checked)" if found.ok is None else "the newest valid one"
        return [found.path, f"{path}: took step {found.step}, {what}: {found.path}"]

    taken, said = ranks.combine("choose the step", look, lambda found: found[0])
    if said and ranks.rank == 0:
        click.echo(said, err=True)
    return taken
