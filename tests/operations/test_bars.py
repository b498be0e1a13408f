"""Bars on a real terminal, a pseudo-terminal of this test: what they show, how they go, and when there are none."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cli import main, program
from tests.harness.command import runner

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SCRIPT = """
import fcntl, os, signal, struct, sys, termios, time
import shardwise as sw
from shardwise.operations.operation import in_background, operation

def work(name="load", fails=False):
    with operation(name, "/data/a-model-with-quite-a-long-name/and-a-step-00000100") as counted:
        counted.expect(lambda: 3 * 2**30)
        for k in range(4):
            counted.add(2**29)
            time.sleep(0.12)
            if fails and k == 2:
                raise ValueError("of the work")

def width(chars):
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 25, chars, 0, 0))
"""


def in_terminal(
    command: Sequence[str], *, columns: int = 100, env: Mapping[str, str] | None = None, kill_after: str = ""
) -> tuple[int, str, str]:
    """Status, stdout (a pipe), and what a terminal at stderr got. Sends SIGTERM once ``kill_after`` has come."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **(env or {})},
    )
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end was closed
                break
            if kill_after and kill_after in ESCAPE.sub("", shown.decode(errors="replace")):
                process.send_signal(signal.SIGTERM)
                kill_after = ""
    os.close(ours)
    out, _ = process.communicate(timeout=30)
    return process.returncode, out, shown.decode()


def run_script(lines: str, **options: object) -> tuple[int, str, str]:
    return in_terminal([sys.executable, "-c", SCRIPT + lines], **options)  # type: ignore[arg-type]


def screen(shown: str) -> list[str]:
    """What is left on the screen, for the few codes that bars use: up a line, erase a line, return."""
    lines, row, column = [""], 0, 0
    for code, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", shown):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif code == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif code == "\r":
            column = 0
        elif code.endswith("A"):
            row = max(0, row - int(code[2:-1] or 1))
        elif code == "\x1b[2K":
            lines[row] = ""
        else:
            assert code.endswith("m"), f"{code!r}: an unexpected code"
    return [line for line in lines if line.strip()]


def frames(shown: str) -> list[str]:
    """Every line that was drawn, without colors."""
    return [line for line in re.split(r"[\r\n]+", ESCAPE.sub("", shown)) if line.strip()]


def test_a_bar_and_what_is_left_of_it() -> None:
    """Bytes, rate and remaining time while it runs; nothing afterwards, also of a failure. The cursor is never hidden."""
    status, out, shown = run_script("""
with sw.progress():
    work()
    print("printed")
    with sw.progress():  # one bar, not two
        work("save")
    try:
        work("verify", fails=True)
    except ValueError:
        print("failed", file=sys.stderr, flush=True)
    with in_background():
        work("copy")
work("diff")
""")
    assert (status, out) == (0, "printed\n")
    last = [line for line in frames(shown) if line.startswith("load and-a-step-00000100")][-1]
    assert re.search(r"━+ 2\.00 GiB/3\.00 GiB +[\d.]+ GiB/s 0:00:0\d", last), last
    assert "save and-a" in ESCAPE.sub("", shown)
    assert "verify and-a" in ESCAPE.sub("", shown)
    assert "copy" not in shown, "the caller goes on meanwhile, and writes to the terminal"
    assert "diff" not in shown, "outside of the block"
    assert screen(shown) == ["failed"]
    assert "\x1b[?25l" not in shown


@pytest.mark.nightly
def test_narrow_terminals_and_no_color() -> None:
    """One line at every width, with at least the remaining time."""
    _, _, shown = run_script(
        """
with sw.progress():
    for chars in (12, 24, 32, 48, 60, 72, 90):
        width(chars)
        print(f"at {chars}", file=sys.stderr, flush=True)
        work()
""",
        env={"NO_COLOR": "1"},
    )
    assert set(re.findall(r"\x1b\[([\d;]*)m", shown)) <= {"", "0", "1", "2", "3"}, "no color"
    chars, seen = 0, set()
    for line in frames(shown):
        if found := re.fullmatch(r"at (\d+)", line.strip()):
            chars = int(found[1])
            continue
        assert len(line.rstrip()) <= chars, (chars, line)
        assert re.search(r"(-:--:--|\d:\d\d:\d\d)$", line.rstrip()), (chars, line)
        assert ("GiB/s" in line or "B/s" in line) == (chars >= 48), (chars, line)
        begun = " 0 B/" not in line  # without colors the bar is empty before
        assert ("━" in line) == (chars >= 72 and begun), (chars, line)
        seen.add(chars)
    assert seen == {12, 24, 32, 48, 60, 72, 90}
    assert screen(shown) == [f"at {chars}" for chars in (12, 24, 32, 48, 60, 72, 90)]


def test_killed_amid_a_bar() -> None:
    """The terminal needs no help afterwards: the cursor is visible, no mode is set."""
    status, _, shown = run_script(
        "with sw.progress():\n    work()\n    work()\n", kill_after="1.00 GiB/3.00 GiB"
    )
    assert status == -signal.SIGTERM
    assert "\x1b[?" not in shown


