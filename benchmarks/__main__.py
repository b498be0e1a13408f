"""All benchmarks that have contracts, one after the other: ``make bench``.

    python -m benchmarks            # half an hour on two cores
    python -m benchmarks --short    # tiny: that everything runs; no contracts on seconds

A script that fails or breaks a contract does not stop the others; the exit status is then 1.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

#: By script: options of the long form, of the short form.
SCRIPTS = {
    "load.py": (
        [
            "--json",
            "build/bench/load.json",
            "--table",
            "build/bench/load.md",
            "--png",
            "build/bench/load.png",
        ],
        ["--short"],
    ),
    "save.py": (["--pairs", "3"], ["--ranks", "2", "--gib", "0.02", "--pairs", "1", "--loop-s", "0.2"]),
    "memory_tier.py": ([], ["--short"]),
    "metadata.py": (["--repeats", "1"], ["--params", "200", "--ranks", "16", "--repeats", "1"]),
    "scale.py": (
        ["--ranks", "64", "1024", "--rounds", "3"],
        ["--ranks", "8", "32", "--params", "200", "--tensors", "1000", "--rounds", "2", "--processes", "2"],
    ),
    "per_tensor.py": ([], ["--short"]),
    "first_load.py": (["--rounds", "5"], ["--short"]),
    "planning.py": (["--repeats", "2"], ["--layers", "2", "--repeats", "1"]),
    "page_cache.py": (["--pairs", "3"], ["--short", "--pairs", "1"]),
    "cold_reads.py": (["--ranks", "1", "4", "--rounds", "2"], ["--short", "--ranks", "2", "--rounds", "1"]),
    "digest.py": ([], ["--repeats", "1"]),
    "quantized.py": ([], ["--short"]),
    "qlora.py": ([], ["--short"]),
    "pipeline.py": ([], ["--short"]),
    "store.py": (["--rounds", "3"], ["--short"]),
    "phases.py": (["--only", "dense", "tied", "moe, bf16", "vlm"], ["--short"]),  # all: make phases
    "plan_configs.py": ([], ["--short"]),
}
#: In the short form their bounds on seconds say nothing, so that 1 is no failure.
JUDGES_SECONDS = ("save.py", "metadata.py", "page_cache.py")


def main() -> None:
    """Run them, print what each took."""
    if set(sys.argv[1:]) - {"--short"}:
        raise SystemExit(__doc__)
    short = "--short" in sys.argv[1:]
    Path("build/bench").mkdir(parents=True, exist_ok=True)
    outcomes = []
    for script, options in SCRIPTS.items():
        print(f"\n== {script}", flush=True)
        started = time.monotonic()
        command = [sys.executable, str(Path(__file__).parent / script), *options[short]]
        status = subprocess.run(command, check=False).returncode
        fine = (0, 1) if short and script in JUDGES_SECONDS else (0,)
        outcomes.append((script, time.monotonic() - started, "fine" if status in fine else f"exit {status}"))
    print("\n== all")
    for script, seconds, outcome in outcomes:
        print(f"{script:14} {seconds / 60:5.1f} min  {outcome}")
    sys.exit(any(outcome != "fine" for _, _, outcome in outcomes))


if __name__ == "__main__":
    main()
