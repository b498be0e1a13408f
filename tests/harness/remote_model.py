"""Model directories that bring their classes along as Python files, with the habits of such code.

``quirky``: parameters whose class takes no keyword arguments, ``__init__(self, config)`` and nothing else,
submodules that are built twice, whole modules that are one object, buffers that only ``__init__`` computes,
numbers taken out of tensors while it is built, ``_init_weights`` that writes into ``.data``. ``own_moe``: a class
of its own around a library model, whose experts the hub stores one by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.harness.models import fill_with_noise, state_of, write_state

__all__ = ["CODE", "build_class", "write_code", "write_remote", "write_text_model"]

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_QUIRKY_CONFIG = """
from transformers import PreTrainedConfig


class QuirkyConfig(PreTrainedConfig):
    model_type = "quirky"

    def __init__(self, vocab_size=101, hidden_size=14, depth=3, drop=0.1, **kwargs):
        self.vocab_size, self.hidden_size, self.depth, self.drop = vocab_size, hidden_size, depth, drop
        super().__init__(**kwargs)
"""

_QUIRKY_LAYERS = """
import torch
from torch import nn


class Scale(nn.Parameter):
    def __new__(cls, data):
        return super().__new__(cls, data, requires_grad=True)


class Block(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.scale = Scale(torch.ones(width))
        self.drop = drop

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x)))) * (1 - self.drop)
"""

_QUIRKY_MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_quirky import QuirkyConfig
from .layers_quirky import Block


class QuirkyPreTrained(PreTrainedModel):
    config_class = QuirkyConfig
    base_model_prefix = "core"

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.3)
            module.bias.data.fill_(0.25)
        elif isinstance(module, nn.Embedding):
            module.weight.data.uniform_(-1, 1)
        elif isinstance(module, QuirkyModel):
            module.waves.copy_(module.compute_waves())


class QuirkyModel(QuirkyPreTrained):
    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        drops = [x.item() for x in torch.linspace(0, config.drop, config.depth)]
        self.blocks = nn.ModuleList(Block(width, drop) for drop in drops)
        self.blocks = nn.ModuleList(Block(width, drop) for drop in drops)
        self.blocks.append(self.blocks[0])
        self.register_buffer("waves", self.compute_waves(), persistent=False)
        self.register_buffer("steps", torch.arange(width) / width, persistent=False)
        self.register_buffer("seen", torch.zeros(3))
        self.post_init()

    def compute_waves(self):
        return torch.cos(torch.arange(16)[:, None] * torch.arange(self.config.hidden_size))

    def forward(self, input_ids):
        x = self.embed(input_ids) + self.waves[: input_ids.shape[1]] + self.steps + self.seen.sum()
        for block in self.blocks:
            x = block(x)
        return x


class QuirkyForCausalLM(QuirkyPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.core = QuirkyModel(config)
        self.lm_head = self.core.embed
        self.post_init()

    def forward(self, input_ids, labels=None):
        logits = F.linear(self.core(input_ids), self.lm_head.weight)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""

_MOE_MODEL = """
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, Qwen3MoeConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel


class OwnMoeForCausalLM(PreTrainedModel):
    config_class = Qwen3MoeConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen3MoeModel(config)
        self.score = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, labels=None):
        logits = self.score(self.model(input_ids)[0])
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""

# The text part of a vision-language checkpoint, as a class of its own.
_TEXT_MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, Qwen3VLMoeConfig, Qwen3VLMoeTextModel
from transformers.modeling_outputs import CausalLMOutput


class Gain(nn.Parameter):
    def __new__(cls, data):
        return super().__new__(cls, data, requires_grad=True)


class OwnTextForCausalLM(PreTrainedModel):
    config_class = Qwen3VLMoeConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen3VLMoeTextModel(config.text_config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.gain = Gain(torch.ones(1))
        self.post_init()

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids)[0]) * self.gain
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""

_MOE_CONFIG = {
    **_IDS,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 101,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}

#: Python files by name, and config.json.
CODE: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "quirky": (
        {
            "configuration_quirky.py": _QUIRKY_CONFIG,
            "layers_quirky.py": _QUIRKY_LAYERS,
            "modeling_quirky.py": _QUIRKY_MODEL,
        },
        {
            **_IDS,
            "model_type": "quirky",
            "architectures": ["QuirkyForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_quirky.QuirkyConfig",
                "AutoModel": "modeling_quirky.QuirkyModel",
                "AutoModelForCausalLM": "modeling_quirky.QuirkyForCausalLM",
            },
        },
    ),
    # The config is the library's; only the model class is the directory's own.
    "own_moe": (
        {"modeling_own_moe.py": _MOE_MODEL},
        {
            **_MOE_CONFIG,
            "model_type": "qwen3_moe",
            "architectures": ["OwnMoeForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_own_moe.OwnMoeForCausalLM"},
        },
    ),
}


def write_text_model(directory: Path, **sizes: Any) -> None:
    """A vision-language checkpoint (``model.language_model.*``, ``model.visual.*``) with code for its text part."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "patch_size": 4}
    vision |= {"out_hidden_size": 24, "num_position_embeddings": 9}
    config = Qwen3VLMoeConfig(
        text_config={**_MOE_CONFIG, **sizes}, vision_config={**vision, "deepstack_visual_indexes": [0]}
    )
    torch.manual_seed(4)
    model = Qwen3VLMoeForConditionalGeneration(config)
    fill_with_noise(model)
    model.save_pretrained(directory)
    write_state({**load_file(directory / "model.safetensors"), "gain": torch.full((1,), 1.5)}, directory)
    document = json.loads((directory / "config.json").read_text())
    document |= {
        "architectures": ["OwnTextForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "text.OwnTextForCausalLM"},
    }
    (directory / "config.json").write_text(json.dumps(document))
    (directory / "text.py").write_text(_TEXT_MODEL)


def write_code(kind: str, directory: Path, prologue: str = "") -> None:
    """config.json and Python files; ``prologue`` is run first when one of the files is imported."""
    files, config = CODE[kind]
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(prologue + text)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))


def build_class(directory: Path | str) -> Any:
    """A model as ordinary construction makes it, without the stored weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def write_remote(kind: str, directory: Path) -> None:
    """The code, and weights of noise under the hub's names, ties once."""
    write_code(kind, directory)
    torch.manual_seed(3)
    model = build_class(directory)
    fill_with_noise(model)
    if kind == "quirky":  # save_pretrained refuses whole modules that are shared
        write_state(state_of(model), directory)
    else:
        model.save_pretrained(directory)
