"""Which test runs a block of the site, and which compares what it shows. Prints how many blocks there are of each kind:

    python -m tests.docs.every_block

A page's blocks are run by the page's test, but for those that the other tables name by words in their title or text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import ROOT, Block, after_diff, blocks, pages
from tests.docs.shown import paths, values
from tests.harness.versions import lacking

__all__ = [
    "ALONE",
    "CONSOLE",
    "DRAWN",
    "ELSEWHERE",
    "EXAMPLES",
    "INTEGRATED",
    "NOT_RUN",
    "OUTPUTS",
    "RUN_BY",
    "SHOWN",
    "Row",
]
__all__ += ["can_run", "examples", "is_code", "is_named", "output_of", "rows", "runner", "site"]

ALONE = "test_pages.py::test_blocks_run"
INTEGRATED = "test_pages.py::test_blocks_of_integrations_run"
CONSOLE = "test_console.py::test_commands_run"
SHOWN = "test_console.py::test_the_page_shows_what_is_printed"
PROGRAMS = "test_programs.py::test_run_again_and_after_a_kill"
TUTORIAL = "test_tutorial.py::test_the_page_shows_what_is_printed"
LIGHTNING = "test_migrate.py::test_lightning"
ACCELERATE = "test_migrate.py::test_accelerate"
UNSEEN = "test_on_ranks.py::test_files_that_one_rank_does_not_see"
UNREAD = "test_on_ranks.py::test_files_that_are_not_in_memory"


def _pages(test: str, folder: str, *names: str) -> dict[str, str]:
    return {f"{folder}{name}.md": test for name in names}


#: By page, the test of its Python blocks and diffs.
RUN_BY = {
    "README.md": ALONE,
    **_pages(ALONE, "docs/", "index", "install", "troubleshooting", "reference/api/index"),
    **_pages(ALONE, "docs/concepts/", "digests", "exactness", "proof"),
    **_pages(ALONE, "docs/cases/", "3-rl-engines", "4-unified-memory"),
    **_pages(
        ALONE,
        "docs/howto/",
        "diffusers",
        "does-it-fit",
        "from-pretrained",
        "logging",
        "memory-tier",
        "other-models",
        "own-loop",
    ),
    **_pages(
        ALONE,
        "docs/howto/",
        "peft",
        "pipeline-parallel",
        "qlora",
        "report",
        "rl",
        "sources",
        "tensor-parallel",
    ),
    **_pages(ALONE, "docs/howto/stores/", "azure", "s3"),
    **_pages(ALONE, "docs/migrate/", "dcp", "deepspeed", "fsdp1"),
    **_pages(INTEGRATED, "docs/cases/", "1-device-mesh", "2-host-memory", "5-loss-spike"),
    **_pages(INTEGRATED, "docs/howto/", "accelerate", "object-stores", "preemption", "runs-in-a-store"),
    **_pages(INTEGRATED, "docs/howto/", "several-hosts", "trainer"),
    "docs/migrate/accelerate.md": ACCELERATE,
    "docs/migrate/lightning.md": LIGHTNING,
    "docs/tutorial.md": TUTORIAL,
}
#: Blocks that another test runs, by page and words in them.
ELSEWHERE = {
    ("README.md", "while step < total_steps"): PROGRAMS,
    ("docs/howto/preemption.md", "checkpoints.stop(state, step)"): PROGRAMS,
    ("docs/howto/running-for-weeks.md", "while step < total_steps"): PROGRAMS,
    ("docs/troubleshooting.md", "ShardwiseAccelerator"): INTEGRATED,
    ("docs/howto/metrics.md", "print(metrics)"): "test_metrics.py::test_print",
    ("docs/howto/metrics.md", "import wandb"): "test_metrics.py::test_wandb",
    ("docs/howto/metrics.md", "SummaryWriter"): "test_metrics.py::test_tensorboard",
    ("docs/howto/metrics.md", "import mlflow"): "test_metrics.py::test_mlflow",
    ("docs/howto/metrics.md", "trainer.train()"): INTEGRATED,
    ("docs/tutorial.md", "$ "): TUTORIAL,
    ("CONTRIBUTING.md", "@on_ranks"): "test_contributing.py::test_these_are_tests",
    ("CONTRIBUTING.md", "ranks.run_ranks"): "test_contributing.py::test_these_are_tests",
    ("CONTRIBUTING.md", "with Launch("): "test_contributing.py::test_killing_ranks",
    ("docs/concepts/strategies.md", "can't see the files"): UNSEEN,
    ("docs/concepts/strategies.md", "print(report.reads)"): UNREAD,
    ("docs/howto/tensor-parallel.md", "titan_loop.py"): "test_on_ranks.py::test_tensor_parallel_loop",
    ("docs/howto/several-hosts.md", "rsync"): "test_on_ranks.py::test_parts_of_hosts_are_merged",
    ("docs/howto/launchers.md", "sbatch"): "test_shell.py::test_a_job_of_slurm",
    (
        "docs/howto/preemption.md",
        "scontrol requeue",
    ): "test_shell.py::test_which_status_asks_slurm_for_the_job_again",
    ("docs/install.md", "pip install ./shardwise"): "test_shell.py::test_install_from_a_clone",
    ("docs/install.md", "pip wheel"): "test_shell.py::test_install_from_a_clone",
    ("docs/howto/stores/s3.md", "aws s3api"): "test_shell.py::test_the_lifecycle_rule",
}
#: The tests that compare the values in comments of Python blocks, by the tests that run the blocks.
VALUES = {
    **{test: test for test in (ALONE, INTEGRATED, LIGHTNING, ACCELERATE, UNSEEN, UNREAD)},
    PROGRAMS: "test_programs.py::test_values_in_comments",
}
#: Outputs that aren't those of the console block before them, by page and words, and what prints them: a command, or a test's own way.
OUTPUTS = {
    ("docs/howto/does-it-fit.md", "for a small model"): "shardwise plan small --ranks 2 --device cpu",
    ("docs/howto/diffusers.md", "--fit 40GiB"): "test_listings.py::test_plan_of_a_pipeline",
    ("docs/howto/doctor.md", "accelerate.device-mesh"): "shardwise doctor examples/accelerate_fsdp.yaml",
    ("docs/howto/logging.md", "INFO:shardwise.progress"): "test_listings.py::test_log_lines",
    ("docs/howto/runs-in-a-store.md", "head.json"): "test_console.py::test_objects_of_a_run",
    ("docs/format.md", "manifest.json"): "test_listings.py::test_files_of_a_checkpoint",
    ("docs/errors.md", "ShardwiseError"): "test_listings.py::test_tree_of_errors",
}
#: What runs each example, below tests/.
EXAMPLES = {
    "accelerate_fsdp.py": "examples/test_accelerate_launch.py",
    "accelerate_fsdp.yaml": "examples/test_accelerate_launch.py",
    "elastic.py": "checkpoint/test_elastic.py",
    "diffusers_accelerate.py": "examples/test_diffusers_examples.py",
    "diffusers_loop.py": "examples/test_diffusers_examples.py",
    "fabric_loop.py": "examples/_loops_fns.py",
    "jobset.yaml": "launchers/test_jobset.py",
    "own_loop.py": "examples/_rl_engine_fns.py",
    "preemptible.py": "ranks/test_torchrun.py",
    "ray_train.py": "launchers/ray_train.py",
    "rl_engine.py": "examples/_rl_engine_fns.py",
    "rl_handover.py": "handover/_example.py",
    "titan_loop.py": "examples/_loops_fns.py",
    "trainer_sft.py": "examples/test_trainer_example.py",
}
#: Blocks that are neither code nor output.
DRAWN = {
    ("docs/concepts/index.md", "catalog"): "a drawing",
    ("docs/howto/stores/gcs.md", '"rule"'): "a file for gcloud",
    ("docs/howto/stores/s3.md", '"Version"'): "a policy for AWS",
    (
        "docs/howto/stores/s3.md",
        '"Rules"',
    ): "a file for aws, which the test of the command below it hands over",
}
#: Blocks that no test runs, and why.
NOT_RUN = {
    ("docs/index.md", "git clone"): "test_shell.py runs these commands of docs/install.md",
    ("docs/howto/object-stores.md", "pip install"): "installs from PyPI",
    ("docs/howto/runs-in-a-store.md", "pip install"): "installs from PyPI",
    ("docs/howto/stores/gcs.md", "gcloud storage"): "needs a Google account",
    ("docs/howto/rl.md", "weight_transfer_config"): "needs vLLM; `make engines` makes these calls",
    (
        "docs/howto/diffusers.md",
        "--model transformer_2",
    ): "needs a run of a large pipeline; tests/diffusion/test_commands.py runs both on a small one",
    (
        "docs/howto/diffusers.md",
        "accelerator.load_pretrained",
    ): "lines of diffusers' own scripts, which `python -m tests.diffusion.their_scripts` runs",
    (
        "docs/howto/other-models.md",
        "SentenceTransformer",
    ): "needs sentence-transformers; tests/others/test_sentences.py runs these calls with it",
    (
        "docs/howto/other-models.md",
        "torchtune",
    ): "needs torchtune; tests/others/test_torchtune.py runs these calls with it",
    (
        "docs/howto/other-models.md",
        "get_policy_class",
    ): "needs LeRobot; tests/others/test_lerobot.py runs these calls with it",
    ("docs/howto/doctor.md", "torchrun --nnodes 4"): "needs four hosts; tests/doctor runs it on ranks of one",
    (
        "docs/figures.md",
        "make bench",
    ): "half an hour; tests/meta/test_benchmarks.py runs its scripts, shortened",
    ("docs/figures.md", "make phases"): "45 minutes; tests/phases runs its cases, smaller",
    (
        "docs/figures.md",
        "benchmarks.host_memory\n",
    ): "minutes; tests/meta/test_benchmarks.py runs it, shortened",
    (
        "docs/figures.md",
        "benchmarks.crash_curves",
    ): "minutes; test_site.py draws the charts from what they wrote",
    ("README.md", "make demo"): "minutes; tests/demo runs the demo, CI the tests and the site",
    ("CONTRIBUTING.md", "make install"): "the development environment and its tests, which CI makes and runs",
}
#: Blocks that need more than the oldest packages, by page and words in them, and the gate.
GATED = {
    ("docs/howto/qlora.md", "quantized=bnb_config"): "integers",
    ("docs/howto/sources.md", 'quantized="keep"'): "kept-fp8",
    ("docs/howto/does-it-fit.md", "--ep "): "plans",
    ("", "Trainer("): "trainer",
    ("", "trainer."): "trainer",
}


def is_code(block: Block) -> bool:
    """Whether a block is meant to be run: not an output, a drawing or a file."""
    if block.language in ("python", "diff", "console", "sh"):
        return True
    first = block.text.split(maxsplit=1)[0]
    return block.language == "" and first in ("git", "pip", "shardwise", "make", "aws", "gcloud")


def is_named(block: Block, row: tuple[str, str]) -> bool:
    return block.page == row[0] and row[1] in f"{block.title}\n{block.text}"


def _found(block: Block, table: dict[tuple[str, str], str]) -> str | None:
    return next((value for row, value in table.items() if is_named(block, row)), None)


def output_of(block: Block) -> str | None:
    """The command, or the test, that prints what a block shows, where it isn't the command before it."""
    return _found(block, OUTPUTS)


