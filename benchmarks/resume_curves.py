"""Case 5 as a picture: loss curves of runs that were stopped and resumed, beside one that was not.

    python -m benchmarks.resume_curves docs/cases/5-loss-spike.svg

The runs are those of tests/cases/test_case_05_resume.py: a training under Accelerate with FSDP2, saved at step 10.
Prints the largest distances to the uninterrupted run. One to two minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

from tests.cases import _case_05_fns as fns
from tests.cases.test_case_05_resume import END, STOP, write_source
from tests.harness.pool import RankPool


def curves_of(ranks: RankPool, work: Path, dtype: str) -> dict[str, tuple[int, list[float]]]:
    """First step and losses by what was done."""
    source = write_source(work / dtype, getattr(torch, dtype))
    ours, own = str(work / f"{dtype}-ours"), str(work / f"{dtype}-own")
    two = [
        {"begin": 0, "end": END},
        {"begin": 0, "end": STOP, "save": ours},
        {"begin": STOP, "end": END, "resume": ours},
        {"begin": 0, "end": STOP, "save": own, "own": True},
        {"begin": STOP, "end": END, "resume": own, "own": True},
    ]
    four = [{"begin": 0, "end": END}, {"begin": STOP, "end": END, "resume": ours}]
    whole, _, resumed, _, resumed_own = ranks.run_ranks(2, fns.a_life, two, source, dtype, timeout_s=300)[0]
    fresh, elsewhere = ranks.run_ranks(4, fns.a_life, four, source, dtype, timeout_s=300)[0]
    return {
        "never stopped, 2 ranks": (0, whole),
        "never stopped, 4 ranks": (0, fresh),
        "resumed here, 2 ranks": (STOP, resumed),
        "resumed here, 4 ranks": (STOP, elsewhere),
        "Accelerate's own, 2 ranks": (STOP, resumed_own),
    }


def main() -> None:
    picture = Figure(figsize=(10, 7), layout="constrained")
    axes = picture.subplots(2, 2, sharex=True, height_ratios=(3, 2))
    styles = ("-", "-", "o", "x", "+")
    with tempfile.TemporaryDirectory() as work:
        ranks = RankPool(Path(work))
        try:
            for column, dtype in enumerate(("float32", "bfloat16")):
                curves = curves_of(ranks, Path(work), dtype)
                whole = curves["never stopped, 2 ranks"][1]
                for style, (name, (begin, losses)) in zip(styles, curves.items(), strict=True):
                    steps = range(begin, begin + len(losses))
                    away = [abs(a / whole[s] - 1) for s, a in zip(steps, losses, strict=True)]
                    print(f"{dtype}, {name}: at most {max(away):.1e} from the run that never stopped")
                    axes[0][column].plot(steps, losses, style, label=name, fillstyle="none")
                    axes[1][column].plot(steps, away, style, label=name, fillstyle="none")
                axes[0][column].set_title(dtype)
                axes[0][column].axvline(STOP - 0.5, color="lightgray", zorder=0)
                axes[1][column].set_yscale("symlog", linthresh=1e-8)
                axes[1][column].set_xlabel("step (saved after 10)")
        finally:
            ranks.close()
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("relative distance")
    axes[0][0].legend()
    picture.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
