"""Runs training scripts of diffusers with and without shardwise's changed lines, on two CPU ranks, with tiny models.

    python -m tests.diffusion.their_scripts path/to/diffusers/examples/dreambooth/train_dreambooth_lora_flux2*.py

Takes any of :data:`SCRIPTS`, from diffusers 0.40: six that support FSDP, and one that doesn't. It needs torchvision, whose compiled operators
may be missing. Each script takes four steps and saves at the second, where an epoch ends, and that checkpoint alone is resumed. Prints whether
the weights are bit-identical. Exit status 0: those of shardwise are. Takes two minutes for each script on two idle cores.
"""

from __future__ import annotations

import difflib
import json
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from tests.diffusion.models import write_pipeline
from tests.harness.process import worker_env

IMPORT = "from accelerate import Accelerator\n"
OURS = "from shardwise.integrations.accelerate import ShardwiseAccelerator as Accelerator\n"
#: As the scripts' README advises, without activation checkpointing: the unchanged scripts then find no adapters to save. Accelerate takes
#: the classes to wrap from the model.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def tokenizer(folder: Path) -> Any:
    """Of characters. Its chat template leaves out the system's message, which is longer than a tiny sequence."""
    import transformers

    special = ["<|im_start|>", "<|im_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    words = [*map(chr, range(33, 127)), "Ġ", "Ċ", "<|endoftext|>", *special]
    (folder / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    made = transformers.Qwen2Tokenizer(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"), extra_special_tokens=special
    )
    made.chat_template = (
        "{% for m in messages if m.role == 'user' %}<|im_start|>{{m.role}}\n"
        "{{m.content if m.content is string else m.content[0].text}}<|im_end|>\n{% endfor %}"
    )
    return made


#: Of every language model here.
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
BLOCKS = {
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [16, 16],
    "norm_num_groups": 4,
    "sample_size": 32,
}


def z_image(folder: Path) -> Any:
    import diffusers
    import transformers

    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "pad_token" in name:
                parameter.normal_(std=0.02)
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(**BLOCKS, latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=transformers.Qwen3Model(transformers.Qwen3Config(**TEXT, num_hidden_layers=2)),
        tokenizer=tokenizer(folder),
        transformer=transformer,
    )


def _flux2_parts() -> dict[str, Any]:
    import diffusers

    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * TEXT["hidden_size"],
        axes_dims_rope=[4, 4, 4, 4],
    )
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "vae": diffusers.AutoencoderKLFlux2(**BLOCKS, latent_channels=2),
        "transformer": transformer,
    }


def flux2(folder: Path) -> Any:
    """Its text encoder has as many layers as the pipeline looks into."""
    import diffusers
    import transformers

    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **TEXT, "num_hidden_layers": 31},
        vision_config={"model_type": "pixtral", **vision, "head_dim": 8, "image_size": 32, "patch_size": 16},
    )
    words = tokenizer(folder)
    processor = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(), words, chat_template=words.chat_template
    )
    return diffusers.Flux2Pipeline(
        text_encoder=transformers.Mistral3ForConditionalGeneration(config),
        tokenizer=processor,
        **_flux2_parts(),
    )


def flux2_klein(folder: Path) -> Any:
    import diffusers
    import transformers

    return diffusers.Flux2KleinPipeline(
        text_encoder=transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, num_hidden_layers=31)),
        tokenizer=tokenizer(folder),
        **_flux2_parts(),
    )


def ideogram4(folder: Path) -> Any:
    import diffusers
    import transformers

    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "num_hidden_layers": 36, "rope_parameters": rope},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
    )

    def transformer() -> Any:
        return diffusers.Ideogram4Transformer2DModel(
            in_channels=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=64,
            adaln_dim=16,
            llm_features_dim=13 * TEXT["hidden_size"],
            mrope_section=(4, 2, 2),
        )

    return diffusers.Ideogram4Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLFlux2(**BLOCKS, latent_channels=2),
        text_encoder=transformers.Qwen3VLModel(config),
        tokenizer=tokenizer(folder),
        transformer=transformer(),
        unconditional_transformer=transformer(),
    )


def flux(folder: Path) -> Any:
    """The tests' own, with tokenizers of the classes that the script asks for."""
    import diffusers
    import transformers

    write_pipeline("flux", folder / "tiny")
    pipeline = diffusers.FluxPipeline.from_pretrained(folder / "tiny")
    characters = [*map(chr, range(33, 127))]
    words = [*characters, *(f"{one}</w>" for one in characters), "<|startoftext|>", "<|endoftext|>"]
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((one, -3.0) for one in characters),
    ]
    pipeline.register_modules(
        tokenizer=transformers.CLIPTokenizer(
            vocab={word: k for k, word in enumerate(words)}, merges=[], model_max_length=77
        ),
        tokenizer_2=transformers.T5TokenizerFast(vocab=pieces, extra_ids=0),
    )
    return pipeline


class Script(NamedTuple):
    pipeline: Callable[[Path], Any]
    """Makes its tiny pipeline; the folder is for files."""
    options: tuple[str, ...] = ()
    changes: Mapping[str, str] = {}
    """Lines that a script without support for FSDP needs in any case. It's compared with these changes, with and without shardwise's."""


