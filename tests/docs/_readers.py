"""What the readers of pages have made before a block: models, trainers, engines, folders and buckets. Real ones, on one CPU rank."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import shardwise as sw
from tests.diffusion.models import ZOO, write_pipeline
from tests.diffusion.test_original import original
from tests.docs.blocks import Block
from tests.harness.object_store import S3Server, s3_server

#: Blocks that begin with what an accelerator, or a trainer, has.
ACCELERATED = ("accelerator", "Accelerator(")
TRAINED = ("trainer.", "Trainer(")

#: What a page leaves out, or what takes other hosts, files or days.
INSTEAD = {
    '"/local/runs/a"': '"local/runs/a"',
    '"/scratch/run"': '"scratch/run"',
    '"/data/model"': '"path/to/base"',
    '"PATH"': '"path/to/base"',
    "(4, 2)": "(1, 1)",
    '{"actor": …, "critic": …}': "{name: torch.optim.AdamW(m.parameters()) for name, m in (('actor', actor), ('critic', critic))}",
    "% 1000 ": "% 20 ",
    "...  # train;": "_ = [p.data.mul_(1.3) for p in model.parameters()]  # train;",
}


def write_quantized() -> None:
    """The directories of the page of sources, by transformers and bitsandbytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.quantized._made import bitsandbytes_directory, fp8_directory

    shutil.copytree("base", "llama-fp32")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # several blocks each
    config = AutoConfig.from_pretrained("base", **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("plain")
    for name in ("deepseek-v3-fp8", "qwen3-fp8"):
        fp8_directory(Path("plain"), Path(name))
    bitsandbytes_directory(Path("plain"), Path("nf4"), load_in_4bit=True)


def write_adapter(config: Any) -> None:
    import peft
    from transformers import Qwen3ForCausalLM

    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(Qwen3ForCausalLM(config), lora).save_pretrained("path/to/adapter")


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)


class Transformer(nn.Module):
    """Of the page of tensor parallelism."""

    def __init__(self, config: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(2))


class Engine:
    """Takes weights as vLLM does: hub names and full tensors, into a model of its own."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained("base")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        given = {name: tensor.clone() for name, tensor in weights}
        assert given.keys() == own.keys()
        assert {tensor.dtype for tensor in given.values()} == {torch.bfloat16}
        self.model.load_state_dict(given)


def critic() -> type[nn.Module]:
    from transformers import Qwen3Model, Qwen3PreTrainedModel

    class MyCritic(Qwen3PreTrainedModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Qwen3Model(config)
            self.value_head = nn.Linear(config.hidden_size, 1)
            self.post_init()

    return MyCritic


def policy(config: Any) -> type[nn.Module]:
    """A policy with a backbone of transformers and a head of its own."""
    from transformers import Qwen3ForCausalLM

    class Policy(nn.Module):
        def __init__(self, actions: int) -> None:
            super().__init__()
            self.backbone = Qwen3ForCausalLM(config)
            self.action = nn.Linear(config.hidden_size, actions)

    return Policy


def of_page(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Names that one page alone takes for granted."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained("base")
    if page.endswith("rl-engines.md"):
        return {"engine": Engine()}
    if page.endswith("/rl.md"):
        found = {"MyCritic": critic(), "ModelClass": Qwen3ForCausalLM, "config": config, "engine": Engine()}
        return found | {
            "engine_model": AutoModelForCausalLM.from_config(config),
            "layer": "model.layers.0.self_attn",
        }
    if page.endswith("/peft.md"):
        write_adapter(config)
        return {"MyModel": Qwen3ForCausalLM, "cfg": config}
    if page.endswith("/diffusers.md"):
        for kind in ("flux", "wan"):
            write_pipeline(kind, Path(kind))
        ZOO["wan"].cls(**ZOO["wan"].config).save_config("Wan2.1-T2V-14B/transformer")
        save_file(original("wan"), "wan2.1_t2v_14B_bf16.safetensors")
    if page.endswith("/does-it-fit.md"):
        write_pipeline("flux", Path("flux"))
    if page.endswith("/other-models.md"):
        whole = policy(config)(8)
        whole.backbone.save_pretrained("path/to/backbone")
        torch.save(whole.action.state_dict(), "head.pth")
        return {"Policy": policy(config), "config": 8}
    if page.endswith("/sources.md"):
        write_quantized()
        return {"AutoModelForCausalLM": AutoModelForCausalLM, "SOURCE": "nf4", "OUT": "plain-again"}
    if page.endswith("/tensor-parallel.md"):
        sw.export_hf(Transformer(8), "path/to/hub/model")
        return {"Transformer": Transformer, "own_name": lambda name: name}
    if page.endswith("/pipeline-parallel.md"):
        sw.export_hf(Transformer(8), "path/to/hub/model")
        several = [nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})]
        moe, packed = nn.Module(), nn.Module()
        moe.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        packed.layer = nn.Module()
        packed.layer.experts = nn.ParameterDict({"w1": torch.ones(4, 2, 2)})
        sizes = {"rank": 0, "num_experts": 4, "hidden": 2}
        return {
            "build_stage": lambda: Transformer(8),
            "stages": several,
            "moe": moe,
            "packed": packed,
            **sizes,
        }
    if page.endswith("/memory-tier.md"):
        sw.save(names["state"], "runs/a/step-00001000", step=1000)
        return {"start": 1, "steps": 21, "train": lambda state: None}
    if page.endswith("/azure.md"):
        key = base64.b64encode(b"a key").decode()
        return {"key": key, "well_known_key": key}
    if page.endswith("/report.md"):
        return {"batch": torch.arange(4)[None]}
    return {}


@contextlib.contextmanager
def accelerated(block: Block, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An accelerator with FSDP2, and what was prepared with it unless the block prepares it."""
    from accelerate.utils import ProjectConfiguration

    from shardwise.integrations import accelerate as swa
    from tests.integrations._accelerate_fns import launched

    with launched():
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
        if "Linear" not in os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "") and "MyModel" in block.text:
            os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "Linear"
        accelerator = swa.ShardwiseAccelerator()
        model = accelerator.load_pretrained("base")
        optimizer = torch.optim.AdamW(model.parameters())
        loader: Any = DataLoader(names["dataset"], batch_size=2)
        if "prepare(" not in block.text:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found = {"swa": swa, "accelerator": accelerator, "Accelerator": swa.ShardwiseAccelerator}
        found |= {"ShardwiseAccelerator": swa.ShardwiseAccelerator}
        found |= {"ProjectConfiguration": ProjectConfiguration, "model": model, "optimizer": optimizer}
        found |= {"loader": loader, "folder": "runs/folder", "source": "path/to/weights"}
        found |= {"step": 1000, "steps": 3, "consumed": 2, "epoch": 0}
        found |= {"failures": sw.FailurePolicy(fallback="local/runs/a")}
        if "MyModel(" in block.text and "1-device" in block.page:
            found["path"] = "path/to/weights"
        yield found


