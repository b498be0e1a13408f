"""Outputs of commands on the pages, where they depend on nothing but shardwise. Writes them:

python -m tests.docs.samples
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Sample:
    """A block of a page, and the command that prints it."""

    page: str
    title: str
    words: tuple[str, ...]
    first: str
    """The block begins with the line of the output that begins so: what stands before depends on the machine."""
    until: str | None = None
    """The line before which it ends; None: the end of the output."""

    def printed(self) -> str:
        """What the command prints, from there on."""
        from shardwise.cli import main
        from tests.harness.command import runner

        result = runner().invoke(main, list(self.words), env={"COLUMNS": "120"})
        lines = [line.rstrip() for line in result.stdout.splitlines()]
        start = next(k for k, line in enumerate(lines) if line.startswith(self.first))
        stop = len(lines) if self.until is None else lines.index(self.until, start)
        return "\n".join(lines[start:stop]).rstrip("\n")

    def block(self) -> tuple[str, int, int]:
        """The page, and where the block's content begins and ends in it."""
        text = (ROOT / self.page).read_text()
        opening = f'```text title="{self.title}"\n'
        start = text.index(opening) + len(opening)
        return text, start, text.index("\n```", start)


CONFIGS = ROOT / "tests" / "phases" / "configs"
LLAMA = (
    *("plan", str(CONFIGS / "llama-3-8b.json"), "--ranks", "8", "--batch-size", "4"),
    *("--sequence-length", "4096", "--fit", "80GiB", "--host", "512GiB"),
)
SAMPLES = (
    Sample("docs/howto/does-it-fit.md", "Output: the verdict first", LLAMA, "Does not fit", LLAMA[1]),
    Sample("docs/howto/does-it-fit.md", "The phases, after the output of the load", LLAMA, " phase"),
    Sample(
        "docs/howto/does-it-fit.md",
        "Qwen3-30B-A3B, expert parallelism on each of two nodes",
        (
            *("plan", str(CONFIGS / "qwen3-30b-a3b.json"), "--ranks", "16", "--nodes", "2", "--ep", "8"),
            *("--sequence-length", "4096", "--checkpointing"),
        ),
        " phase",
    ),
)


def main() -> None:
    """Put what the commands print into the pages."""
    for sample in SAMPLES:
        text, start, stop = sample.block()
        (ROOT / sample.page).write_text(text[:start] + sample.printed() + text[stop:])


if __name__ == "__main__":
    main()
