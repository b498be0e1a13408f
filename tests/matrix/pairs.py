"""The versions of other packages that the matrix runs with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PAIRS", "Pair"]


@dataclass(frozen=True)
class Pair:
    """One environment: the project's own, with other versions of some packages.

    ``pins``: package → version; None: the newest there is. ``why``: whose environment it is.
    """

    name: str
    why: str
    pins: dict[str, str | None]

    @property
    def torch(self) -> str | None:
        return self.pins.get("torch")

    @property
    def transformers(self) -> str | None:
        return self.pins.get("transformers")


#: From the oldest to the newest. Each release of torch and of transformers admits certain versions of the packages around it;
#: those are pinned, too.
PAIRS = (
    Pair(
        "2.9-5.0",
        "founding cases: torch 2.9.1, transformers 5.0, Accelerate 1.12; all other packages at their lowest, too",
        {
            "torch": "2.9.1",
            "transformers": "5.0.0",
            "huggingface_hub": "1.3.0",
            "httpx": "0.28.1",
            "httpcore": "1.0.9",
            "tokenizers": "0.22.2",
            "accelerate": "1.12.0",
            "peft": "0.18.1",
            "diffusers": "0.37.0",
            "trl": "0.29.0",
            "datasets": "4.7.0",
            "torchao": "0.15.0",
            "safetensors": "0.4.3",
            "numpy": "1.26.0",
            "xxhash": "3.2.0",
            "click": "8.1.0",
            "rich": "13.0.0",
            "commonmark": "0.9.1",
            "pandas": "2.2.3",
            "pyarrow": "19.0.1",
            "scipy": "1.14.1",
            "pytz": "2025.2",
            "tzdata": "2025.2",
        },
    ),
    Pair(
        "2.9-5.3",
        "the training image of Hugging Face and SageMaker",
        {
            "torch": "2.9.1",
            "transformers": "5.3.0",
            "huggingface_hub": "1.3.0",
            "httpx": "0.28.1",
            "httpcore": "1.0.9",
            "tokenizers": "0.22.2",
            "accelerate": "1.12.0",
            "peft": "0.18.1",
            "diffusers": "0.37.1",
            "trl": "0.29.0",
            "datasets": "4.7.0",
            "torchao": "0.16.0",
        },
    ),
    Pair(
        "2.10-5.3",
        "founding cases: torch 2.10, transformers 5.3, Accelerate 1.13",
        {
            "torch": "2.10.0",
            "transformers": "5.3.0",
            "huggingface_hub": "1.5.0",
            "httpx": "0.28.1",
            "httpcore": "1.0.9",
            "tokenizers": "0.22.2",
            "accelerate": "1.13.0",
            "peft": "0.18.1",
            "diffusers": "0.37.1",
            "trl": "1.0.0",
            "datasets": "4.7.0",
            "torchao": "0.16.0",
        },
    ),
    Pair(
        "2.11-5.8",
        "NeMo-RL, LLaMA-Factory",
        {
            "torch": "2.11.0",
            "transformers": "5.8.1",
            "huggingface_hub": "1.17.0",
            "httpx": "0.28.1",
            "httpcore": "1.0.9",
            "tokenizers": "0.22.2",
            "accelerate": "1.13.0",
            "peft": "0.19.1",
            "diffusers": "0.39.0",
            "trl": "1.0.0",
            "datasets": "4.7.0",
            "torchao": "0.17.0",
        },
    ),
    Pair(
        "2.12-5.12",
        "NeMo Automodel, Megatron-Bridge, miles",
        {
            "torch": "2.12.0",
            "transformers": "5.12.1",
            "huggingface_hub": "1.17.0",
            "httpx": "0.28.1",
            "httpcore": "1.0.9",
            "tokenizers": "0.22.2",
            "accelerate": "1.14.0",
            "peft": "0.19.1",
            "diffusers": "0.39.0",
            "trl": "1.8.0",
            "datasets": "4.7.0",
            "torchao": "0.17.0",
        },
    ),
    Pair("2.13-5.23", "the project's own environment", {}),
    Pair(
        "others",
        "the libraries of docs/howto/other-models.md, which tests/others loads models of; torchvision has a torch of its own",
        {
            "torch": "2.14.1",
            "torchvision": "0.29.1",
            "transformers": "5.24.0",
            "timm": "1.0.31",
            "open_clip_torch": "3.3.0",
            "ftfy": "6.3.1",
            "wcwidth": "0.9.4",
            "litgpt": "0.5.13",
            "jsonargparse": "4.53.0",
            "sentence-transformers": "6.2.0",
            "scikit-learn": "1.9.1",
            "joblib": "1.6.0",
            "narwhals": None,
            "threadpoolctl": "3.8.0",
            "torchtune": "0.6.1",
            "torchao": "0.17.0",
            "sentencepiece": "0.2.3",
            "tiktoken": "0.14.0",
            "omegaconf": "2.4.0",
        },
    ),
    Pair(
        "newest",
        "the newest releases",
        dict.fromkeys(
            (
                "torch",
                "transformers",
                "huggingface_hub",
                "tokenizers",
                "accelerate",
                "peft",
                "trl",
                "torchao",
                "safetensors",
            )
        ),
    ),
)