@contextlib.contextmanager
def trained(block: Block, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments of a trainer, and a model that it takes."""
    import trl

    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained
    from tests.integrations import _trl_fns
    from tests.integrations._trainer_parts import Rows, arguments, dataset, tokenizer

    kind = {"SFTTrainer": trl.SFTConfig, "DPOTrainer": trl.DPOConfig}
    config = next((kind[word] for word in kind if word in block.text), None)
    with (
        _trl_fns.known_warnings(),
        arguments("out", config, max_steps=2, save_steps=1, gradient_accumulation_steps=1) as args,
    ):
        tokenizer().save_pretrained("base")
        model = load_pretrained(args, "base")
        rows = dataset() if config is trl.SFTConfig else Rows()
        found = {"args": args, "dataset": rows, "model": model, "ShardwiseTrainer": ShardwiseTrainer}
        found |= {"load_pretrained": load_pretrained, "MyTrainer": ShardwiseTrainer}
        found |= {"SFTTrainer": trl.SFTTrainer, "DPOTrainer": trl.DPOTrainer, "pairs": _trl_fns.rows("dpo")}
        found |= {"failures": sw.FailurePolicy(fallback="local/runs/a")}
        found["trainer"] = ShardwiseTrainer(model, args, train_dataset=Rows())
        found["log_metrics"] = lambda progress: None
        yield found


class Store:
    """A server of S3 with the pages' buckets, which this process finds by its environment."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        for bucket in ("models", "runs"):
            server.call("PUT", f"/{bucket}")

    def fill(self) -> None:
        """A copy of ``base``, under the names that pages have for it."""
        for file in Path("base").iterdir():
            for name in ("qwen3-8b", "small"):
                self.server.call("PUT", f"/models/{name}/{file.name}", file.read_bytes())

    def reset(self) -> None:
        """Empty the runs' bucket, and use this server again whatever a block has configured."""
        sw.configure_storage("s3://models", endpoint=os.environ["AWS_ENDPOINT_URL"], skip_signature=False)
        listed = self.server.call("GET", "/runs?list-type=2").decode()
        keys = re.findall("<Key>([^<]*)</Key>", listed)
        if keys:
            objects = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
            self.server.call("POST", "/runs?delete", f"<Delete>{objects}</Delete>".encode())


@contextlib.contextmanager
def store() -> Iterator[Store]:
    """A store for the whole process: shardwise keeps its connections."""
    before = dict(os.environ)
    with s3_server(Path()) as server:
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_ALLOW_HTTP": "true"}
        os.environ |= {"AWS_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "SECRET"}
        try:
            yield Store(server)
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def surroundings(block: Block, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the block's reader has by then."""
    if not dist.is_initialized():  # accelerator.end_training ends it
        dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        found = names | {"step": 1000, "sys": sys}
        before = Path.cwd()
        folder = before / str(block.line)
        folder.mkdir()
        for name in ("base", "path"):
            (folder / name).symlink_to(before / name)
        stack.enter_context(contextlib.chdir(folder))
        if any(word in block.text for word in TRAINED):
            found |= stack.enter_context(trained(block, found))
        if any(word in block.text for word in ACCELERATED):
            model = found["model"]
            found |= stack.enter_context(accelerated(block, found))
            if "trainer = " in block.text:
                found["model"] = model
        yield found


def text_of(block: Block) -> str:
    """The block's text, with what its page leaves out."""
    text = block.text
    for before, after in INSTEAD.items():
        text = text.replace(before, after)
    if "prepare(" in text and "AdamW" not in text:
        text = re.sub(
            r"^(?=model, optimizer, loader = )",
            "optimizer = torch.optim.AdamW(model.parameters())\n",
            text,
            flags=re.MULTILINE,
        )
    if "prepare(" not in text:
        text = re.sub(
            r"^(accelerator = Accelerator\((?:project_config|failures).*)$",
            r"\1\nmodel, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            text,
            flags=re.MULTILINE,
        )
    return text
