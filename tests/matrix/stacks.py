"""What other projects require of the packages that shardwise requires, too, and releases to choose from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NEEDS", "RELEASES", "STACKS", "Stack"]


@dataclass(frozen=True)
class Stack:
    """One project or image.

    ``requires``: its requirements as the file ``source`` has them on ``date``, those that concern packages around shardwise.
    ``python``: a release of Python that it runs with.
    """

    name: str
    date: str
    source: str
    python: str
    requires: tuple[str, ...]


#: In the order of docs/compatibility.md. Each line is a fact that its project has published.
STACKS = (
    Stack(
        "verl",
        "2026-08-22",
        "verl-project/verl pyproject.toml, extra vllm",
        "3.12",
        (
            "torch==2.11.0",
            "transformers==5.5.3",
            "numpy>=2.0.0",
            "packaging>=20.0",
            "accelerate",
            "peft",
            "datasets",
        ),
    ),
    Stack(
        "AReaL",
        "2026-08-22",
        "areal-project/AReaL pyproject.toml",
        "3.12",
        (
            *(
                "torch>=2.9.1,<2.11",
                "transformers>=5.0.0,<=5.3.0",
                "peft<=0.18.1",
                "datasets>=3.0.0",
                "huggingface_hub",
            ),
            *("rich", "packaging", "click>=8.1", "torchao==0.15.0", "litellm[proxy]>=1.81.3"),
        ),
    ),
    Stack(
        "SkyRL",
        "2026-08-21",
        "NovaSky-AI/SkyRL pyproject.toml, extra fsdp",
        "3.12",
        (
            *(
                "torch==2.11.0",
                "transformers>=5.6.1,<=5.8.0",
                "peft==0.18.1",
                "datasets>=4.0.0",
                "accelerate",
            ),
            *("tokenizers>=0.21.2", "safetensors>=0.6.2", "rich>=14.1.0", "typer>=0.17.4", "xxhash>=3.0.0"),
        ),
    ),
    Stack(
        "axolotl",
        "2026-07-24",
        "axolotl-ai-cloud/axolotl pyproject.toml",
        "3.12",
        (
            *(
                "torch>=2.11.0,<=2.12.1",
                "transformers==5.14.1",
                "huggingface_hub==1.17.0",
                "tokenizers==0.22.2",
            ),
            *("accelerate==1.13.0", "peft==0.19.1", "trl==1.8.0", "datasets==4.8.4", "numpy>=2.1,<3.0"),
            *("packaging==26.0", "typer==0.25.1", "typing-extensions==4.15.0", "pydantic==2.12.5"),
        ),
    ),
    Stack(
        "LLaMA-Factory",
        "2026-08-18",
        "hiyouga/LLaMA-Factory pyproject.toml",
        "3.12",
        (
            *("torch>=2.4.0", "transformers>=4.55.0,<=5.8.0,!=4.57.0,!=5.6.0", "datasets>=2.16.0,<=4.0.0"),
            *("accelerate>=1.3.0,<=1.11.0", "peft>=0.18.0,<=0.18.1", "trl>=0.18.0,<=0.24.0", "safetensors"),
            *("numpy", "packaging", "gradio>=4.38.0,<=5.50.0"),
        ),
    ),
    Stack(
        "ms-swift",
        "2026-08-22",
        "modelscope/ms-swift requirements/framework.txt",
        "3.12",
        (
            *("transformers>=4.33,<5.17.0", "peft>=0.11,<0.21", "trl>=0.15,<1.0", "datasets>=3.0,<4.8.5"),
            *("accelerate", "safetensors", "numpy", "gradio>=3.40.0,<6.0"),
        ),
    ),
    Stack(
        "NeMo Automodel",
        "2026-08-22",
        "NVIDIA-NeMo/Automodel pyproject.toml",
        "3.12",
        ("torch>=2.6.0", "transformers==5.12.1", "datasets>=4.0.0", "peft>=0.18.1", "torchao"),
    ),
    Stack(
        "NeMo-RL",
        "2026-08-22",
        "NVIDIA-NeMo/RL pyproject.toml",
        "3.13",
        (
            "torch==2.11.0",
            "transformers>=5.5.0,<5.9.0",
            "datasets>=4.0.0",
            "accelerate>=0.26",
            "numpy",
            "rich",
        ),
    ),
    Stack(
        "Megatron-Bridge",
        "2026-08-22",
        "NVIDIA-NeMo/Megatron-Bridge pyproject.toml",
        "3.12",
        (
            *("torch>=2.6.0", "transformers>=5.8,<=5.12.1", "peft>=0.18.1", "datasets>=2.20.0", "accelerate"),
            *("tokenizers>=0.22.0,<0.23", "diffusers>=0.36.0", "rich"),
        ),
    ),
    Stack(
        "unsloth",
        "2026-08-22",
        "unslothai/unsloth pyproject.toml, extra huggingfacenotorch",
        "3.12",
        (
            "transformers>=4.51.3,!=4.52.0,!=4.52.1,!=4.52.2,!=4.52.3,!=4.53.0,!=4.54.0,!=4.55.0,!=4.55.1,!=4.57.0,!=4.57.4,"
            "!=4.57.5,!=5.0.0,!=5.1.0,<=5.5.0",
            *(
                "trl>=0.18.2,!=0.19.0,<=0.24.0",
                "datasets>=3.4.1,!=4.0.*,!=4.1.0,<4.4.0",
                "accelerate>=0.34.1",
            ),
            *("peft>=0.18.0,!=0.11.0", "huggingface_hub>=0.34.0", "diffusers>=0.39.0", "numpy", "packaging"),
            *("typer>=0.12.0", "rich", "click>=8.0", "unsloth_zoo>=2026.8.13"),
        ),
    ),
    Stack(
        "prime-rl",
        "2026-08-21",
        "PrimeIntellect-ai/prime-rl pyproject.toml",
        "3.12",
        (
            "torch>=2.9.0",
            "transformers==5.6.2",
            "datasets>=4.0.0",
            "numpy>=2.2.6",
            "rich>=14.0.0",
            "torchao>=0.17.0",
        ),
    ),
    Stack(
        "OpenRLHF",
        "2026-08-13",
        "OpenRLHF/OpenRLHF requirements.txt; torch as vllm==0.27.1 of its setup.py requires",
        "3.12",
        (
            "torch==2.13.0",
            "transformers==5.15.0",
            "huggingface_hub>=1.0.0",
            "accelerate",
            "peft",
            "datasets",
            "packaging",
        ),
    ),
    Stack(
        "miles",
        "2026-08-21",
        "radixark/miles requirements.txt, and setup.py's extra fsdp",
        "3.12",
        (
            "torch>=2.0",
            "transformers==5.12.1",
            "safetensors>=0.8.0",
            "xxhash==3.7.1",
            "accelerate",
            "datasets",
        ),
    ),
    Stack(
        "LeRobot",
        "2026-08-23",
        "huggingface/lerobot pyproject.toml, extras training, transformers-dep and peft-dep",
        "3.12",
        (
            *("torch>=2.7,<2.12.0", "transformers>=5.4.0,<5.6.0", "huggingface-hub>=1.6.0,<2.0.0"),
            *("safetensors>=0.4.3,<1.0.0", "numpy>=2.0.0,<2.3.0", "packaging>=24.2,<26.0"),
            *(
                "accelerate>=1.14.0,<2.0.0",
                "peft>=0.18.0,<1.0.0",
                "datasets>=4.8.0,<5.0.0",
                "setuptools>=71.0.0,<82.0.0",
            ),
        ),
    ),
    Stack(
        "Hugging Face's SageMaker training image",
        "2026-08-21",
        "aws/deep-learning-containers docs/src/data/huggingface-pytorch-training/2.9-gpu-sagemaker.yml",
        "3.12",
        ("torch==2.9.0", "transformers==5.3.0"),
    ),
    Stack(
        "TRL",
        "2026-07-24",
        "huggingface/trl pyproject.toml",
        "3.12",
        ("accelerate>=1.4.0", "datasets>=4.7.0", "packaging>20.0", "transformers>=4.56.2"),
    ),
    Stack(
        "diffusers",
        "2026-08-23",
        "huggingface/diffusers setup.py, extra training among others",
        "3.12",
        (
            *("torch>=2.6", "transformers>=4.41.2", "huggingface-hub>=1.23.0,<2.0", "safetensors>=0.8.0"),
            *("accelerate>=0.31.0", "peft>=0.17.0", "datasets", "numpy"),
        ),
    ),
    Stack(
        "Accelerate",
        "2026-07-24",
        "huggingface/accelerate setup.py",
        "3.12",
        ("torch>=2.0.0", "huggingface_hub>=0.21.0", "safetensors>=0.4.3", "numpy>=1.17", "packaging>=20.0"),
    ),
    Stack(
        "torchtitan",
        "2026-08-21",
        "pytorch/torchtitan pyproject.toml",
        "3.12",
        ("datasets>=3.6.0,<4.8.0", "tokenizers>=0.15.0", "safetensors", "torch_checkpointing>=0.1.0"),
    ),
)

#: Releases of packages that require none of the others, on 2026-11-27; the newest first.
RELEASES = {
    "torch": "2.15.0 2.14.1 2.13.0 2.12.1 2.12.0 2.11.0 2.10.0 2.9.1 2.9.0",
    "numpy": "2.4.6 2.3.5 2.2.6 2.1.3 2.0.2 1.26.4 1.26.0",
    "safetensors": "0.8.0 0.7.0 0.6.2 0.5.3 0.4.3",
    "packaging": "26.4 26.3 26.0 25.0 24.2 20.9",
    "click": "8.5.1 8.4.2 8.4.0 8.3.3 8.2.1 8.1.8 8.1.0",
    "rich": "15.0.0 14.3.4 14.1.0 13.9.4 13.8.0 13.0.0",
    "xxhash": "4.1.0 3.8.2 3.7.1 3.6.0 3.4.1 3.2.0",
}
#: The others: release → what it requires of packages of these two tables, as its metadata on PyPI say.
NEEDS = {
    "transformers": {
        "5.24.0": "huggingface_hub<3.0,>=1.31.0 numpy>=1.17 packaging>=20.0 safetensors>=0.8.0 tokenizers<0.24.0,>=0.23.1",
        "5.20.2": "huggingface_hub<3.0,>=1.31.0 numpy>=1.17 packaging>=20.0 safetensors>=0.8.0 tokenizers<0.24.0,>=0.23.1",
        "5.16.1": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.8.0 tokenizers<0.24.0,>=0.23.1",
        "5.15.0": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.8.0 tokenizers<=0.23.0,>=0.22.0",
        "5.14.1": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.8.0 tokenizers<=0.23.0,>=0.22.0",
        "5.12.1": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
        "5.8.1": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
        "5.8.0": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
        "5.6.2": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
        "5.5.4": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
        "5.5.3": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
        "5.5.0": "huggingface_hub<2.0,>=1.5.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
        "5.3.0": "huggingface_hub<2.0,>=1.3.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
        "5.0.0": "huggingface_hub<2.0,>=1.3.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 tokenizers<=0.23.0,>=0.22.0",
    },
    "huggingface_hub": {
        "2.4.0": "click<9.0.0,>=8.4.2 packaging>=20.9",
        "1.33.0": "click<9.0.0,>=8.4.2 packaging>=20.9",
        "1.23.0": "click<9.0.0,>=8.4.2 packaging>=20.9",
        "1.17.0": "click>=8.4.0 packaging>=20.9 typer<0.26.0,>=0.20.0",
        "1.5.0": "packaging>=20.9",
        "1.3.0": "packaging>=20.9",
    },
    "tokenizers": {
        "0.23.3": "huggingface_hub<3.0,>=0.16.4",
        "0.23.1": "huggingface_hub<2.0,>=0.16.4",
        "0.22.2": "huggingface_hub<2.0,>=0.16.4",
    },
    "accelerate": {
        "1.15.0": "huggingface_hub>=0.21.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 torch>=2.0.0",
        "1.14.0": "huggingface_hub>=0.21.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 torch>=2.0.0",
        "1.13.0": "huggingface_hub>=0.21.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 torch>=2.0.0",
        "1.12.0": "huggingface_hub>=0.21.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 torch>=2.0.0",
        "1.11.0": "huggingface_hub>=0.21.0 numpy>=1.17 packaging>=20.0 safetensors>=0.4.3 torch>=2.0.0",
    },
    "peft": {
        "0.21.2": "accelerate>=0.21.0 huggingface_hub>=0.25.0 numpy>=1.17 packaging>=20.0 torch>=1.13.0",
        "0.20.0": "accelerate>=0.21.0 huggingface_hub>=0.25.0 numpy>=1.17 packaging>=20.0 torch>=1.13.0",
        "0.19.1": "accelerate>=0.21.0 huggingface_hub>=0.25.0 numpy>=1.17 packaging>=20.0 torch>=1.13.0",
        "0.18.1": "accelerate>=0.21.0 huggingface_hub>=0.25.0 numpy>=1.17 packaging>=20.0 torch>=1.13.0",
    },
    "trl": {
        "1.16.0": "accelerate>=1.10.1 datasets>=4.7.0 huggingface_hub>=0.34.0 numpy>=1.26.0 packaging>20.0 transformers>=4.56.2",
        "1.8.0": "accelerate>=1.4.0 datasets>=4.7.0 packaging>20.0 transformers>=4.56.2",
        "1.0.0": "accelerate>=1.4.0 datasets>=4.7.0 packaging>20.0 transformers>=4.56.2",
        "0.29.1": "accelerate>=1.4.0 datasets>=3.0.0 packaging>20.0 transformers>=4.56.2",
        "0.24.0": "accelerate>=1.4.0 datasets>=3.0.0 transformers>=4.56.1",
    },
    "datasets": {
        "5.2.0": "huggingface_hub<3.0,>=1.31.0 numpy>=1.17",
        "5.0.0": "huggingface_hub<2.0,>=0.25.0 numpy>=1.17",
        "4.8.4": "huggingface_hub<2.0,>=0.25.0 numpy>=1.17",
        "4.7.0": "huggingface_hub<2.0,>=0.25.0 numpy>=1.17",
        "4.3.0": "huggingface_hub<2.0,>=0.25.0 numpy>=1.17",
        "4.0.0": "huggingface_hub>=0.24.0 numpy>=1.17",
    },
    "diffusers": {
        "0.42.1": "huggingface_hub<3.0,>=1.32.0 safetensors>=0.8.0",
        "0.39.0": "huggingface_hub<2.0,>=0.34.0 safetensors>=0.8.0",
    },
    "typer": {
        "0.29.2": "rich>=13.8.0",
        "0.25.1": "click>=8.2.1 rich>=13.8.0",
    },
}
