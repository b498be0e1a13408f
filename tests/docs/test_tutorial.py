"""docs/tutorial.md runs from top to bottom, and prints what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from tests.docs.blocks import DOCS, ROOT, Block, blocks
from tests.docs.shown import check
from tests.harness.command import runner

pytestmark = pytest.mark.slow

TUTORIAL = list(blocks(DOCS / "tutorial.md"))


def commands_of(block: Block) -> list[list[str]]:
    return [shlex.split(line[2:]) for line in block.text.splitlines() if line.startswith("$ ")]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Ranks:
    """Every torchrun command of the page, from its first to its last: they lie next to each other there."""

    def __init__(self, commands: list[list[str]]) -> None:
        asked = [(int(c[2]), free_port(), c[3:]) for c in commands]
        self.output: dict[str, str] = {}
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
        environment = {**os.environ, "PYTHONPATH": path}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.docs._rank", str(rank), json.dumps(asked)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(max(size for size, *_ in asked))
        ]
        try:
            ends = [one.communicate(timeout=120) for one in ranks]
        finally:
            for one in ranks:
                one.kill()
        assert [one.returncode for one in ranks] == [0] * len(ranks), "\n".join(e[1] for e in ends)
        rest = ends[0][0]
        for command in commands:
            end = f"END OF {' '.join(command[3:])}\n"
            self.output[" ".join(command)], _, rest = rest.partition(end)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the commands of each console block printed, by the block's place."""
    folder = tmp_path_factory.mktemp("tutorial")
    torchruns = [c for block in TUTORIAL for c in commands_of(block) if c[0] == "torchrun"]
    ranks: Ranks | None = None
    printed: dict[int, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for place, block in enumerate(TUTORIAL):
            if block.title.endswith(".py"):
                Path(block.title).write_text(block.text)
            for command in commands_of(block):
                if command[0] == "torchrun":
                    ranks = ranks or Ranks(torchruns)
                    text = ranks.output[" ".join(command)]
                elif command[0] == "python":
                    text = run_python(Path(command[1]))
                else:
                    assert command[0] == "shardwise", f"{block}: how is this run? {command}"
                    done = runner().invoke(main, command[1:], prog_name="shardwise", env={"COLUMNS": "400"})
                    text = done.stdout
                    assert done.exit_code == 0, f"{block}: {command}\n{text}"
                printed[place] = printed.get(place, "") + text
    return printed


def run_python(script: Path) -> str:
    """Run here, where torch is imported already; what it prints."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_every_block_is_run() -> None:
    languages = {block.language for block in TUTORIAL}
    assert languages == {"python", "console", "text"}
    assert all(block.title.endswith(".py") for block in TUTORIAL if block.language == "python")
    assert all(commands_of(block) for block in TUTORIAL if block.language == "console")


@pytest.mark.parametrize(
    "place", [i for i, b in enumerate(TUTORIAL) if b.language == "text"], ids=lambda i: str(TUTORIAL[i])
)
def test_the_page_shows_what_is_printed(place: int, outputs: dict[int, str]) -> None:
    check(TUTORIAL[place], TUTORIAL[place].text, outputs[place - 1])


def test_training_learns(outputs: dict[int, str]) -> None:
    losses = [float(x) for text in outputs.values() for x in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