def runner(block: Block) -> str | None:
    """The test that runs a block; None where none does."""
    if _found(block, NOT_RUN):
        return None
    if test := _found(block, ELSEWHERE):
        return test
    if block.language in ("python", "diff"):
        return RUN_BY.get(block.page)
    return CONSOLE


def can_run(block: Block) -> bool:
    """Whether the packages installed here are new enough for a block."""
    gates = {gate for (page, words), gate in GATED.items() if page in block.page and words in block.text}
    return all(lacking(gate) is None for gate in gates)


# ----------------------------------------------------------------------------------------------------
# What each block shows


@dataclass(frozen=True)
class Row:
    """A block, and what becomes of it."""

    block: Block
    kind: str
    """``compared``, ``no output shown`` (and run), ``not run``, ``drawn``, or ``unknown``, which is an error."""
    why: str
    """The test, or the reason."""


def site() -> Iterator[tuple[Block, Block | None]]:
    """Every block of the site; with a block that shows an output, the one of the command before it."""
    for page in (*pages(), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"):
        command = None
        for block in blocks(page):
            if block.language != "text":
                command = block if block.language == "console" else None
            yield block, None if block is command else command


def examples() -> list[Path]:
    """The programs that the site shows whole."""
    return [file for file in sorted((ROOT / "examples").iterdir()) if file.suffix in (".py", ".yaml")]


def rows() -> list[Row]:
    """All blocks of the site. A command is compared if it shows its output, or the block below it does."""
    found = list(site())
    shown = {command for block, command in found if command is not None and not _found(block, OUTPUTS)}
    return [
        _code(block, is_shown_below=block in shown) if is_code(block) else _shown(block, command)
        for block, command in found
    ]


def shows(block: Block) -> bool:
    """Whether a block of code shows what it prints, or a value."""
    if block.language == "console":
        return any(line and not line.startswith("$ ") for line in block.text.splitlines())
    if block.language not in ("python", "diff"):
        return False
    code = after_diff(block).text if block.language == "diff" else block.text
    return bool(values(code) or paths(code))


def _code(block: Block, *, is_shown_below: bool) -> Row:
    if reason := _found(block, NOT_RUN):
        return Row(block, "unknown" if shows(block) else "not run", reason)
    test = runner(block)
    if test is None:
        return Row(
            block, "unknown", "no test runs it: add its page to RUN_BY, or the block to NOT_RUN with a reason"
        )
    if is_shown_below:
        return Row(block, "compared", TUTORIAL if test == TUTORIAL else SHOWN)
    if not shows(block):
        return Row(block, "no output shown", test)
    if block.language == "console":
        return Row(block, "compared" if test in (CONSOLE, TUTORIAL) else "unknown", test)
    return Row(
        block, "compared" if test in VALUES else "unknown", VALUES.get(test, f"{test} compares nothing")
    )


def _shown(block: Block, command: Block | None) -> Row:
    if block.language == "mermaid":
        return Row(block, "drawn", "a drawing")
    if reason := _found(block, DRAWN):
        return Row(block, "drawn", reason)
    if source := _found(block, OUTPUTS):
        return Row(block, "compared", source if "::" in source else SHOWN)
    if command is not None:
        return Row(block, "compared", TUTORIAL if block.page == "docs/tutorial.md" else SHOWN)
    return Row(block, "unknown", "what prints it? Add it to OUTPUTS or DRAWN")


def main() -> None:
    found = rows()
    for kind in ("compared", "no output shown", "not run", "drawn", "unknown"):
        print(f"{kind:16} {sum(row.kind == kind for row in found)}")
    for row in found:
        if row.kind in ("not run", "unknown"):
            print(f"{row.block}  {row.kind}: {row.why}")


if __name__ == "__main__":
    main()
