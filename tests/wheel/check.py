"""Tries the wheel in a fresh environment with its required dependencies and nothing else (`make dist`).

    python -m tests.wheel.check dist/shardwise-….whl

Two ranks load, save, resume and export; each command of the command line runs; its help is measured. The environment
is made anew in build/wheel, which is left there for a look.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "wheel"
#: CPU seconds of ``shardwise --help``, beyond those of Python's start.
MOST_HELP_S = 0.5


def run(*command: object) -> str:
    """Run a command outside of the source tree, and give what it prints. Ends this program if it fails."""
    words = [str(word) for word in command]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, cwd=PLACE, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def cpu_s(*command: object) -> float:
    """The least CPU seconds of three runs."""
    found = []
    for _ in range(3):
        process = subprocess.Popen(list(map(str, command)), cwd=PLACE, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{command} ended with {process.returncode}")
        found.append(used.ru_utime + used.ru_stime)
    return min(found)


def check_contents(wheel: Path) -> None:
    """Every module of the source tree, the mark that it is typed, the page of errors and that of reports are in the wheel, no other package."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    expected = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    expected |= {
        "shardwise/py.typed",
        "shardwise/errors.md",
        "shardwise/report/page.html",
        "shardwise/doctor/rules.toml",
    }
    if names != expected:
        sys.exit(f"{wheel.name}: differs from src in {sorted(names ^ expected)}")


def main(wheel: Path) -> None:
    check_contents(wheel)
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    venv.create(PLACE / "venv", with_pip=True)
    bin = PLACE / "venv" / "bin"
    pip = (bin / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(*pip, *constraints, "torch")
    run(*pip, *constraints, wheel)

    shutil.copy(ROOT / "tests" / "wheel" / "uses.py", PLACE)
    torchrun = (bin / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run(*torchrun, PLACE / "uses.py", PLACE)
    command, step = bin / "shardwise", PLACE / "steps" / "step-00000001"
    version = run(command, "--version").split()[-1]
    if f"-{version}-" not in wheel.name:
        sys.exit(f"{wheel.name}: shardwise --version says {version}")
    for words in (
        ("inspect", PLACE / "steps"),
        ("verify", step),
        ("diff", PLACE / "export", PLACE / "export"),
        ("plan", PLACE / "model", "--ranks", "8"),
        ("export", step, PLACE / "exported"),
        ("convert", PLACE / "model", PLACE / "converted", "--to", "checkpoint"),
        ("convert", step, PLACE / "cut anew", "--to", "hf"),
        ("explain", "PlanError"),
        ("demo", "--help"),
    ):
        run(command, *words)
        print(f"{wheel.name}: shardwise {words[0]} runs", flush=True)
    cost = cpu_s(command, "--help") - cpu_s(bin / "python", "-c", "pass")
    print(f"{wheel.name}: shardwise --help takes {cost:.2f} s of CPU beyond Python's start")
    if cost > MOST_HELP_S:
        sys.exit(f"shardwise --help: {cost:.2f} s of CPU, at most {MOST_HELP_S} are allowed")
    print(f"{wheel.name}: two ranks load, save, resume and export without any extra")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
