"""Commands of the pages run as they stand there, on files as the pages describe them; outputs that the pages show are compared."""

from __future__ import annotations

import re
import shlex
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.cli import main
from tests.docs import _readers
from tests.docs._run_blocks import write_base
from tests.docs.blocks import DOCS, ROOT, Block, blocks, pages
from tests.docs.every_block import CONSOLE, is_code, runner
from tests.docs.test_tutorial import plain
from tests.harness import command, models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT's call
]

BLOCKS = [
    block
    for page in pages()
    if "notes" not in page.parts
    for block in blocks(page)
    if is_code(block) and runner(block) == CONSOLE
]
CONFIGS = ROOT / "tests/phases/configs"
LLAVA = "PATH --ranks 8 --auto-class"
LORA = "PATH --ranks 8 --adapter"
#: What stands for a reader's path.
INSTEAD = {
    "Qwen/Qwen3-0.6B": "base",
    "/scratch/": "scratch/",
    "PATH_OR_HUB_ID": "base",
    "MODEL_DIRECTORY": "base",
    "CHECKPOINT_DIRECTORY": "runs/a",
    LLAVA: LLAVA.replace("PATH", "llava"),
    LORA: LORA.replace("PATH", "base"),
    "PATH --ranks 8": f"{CONFIGS}/llama-3-8b.json --ranks 8",
    "PATH --ranks 16": f"{CONFIGS}/qwen3-30b-a3b.json --ranks 16",
}
#: What the commands write.
WRITTEN = ("trained ", "trained-fp8", "report.html", "runs/a/step-00001200", "scratch/qwen3-8b")
#: Not run here: pip needs PyPI, and the demo has tests of its own.
LEFT_OUT = ("pip install ", "shardwise demo ")
#: Outputs that the pages show, by page and title, and what prints them.
SHOWN = {
    ("does-it-fit.md", "Output for a small model on 2 ranks"): "plan small --ranks 2 --device cpu",
    ("doctor.md", "For examples/accelerate_fsdp.yaml"): "doctor examples/accelerate_fsdp.yaml",
    ("object-stores.md", "From the output"): "plan s3://models/small --ranks 2",
}


def write_log() -> None:
    """A run whose loss jumps where it resumes."""
    losses = [2.0 - step / 100 for step in range(20)]
    lines = [f"{{'loss': {loss:.4f}}}" for loss in losses]
    again = [f"{{'loss': {loss + 1:.4f}}}" for loss in losses]
    Path("run.log").write_text("\n".join([*lines, "resuming from checkpoint-20", *again]) + "\n")


def write_checkpoints() -> None:
    """Of shardwise, and of Accelerate and DCP."""
    import torch.distributed.checkpoint as dcp
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("base")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(4)[None]).logits.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sw.save(sw.TrainState(model, optimizer), "runs/a/step-00000100", step=100)
    sw.save(sw.TrainState(sw.load_pretrained("deepseek-v3-fp8")), "runs/a/step-00001000", step=1000)
    weights, moments = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no process group
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="old/step-1200")
    plain_accelerator = Accelerator(cpu=True)
    plain_accelerator.prepare(model, optimizer)
    plain_accelerator.save_state("old/checkpoint_12")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's directory, and a store."""
    made = tmp_path_factory.mktemp("console")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        write_base()
        _readers.write_quantized()
        write_checkpoints()
        write_log()
        models.write_hub_directory("llava", Path("llava"), torch.float32)
        Path("runs/lora").mkdir()
        Path("runs/lora/adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}'
        )
        (base,) = (b for b in blocks(DOCS / "tutorial.md") if b.title == "base.py")
        exec(base.text.replace('"base"', '"small"'), {})
        Path("examples").mkdir()
        for name in ("config.yaml", "examples/accelerate_fsdp.yaml"):
            shutil.copy(ROOT / "examples/accelerate_fsdp.yaml", name)
        with _readers.store() as store:
            store.fill()
            yield made


def same(line: str) -> str:
    """A line without its numbers, and without the file that told the host's memory."""
    return re.sub(r"^(this host .*) \(.*", r"\1", plain(line))


def commands(block: Block) -> list[str]:
    """The block's lines that are run, with paths that exist."""
    lines = [line.removeprefix("$ ") for line in block.text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(LEFT_OUT)]
    for before, after in INSTEAD.items():
        kept = [line.replace(before, after) for line in kept]
    return kept


def run(line: str) -> str:
    """What a command prints. Under torchrun, one rank."""
    words = shlex.split(re.sub(r"^torchrun \S+ -m ", "", line), comments=True)
    assert words[0] == "shardwise", f"how is this run? {line}"
    done = command.runner().invoke(main, words[1:], prog_name="shardwise", env={"COLUMNS": "400"})
    refuses = words[1] == "doctor" or done.output.startswith("Does not fit")
    assert done.exit_code in ((0, 1) if refuses else (0,)), f"{line}\n{done.output}"
    assert "error: " not in done.output[:20], done.output
    return done.output


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b, id=str(b), marks=[pytest.mark.needs("plans")] if "--ep " in b.text else [])
        for b in BLOCKS
    ],
)
def test_commands_run(block: Block, folder: Path) -> None:
    lines = commands(block)
    assert lines, "nothing of it is run"
    for line in lines:
        printed = run(line)
        if "run.log" in line:
            assert "The loss jumped at a resume" in printed
    for name in WRITTEN:
        if any(f" {name}" in f"{line} " for line in lines):
            path = Path(name.strip())
            assert path.exists(), name
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)


@pytest.mark.parametrize(("where", "line"), SHOWN.items(), ids=lambda x: x[0] if isinstance(x, tuple) else "")
def test_the_page_shows_what_is_printed(where: tuple[str, str], line: str, folder: Path) -> None:
    (shown,) = (b for b in blocks(DOCS / "howto" / where[0]) if b.title.startswith(where[1]))
    printed = run(f"shardwise {line}").replace(f"{folder}/", "")
    got = [same(text) for text in printed.splitlines()]
    for expected in shown.text.splitlines():
        begin, dots, _ = same(expected).partition("…")
        assert any(text.startswith(begin) if dots else text == begin for text in got), f"{expected}\n{got}"
