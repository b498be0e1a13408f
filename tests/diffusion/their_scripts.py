"""Runs a training script of diffusers with and without shardwise's two changed lines, on two CPU ranks, with a tiny model.

    python -m tests.diffusion.their_scripts path/to/diffusers/examples/dreambooth/train_dreambooth_lora_z_image.py

It needs torchvision, whose compiled operators may be missing. Each script takes four steps and saves at the second; a copy of its output
without the later files is resumed. Prints whether the LoRA files are bit-identical. Exit status 0: those of shardwise are.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.harness.process import worker_env

CHANGES = {
    "from accelerate import Accelerator\n": "from shardwise.integrations.accelerate import ShardwiseAccelerator as Accelerator\n",
    "    transformer = ZImageTransformer2DModel.from_pretrained(\n": "    transformer = accelerator.load_pretrained(\n",
}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "ZImageTransformerBlock",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def tokenizer(folder: Path) -> Any:
    import transformers

    words = [*map(chr, range(33, 127)), "Ġ", "Ċ", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    (folder / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    made = transformers.Qwen2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    )
    return made


def write_base(folder: Path) -> None:
    """A tiny Z-Image pipeline in ``base``, and four images in ``images``."""
    import diffusers
    import numpy as np
    import transformers
    from diffusers.image_processor import VaeImageProcessor

    torch.manual_seed(0)
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "pad_token" in name:
                parameter.normal_(std=0.02)
    text = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        max_position_embeddings=512,
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[32, 32],
        latent_channels=4,
        sample_size=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )
    diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=transformers.Qwen3Model(text),
        tokenizer=tokenizer(folder),
        transformer=transformer,
    ).save_pretrained(folder / "base")
    (folder / "images").mkdir()
    pixels = np.random.default_rng(0).random((4, 32, 32, 3))
    for k, image in enumerate(VaeImageProcessor.numpy_to_pil(pixels)):
        image.save(folder / "images" / f"{k}.png")


def launch(script: Path, folder: Path, out: str, *options: str) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.diffusion.their_scripts", "--rank", str(script)),
        *("--pretrained_model_name_or_path", str(folder / "base"), "--output_dir", str(folder / out)),
        *("--instance_data_dir", str(folder / "images"), "--instance_prompt", "a dog", "--resolution", "32"),
        *("--max_train_steps", "4", "--checkpointing_steps", "2", "--seed", "0", "--learning_rate", "1e-2"),
        *("--mixed_precision", "no", "--max_sequence_length", "32", "--train_batch_size", "1", *options),
    ]
    env = worker_env() | FSDP | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


#: torchvision is imported, and none of its operators is called: those of a release for GPUs can't be loaded here.
OPERATORS = torch.library.Library("torchvision", "DEF")
for NAME in ("nms", "qnms"):
    OPERATORS.define(f"{NAME}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def run_rank(arguments: list[str]) -> None:
    """As one of several GPUs: on CPU, Accelerate ignores FSDP."""
    sys.argv = ["accelerate_on_cpu", *arguments]
    runpy.run_module("tests.harness.accelerate_on_cpu")


def are_equal(folder: Path, left: str, right: str) -> bool:
    a, b = (load_file(folder / out / "pytorch_lora_weights.safetensors") for out in (left, right))
    is_equal = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    print(f"{left} and {right}: {'bit-identical' if is_equal else 'different'}, {len(a)} tensors", flush=True)
    return is_equal


def main(script: Path) -> int:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_base(folder)
        text = script.read_text()
        for line, ours in CHANGES.items():
            assert text.count(line) == 1, line
            text = text.replace(line, ours)
        (folder / "changed.py").write_text(text)
        for out, program in (("unchanged", script), ("changed", folder / "changed.py")):
            launch(program, folder, out)
            shutil.copytree(folder / out, folder / f"{out}-resumed")
            for name in ("checkpoint-4", "pytorch_lora_weights.safetensors"):
                later = folder / f"{out}-resumed" / name
                shutil.rmtree(later) if later.is_dir() else os.unlink(later)
            launch(program, folder, f"{out}-resumed", "--resume_from_checkpoint", "latest")
        same = are_equal(folder, "unchanged", "changed")
        are_equal(folder, "unchanged", "unchanged-resumed")
        return int(not (are_equal(folder, "changed", "changed-resumed") and same))


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        run_rank(sys.argv[2:])
    else:
        sys.exit(main(Path(sys.argv[1])))