PAIRS = ("--cond_image_column", "cond_image", "--caption_column", "text")
SCRIPTS = {
    "train_dreambooth_lora_z_image.py": Script(z_image),
    "train_dreambooth_lora_flux2.py": Script(flux2),
    "train_dreambooth_lora_flux2_img2img.py": Script(flux2, PAIRS),
    "train_dreambooth_lora_flux2_klein.py": Script(flux2_klein),
    "train_dreambooth_lora_flux2_klein_img2img.py": Script(flux2_klein, PAIRS),
    "train_dreambooth_lora_ideogram4.py": Script(ideogram4),
    "train_dreambooth_flux.py": Script(
        flux,
        changes={
            IMPORT: f"import shardwise as sw\n{IMPORT}",
            "                if accelerator.is_main_process:\n                    if global_step": (
                "                if True:\n                    if global_step"
            ),
            "args.checkpoints_total_limit is not None:": (
                "args.checkpoints_total_limit is not None and accelerator.is_main_process:"
            ),
            "    accelerator.register_save_state_pre_hook(save_model_hook)\n": "",
            "    accelerator.register_load_state_pre_hook(load_model_hook)\n": "",
            "    # Save the lora layers\n": '    sw.export_hf(transformer, args.output_dir + "/export")\n',
            "        transformer = unwrap_model(transformer)\n": (
                '        transformer = FluxTransformer2DModel.from_pretrained(args.output_dir + "/export")\n'
            ),
        },
    ),
}


def write_images(folder: Path) -> None:
    """Four pairs of images with captions, as the datasets library reads them: two ranks take two steps in an epoch."""
    import numpy as np
    from diffusers.image_processor import VaeImageProcessor

    folder.mkdir()
    pixels = np.random.default_rng(0).random((8, 32, 32, 3))
    for k, image in enumerate(VaeImageProcessor.numpy_to_pil(pixels)):
        image.save(folder / f"{k}.png")
    pairs = [
        {"file_name": f"{k}.png", "cond_image_file_name": f"{k + 4}.png", "text": f"dog {k}"}
        for k in range(4)
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def launch(program: Path, folder: Path, out: str, options: tuple[str, ...]) -> str:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.diffusion.their_scripts", "--rank", str(program)),
        *("--pretrained_model_name_or_path", str(folder / "base"), "--output_dir", str(folder / out)),
        *("--dataset_name", str(folder / "images"), "--cache_dir", str(folder / "cache")),
        *("--image_column", "image", "--instance_prompt", "a dog", "--resolution", "32"),
        *("--max_train_steps", "4", "--checkpointing_steps", "2", "--seed", "1", "--learning_rate", "1e-2"),
        *("--mixed_precision", "no", "--max_sequence_length", "32", "--train_batch_size", "1", *options),
    ]
    env = worker_env() | FSDP | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


#: torchvision is imported, and none of its operators is called: those of a release for GPUs can't be loaded here.
OPERATORS = torch.library.Library("torchvision", "DEF")
for NAME in ("nms", "qnms"):
    OPERATORS.define(f"{NAME}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def run_rank(arguments: list[str]) -> None:
    """As one of several GPUs: on CPU, Accelerate ignores FSDP."""
    sys.argv = ["accelerate_on_cpu", *arguments]
    runpy.run_module("tests.harness.accelerate_on_cpu")


#: In the output, what was trained: adapters, or the transformer.
WEIGHTS = ("pytorch_lora_weights.safetensors", "transformer/diffusion_pytorch_model.safetensors")


def are_equal(folder: Path, left: str, right: str) -> bool:
    a, b = (
        load_file(next(path for name in WEIGHTS if (path := folder / out / name).exists()))
        for out in (left, right)
    )
    assert a, "nothing was saved"
    assert all(bool(t.any()) for name, t in a.items() if name.endswith("lora_B.weight")), (
        "nothing was trained"
    )
    is_equal = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    print(
        f"  {left} and {right}: {'bit-identical' if is_equal else 'different'}, {len(a)} tensors", flush=True
    )
    return is_equal


def changed(text: str, lines: Mapping[str, str]) -> str:
    for line, ours in lines.items():
        assert text.count(line) == 1, line
        text = text.replace(line, ours)
    return text


def lines_changed(before: str, after: str) -> int:
    matched = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return sum(max(j - i, n - m) for kind, i, j, m, n in matched.get_opcodes() if kind != "equal")


def compare(program: Path) -> bool:
    """Whether the weights that ``program`` trains with shardwise are those without it, resumed ones too."""
    script, begun = SCRIPTS[program.name], time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        torch.manual_seed(0)
        pipeline = script.pipeline(folder)
        pipeline.save_pretrained(folder / "base")
        write_images(folder / "images")
        before = changed(program.read_text(), script.changes)
        loads = f"    transformer = {type(pipeline.transformer).__name__}.from_pretrained(\n"
        after = changed(before, {IMPORT: OURS, loads: "    transformer = accelerator.load_pretrained(\n"})
        print(f"{program.name}: {lines_changed(program.read_text(), after)} lines changed", flush=True)
        for out, text in (("unchanged", before), ("changed", after)):
            (run := folder / f"{out}.py").write_text(text)
            launch(run, folder, out, script.options)
            shutil.copytree(folder / out / "checkpoint-2", folder / f"{out}-resumed" / "checkpoint-2")
            resumed = (*script.options, "--resume_from_checkpoint", "latest")
            printed = launch(run, folder, f"{out}-resumed", resumed)
            assert "Resuming from checkpoint checkpoint-2" in printed, printed
        same = are_equal(folder, "unchanged", "changed")
        are_equal(folder, "unchanged", "unchanged-resumed")
        same &= are_equal(folder, "changed", "changed-resumed")
        print(f"  {time.monotonic() - begun:.0f} seconds", flush=True)
        return same


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        run_rank(sys.argv[2:])
    else:
        results = [compare(Path(program)) for program in sys.argv[1:]]
        sys.exit(not all(results))