@pytest.mark.parametrize("env", [{"RANK": "1"}, {"TERM": "dumb"}], ids=["another rank", "no cursor"])
def test_no_bar(env: dict[str, str]) -> None:
    status, _, shown = run_script("with sw.progress():\n    work()\n", env=env)
    assert (status, shown) == (0, "")


EACH = """
import logging, os, sys
import torch
import shardwise as sw

logging.basicConfig(level=logging.INFO, format="%(message)s")
root = sys.argv[1]
model = torch.nn.Linear(2000, 4000)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2000)).sum().backward()
optimizer.step()
optimizer.zero_grad()
state = sw.TrainState(model=model, optimizer=optimizer)
with sw.progress():
    with sw.Checkpointer(f"{root}/run") as checkpoints:
        checkpoints.save(state, 1)
        checkpoints.resume(state)
    step = f"{root}/run/step-00000001"
    sw.load(model, step)
    sw.verify(step)
    sw.copy_checkpoint(step, f"{root}/copied")
    sw.export_hf(model, f"{root}/exported")
    sw.convert(f"{root}/exported", f"{root}/converted")
"""
OPERATIONS = {  # MiB of the whole, and what its bar is called
    "save": (91.6, "step-00000001"), "resume": (91.6, "step-00000001"), "load": (30.5, "step-00000001"),
    "verify": (91.6, "step-00000001"), "copy": (183, "copied"), "export": (30.5, "exported"), "convert": (30.5, "converted"),
}  # fmt: skip
DOING = {
    "save": "saving", "resume": "resuming from", "load": "loading", "verify": "verifying",
    "copy": "copying to", "export": "exporting to", "convert": "converting to",
}  # fmt: skip


def test_each_operation_on_a_terminal(tmp_path: Path) -> None:
    """Its total from the first line on, a rate, and the remaining time."""
    status, _, shown = in_terminal([sys.executable, "-c", EACH, str(tmp_path)])
    assert status == 0, shown
    lines = frames(shown)
    for name, (mib, label) in OPERATIONS.items():
        own = [line for line in lines if line.startswith(f"{name} {label} ")]
        assert own, (name, lines)
        found = [
            re.search(r"([\d.]+) [KM]?i?B/([\d.]+) MiB +([\d.]+) ([KMG]i)?B/s (\S+)", line) for line in own
        ]
        assert None not in found, own
        assert {float(one[2]) for one in found if one} == {mib}, own
        assert re.fullmatch(r"-:--:--|0:00:\d\d", found[-1][5]), own  # type: ignore[index]
    assert [line for line in screen(shown) if not line.startswith("restored step ")] == []


@pytest.mark.nightly
def test_each_operation_in_a_log(tmp_path: Path) -> None:
    """Two lines for each where there is no terminal."""
    command = [sys.executable, "-c", EACH, str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    lines = [line for line in done.stderr.splitlines() if re.match(r"\w+(?: from| to)? /", line)]
    for (begin, end), (name, (mib, _)) in zip(
        zip(lines[::2], lines[1::2], strict=True), OPERATIONS.items(), strict=True
    ):
        assert re.fullmatch(rf"{DOING[name]} /.*: {mib} MiB", begin), begin
        assert re.fullmatch(rf"{DOING[name]} /.*: done, {mib} MiB in [\d.]+ s, [\d.]+ [MG]iB/s", end), end


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bars") / "step-00000003"
    model = nn.Linear(2000, 5000)
    sw.save(sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters())), path, step=3)
    return path


@pytest.mark.nightly
def test_commands(step: Path, tmp_path: Path) -> None:
    """A bar on a terminal, which goes before the error is printed; none beside --json."""
    damaged = tmp_path / step.name
    shutil.copytree(step, damaged)
    file = next(damaged.glob("model/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    command = [sys.executable, "-m", "shardwise"]
    status, out, shown = in_terminal([*command, "copy", str(damaged), str(tmp_path / "copied")])
    assert (status, out) == (1, "")
    assert re.search(r"copy copied ━+ .*/76\.4 MiB ", ESCAPE.sub("", shown)), shown
    left = screen(shown)
    assert left[0].startswith("error: "), left
    status, out, shown = in_terminal([*command, "verify", str(damaged), "--json"])
    assert (status, shown) == (1, "")
    assert not json.loads(out)["ok"]


def test_long_commands_say_so_in_logs(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal, of operations that take longer: what they began, and how they ended."""
    monkeypatch.setattr(program, "LINES_AFTER_S", 0.0)
    result = runner().invoke(main, ["verify", str(step)])
    begin, end = result.stderr.splitlines()
    assert begin == f"INFO: verifying {step}: 38.2 MiB"
    assert end.startswith(f"INFO: verifying {step}: done, 38.2 MiB in ")
    assert runner().invoke(main, ["verify", str(step), "--json"]).stderr == ""
