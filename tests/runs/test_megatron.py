"""Megatron-core's distributed checkpoints: read as boxes under hub names, on any number of ranks, and refused where files don't fit.

The layout is written by _megatron_layout.py, and by Megatron-core itself where it's installed (``make loggers``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from shardwise.catalog.megatron import read_megatron
from shardwise.catalog.open import open_catalog
from shardwise.cli import main
from shardwise.errors import FormatError, IntegrityError, PlanError, SourceError, StateError
from tests.docs.blocks import ROOT
from tests.harness.command import runner
from tests.harness.pool import RankPool
from tests.runs import _megatron_fns as fns
from tests.runs._megatron_layout import Tensors, args_of, megatron_of, write

_PADDED = 48


def hub_of(model: Any, folder: Path) -> Tensors:
    """A model's tensors as transformers publishes them."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def made(root: Path, family: str, *, padded: int = _PADDED, **said: Any) -> Any:
    """Write ``root/run`` and ``root/hub``; gives the model."""
    model, config = fns.model_of(family, 0), fns.config_of(family)
    hub = hub_of(model, root / "hub")
    tensors = megatron_of(hub, config, padded, stacked=family != "DeepseekV3")
    write(root / "run/iter_0000100", tensors, args_of(config, padded, **said))
    return model


def differences(found: Tensors, expected: Tensors) -> list[str]:
    assert found.keys() == expected.keys()
    return [n for n, t in expected.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)]


@pytest.mark.parametrize("family", fns.FAMILIES)
def test_every_family_is_read(tmp_path: Path, family: str) -> None:
    """Queries, keys and values, gate and up, experts and layers as the hub has them, and the vocabulary without padding."""
    model, other = made(tmp_path, family), fns.model_of(family, 5)
    assert differences(other.state_dict(), model.state_dict())
    sw.load(other, tmp_path / "run")
    assert differences(other.state_dict(), model.state_dict()) == []
    hub, stored = load_file(tmp_path / "hub/model.safetensors"), open_catalog(tmp_path / "run").tensors
    tokens = {n for n, t in hub.items() if len(t) == 41}
    assert {n: t.shape for n, t in stored.items()} == {
        n: (_PADDED, *t.shape[1:]) if n in tokens else t.shape for n, t in hub.items()
    }


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3Moe"])
def test_parts_of_two_ranks_are_read_by_any_number(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """The boxes of the files cut through query groups, gate and up, experts and layers; each byte is read once."""
    model = fns.model_of(family, 0)
    hub = hub_of(model, tmp_path / "hub")
    ranks.run_ranks(2, fns.save, str(tmp_path / "run/iter_0000100"), hub, family, _PADDED)
    expected = dict(model.named_parameters())
    needed = sum(t.nbytes for t in hub.values())
    for now in (1, 2, 3):
        results = ranks.run_ranks(now, fns.takes_over, str(tmp_path / "run"), family)
        for one in results:
            assert differences(one["model"], expected) == []
        assert sum(one["read"] for one in results) <= 1.02 * needed


def test_every_command_reads_it(tmp_path: Path) -> None:
    """The root with ``latest_checkpointed_iteration.txt``, or the folder of one step."""
    model, root = made(tmp_path, "Qwen3"), tmp_path / "run"
    hub = load_file(tmp_path / "hub/model.safetensors")
    assert read_megatron(str(root / "iter_0000100")).step == 100

    def run(*words: object, status: int = 0) -> str:
        done = runner().invoke(main, [*map(str, words)], prog_name="shardwise")
        assert done.exit_code == status, done.output
        return done.output

    for path in (root, root / "iter_0000100"):
        text = run("inspect", path)
        assert re.search(r"v_proj\.weight +BF16 \[32, 32\]", text)
        assert "rng_state" in text
    out = tmp_path / "step-00000100"
    text = run("convert", root, out, "--to", "checkpoint", "--config", tmp_path / "hub")
    assert "rows that pad the vocabulary" in text
    run("verify", out)
    run("diff", out, tmp_path / "hub")
    other = fns.model_of("Qwen3", 5)
    assert sw.restore(sw.TrainState(model=other), out).step == 100
    assert differences(other.state_dict(), model.state_dict()) == []
    run("export", root, tmp_path / "again", "--config", tmp_path / "hub")
    assert differences(load_file(tmp_path / "again/model.safetensors"), hub) == []
    other = fns.model_of("Qwen3", 6)
    assert sw.restore(sw.TrainState(model=other), root).step == 100
    assert differences(other.state_dict(), model.state_dict()) == []
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(StateError, match="contains no optimizer of Megatron that can be read"):
        sw.restore(sw.TrainState(model=other, optimizer=optimizer), root)


def test_a_newer_layout(tmp_path: Path) -> None:
    """Without ``common.pt``: its content is an item next to the tensors."""
    model, config = fns.model_of("Llama", 0), fns.config_of("Llama")
    tensors = megatron_of(hub_of(model, tmp_path / "hub"), config, _PADDED)
    write(tmp_path / "run/iter_0000100", tensors, args_of(config, _PADDED), is_newer=True)
    assert not (tmp_path / "run/iter_0000100/common.pt").exists()
    other = fns.model_of("Llama", 5)
    assert sw.restore(sw.TrainState(model=other), tmp_path / "run").step == 100
    assert differences(other.state_dict(), model.state_dict()) == []


def test_where_the_number_of_tokens_is_known(tmp_path: Path) -> None:
    """From args, or from Megatron Bridge's config; only what Megatron itself would have padded is left out for a model."""
    made(tmp_path / "a", "Llama", vocab_size=41)
    found = open_catalog(tmp_path / "a/run")
    assert found.tensors["lm_head.weight"].shape == (41, 32)
    assert "output_layer.weight: 7 rows that pad the vocabulary" in found.ignored_entries
    made(tmp_path / "b", "Llama")
    (tmp_path / "b/run/iter_0000100/run_config.yaml").write_text(
        "model:\n  _target_: megatron.bridge.models.llama.llama_provider.LlamaModelProvider\n  num_layers: 3\n"
        "  hidden_size: 32\n  num_attention_heads: 4\n  num_query_groups: 2\n  kv_channels: null\n  vocab_size: 41\n"
        "  bf16: true\noptimizer:\n  vocab_size: 5\n"
    )
    torch.save({"iteration": 100}, tmp_path / "b/run/iter_0000100/common.pt")
    assert open_catalog(tmp_path / "b/run").tensors["lm_head.weight"].shape == (41, 32)
    model, other = made(tmp_path / "c", "Llama", padded=64), fns.model_of("Llama", 5)
    with pytest.raises(PlanError, match="it has 64 tokens, but the model has 41"):
        sw.load(other, tmp_path / "c/run")
    made(tmp_path / "d", "Llama", padded=64, make_vocab_size_divisible_by=32, tensor_model_parallel_size=2)
    sw.load(other, tmp_path / "d/run")
    assert differences(other.state_dict(), model.state_dict()) == []


@pytest.mark.parametrize("prefix", ["optimizer.state", "chained_0.optimizer.state"])
@pytest.mark.parametrize("said", [{}, {"vocab_size": 41}])
def test_masters_and_moments(tmp_path: Path, prefix: str, said: dict[str, int]) -> None:
    """In the parameters' shapes, as ``fully_reshardable`` stores them; flat ones of ranks are listed, and left."""
    model, config = fns.model_of("Qwen3", 0), fns.config_of("Qwen3")
    hub = hub_of(model, tmp_path / "hub")
    torch.manual_seed(1)
    states = {key: {n: torch.rand(t.shape) for n, t in hub.items()} for key in ("fp32_param", *fns.MOMENTS)}
    tensors = megatron_of(hub, config, _PADDED)
    args = args_of(config, _PADDED, **said)
    flat = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg": torch.ones(9)}
    write(tmp_path / "flat/iter_0000100", tensors | flat, args)
    assert {t.dtype for t in open_catalog(tmp_path / "flat").tensors.values()} == {"BF16"}
    for key, of in states.items():
        tensors |= {f"{prefix}.{key}.{n}": t for n, t in megatron_of(of, config, _PADDED).items()}
    write(tmp_path / "run/iter_0000100", tensors, args)
    for path in (tmp_path / "run", tmp_path / "step-00000100"):
        other = fns.model_of("Qwen3", 5).float()
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
        report = sw.restore(sw.TrainState(model=other, optimizer=optimizer), path)
        assert (report.step, optimizer.param_groups[0]["lr"]) == (100, 0.5)
        assert differences(dict(other.named_parameters()), states["fp32_param"]) == []
        for key in fns.MOMENTS:
            found = {n: optimizer.state[p][key] for n, p in other.named_parameters()}
            assert differences(found, states[key]) == []
        assert {float(of["step"]) for of in optimizer.state.values()} == {7.0}
        if path.name == "run":
            sw.save(sw.TrainState(model=other, optimizer=optimizer), tmp_path / "step-00000100", step=100)


# ----------------------------------------------------------------------------------------------------
# Damage

Damage = Callable[[Path], None]


def _common(change: Callable[[dict[str, Any]], None]) -> Damage:
    def changed(folder: Path) -> None:
        content = torch.load(folder / "common.pt", weights_only=False)
        change(content)
        torch.save(content, folder / "common.pt")

    return changed


def _said(**args: Any) -> Damage:
    return _common(lambda content: vars(content["args"]).update(args))


def _cut(name: str, nbytes: int) -> Damage:
    def cut(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-nbytes])

    return cut


def _rewritten(change: Callable[[Tensors], None]) -> Damage:
    def rewritten(folder: Path) -> None:
        model, config = fns.model_of("Qwen3", 0), fns.config_of("Qwen3")
        tensors = megatron_of(dict(model.state_dict()), config, _PADDED)
        change(tensors)
        shutil.rmtree(folder)
        write(folder, tensors, args_of(config, _PADDED))

    return rewritten


def _without_a_layer(tensors: Tensors) -> None:
    """Layers are stored one by one, as where not all are alike."""
    for name in [name for name in tensors if ".layers." in name]:
        stacked = tensors.pop(name)
        tensors |= {name.replace("layers.", f"layers.{k}."): stacked[k] for k in (0, 2)}


def _backend(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


_QKV = "decoder.layers.self_attention.linear_qkv.weight"
_FC1 = "decoder.layers.mlp.linear_fc1.weight"
DAMAGES: dict[str, tuple[Damage, type[Exception], str]] = {
    "no payload": (
        lambda f: (f / "__0_0.distcp").unlink(),
        IntegrityError,
        r"__0_0\.distcp: lost: no such file",
    ),
    "payload cut short": (_cut("__0_0.distcp", 500), IntegrityError, "but a chunk ends at .*: truncated"),
    "no metadata": (
        lambda f: (f / ".metadata").unlink(),
        SourceError,
        r"has no metadata\.json|no \.metadata",
    ),
    "metadata cut short": (_cut(".metadata", 100), FormatError, "damaged|ends"),
    "no common": (
        lambda f: (f / "common.pt").unlink(),
        IntegrityError,
        "lost: no such file, and no item common_state",
    ),
    "common cut short": (_cut("common.pt", 50), FormatError, "common.pt"),
    "no args": (_common(lambda c: c.update(args=None)), SourceError, "holds no args of Megatron-LM"),
    "other backend": (_backend, SourceError, "Megatron's backend 'zarr', and only torch_dist"),
    "other heads": (
        _said(num_attention_heads=8),
        FormatError,
        "has 128 rows, and the run 8 heads in 2 groups, of 16",
    ),
    "uneven groups": (_said(num_query_groups=3), FormatError, "and the run 4 heads in 3 groups"),
    "no heads": (_said(num_attention_heads=0), FormatError, "says 0 heads and 3 layers"),
    "heads in words": (_said(num_attention_heads="four"), FormatError, "its num_attention_heads is 'four'"),
    "more layers": (_said(num_layers=4), FormatError, "has 3 layers, and the run 4"),
    "more tokens": (_said(vocab_size=50), FormatError, "has 48 tokens, and the run 50"),
    "norms less one": (_said(apply_layernorm_1p=True), SourceError, "norms are stored less one"),
    "unknown tensor": (
        _rewritten(lambda t: t.update({"decoder.layers.self_attention.gate.weight": torch.ones(3, 4)})),
        SourceError,
        "holds 'decoder.layers.self_attention.gate.weight', and no hub name is known",
    ),
    "norms twice": (
        _rewritten(lambda t: t.update({"decoder.layers.input_layernorm.weight": torch.ones(3, 32)})),
        FormatError,
        r"has two tensors for model\.layers\.0\.input_layernorm\.weight",
    ),
    "odd rows": (
        _rewritten(lambda t: t.update({_FC1: t[_FC1][:, :-1].contiguous()})),
        FormatError,
        "has 95 rows, expected a gate and as much of up",
    ),
    "no gate": (
        _rewritten(lambda t: t.update({_FC1: t[_FC1][:, :48].contiguous()})),
        PlanError,
        r"gate_proj\.weight.* expects shape \[48, 32\], but .* has \[24, 32\]",
    ),
    "no queries": (_rewritten(lambda t: t.__delitem__(_QKV)), PlanError, "q_proj"),
    "a layer is missing": (
        _rewritten(_without_a_layer),
        IntegrityError,
        r"holds nothing of layer\(s\) \[1\] of 3",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named_before_anything_is_loaded(tmp_path: Path, what: str) -> None:
    made(tmp_path, "Qwen3")
    damage, kind, text = DAMAGES[what]
    damage(tmp_path / "run/iter_0000100")
    ((said, is_as_before),) = fns.errors_of([str(tmp_path / "run")], "Qwen3")
    assert is_as_before
    assert re.search(text, said), said
    model = fns.model_of("Qwen3", 1)
    with pytest.raises(kind):
        sw.load(model, tmp_path / "run")


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    made(tmp_path, "Qwen3")
    run = tmp_path / "run"
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(SourceError, match=r"iter_0000200: has no metadata\.json, which the last step of"):
        open_catalog(run)
    (run / "iter_0000200/mp_rank_00").mkdir(parents=True)
    with pytest.raises(SourceError, match=r"a file for each rank.*--ckpt-convert-format torch_dist"):
        open_catalog(run)
    (run / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with pytest.raises(FormatError):
        open_catalog(run)
    (run / "latest_checkpointed_iteration.txt").unlink()
    shutil.rmtree(run / "iter_0000200")
    assert open_catalog(run).kind == "megatron"
    with pytest.raises(SourceError, match=r"share, which can't be read\. Give its directory"):
        open_catalog(run / "iter_0000100/common.pt")


# ----------------------------------------------------------------------------------------------------
# Megatron-core itself


def really_made(root: Path, kind: str, tp: int, pp: int, ep: int) -> Tensors:
    """A run of Megatron-core, and the model that its ranks had, as the hub names it, by the formulas of Megatron Bridge."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    size = tp * pp * ep
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    words = ["-m", "tests.runs._megatron_fns", str(root), kind, *map(str, (tp, pp, ep))]
    done = subprocess.run([*launched, *words], env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    held = [torch.load(root / f"rank_{r}.pt") for r in range(size)]
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for one in held:
        for name, t in one["own"].items():
            name = _moved(name, r"(?<=^decoder\.layers\.)\d+", one["pp"] * 4 // pp)
            name = _moved(name, r"(?<=local_experts\.)\d+", one["ep"] * 4 // ep)
            parts.setdefault(name, {})[one["tp"]] = t
    found: Tensors = {}
    for name, of_ranks in parts.items():
        own = [of_ranks[k] for k in sorted(of_ranks)]
        if name.endswith("linear_fc1.weight"):
            halves = [t.chunk(2) for t in own]
            gate, up = (torch.cat(half) for half in zip(*halves, strict=True))
            found[name] = gate
            found[name.replace("fc1", "up")] = up
        elif name.endswith(("proj.weight", "fc2.weight")):
            found[name] = torch.cat(own, 1)
        elif name.endswith(
            ("linear_qkv.weight", "linear_qkv.bias", "embeddings.weight", "output_layer.weight")
        ):
            found[name] = torch.cat(own)
        else:
            found[name] = own[0]
    return dict(_to_hub(found, kind))


def _moved(name: str, pattern: str, by: int) -> str:
    return re.sub(pattern, lambda m: str(int(m[0]) + by), name)


def _to_hub(found: Tensors, kind: str) -> list[tuple[str, torch.Tensor]]:
    """Names of Megatron's modules (those without Transformer Engine) as the hub's."""
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    block, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if kind == "Mixtral":
        block, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    rules = [
        (r"^decoder\.", "model."),
        (r"self_attention\.linear_proj", "self_attn.o_proj"),
        (r"self_attention\.([qk])_layernorm", r"self_attn.\1_norm"),
        (r"pre_mlp_layernorm", "post_attention_layernorm"),
        (r"mlp\.router", f"{block}.gate"),
        (r"mlp\.experts\.local_experts", f"{block}.experts"),
        (r"mlp\.linear", f"{block}.linear" if block == "mlp" else "mlp.linear"),
        (r"linear_fc1", gate),
        (r"linear_up", up),
        (r"linear_fc2", down),
    ]
    made = []
    for name, t in found.items():
        if name in names:
            made.append((names[name], t))
        elif ".linear_qkv." in name:
            by_group = t.unflatten(0, (2, 4 + 2, 4))  # two groups of four heads
            stem, end = name.replace("decoder.", "model.").split("self_attention.linear_qkv")
            for x, own in zip("qkv", (by_group[:, :4], by_group[:, 4], by_group[:, 5]), strict=True):
                made.append((f"{stem}self_attn.{x}_proj{end}", own.reshape(-1, *t.shape[1:])))
        else:
            for pattern, text in rules:
                name = re.sub(pattern, text, name)
            made.append((name, t))
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "tp", "pp", "ep"),
    [
        ("Llama", 1, 1, 1),
        ("Qwen2", 2, 1, 1),
        ("Qwen3", 1, 2, 1),
        ("Qwen3", 2, 2, 1),
        ("Mixtral", 1, 1, 2),
        ("Qwen3Moe", 1, 2, 1),
    ],
)
def test_a_run_of_megatron_itself(
    ranks: RankPool, tmp_path: Path, kind: str, tp: int, pp: int, ep: int
) -> None:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("`make loggers` installs it")
    expected = really_made(tmp_path / "run", kind, tp, pp, ep)
    expected |= {n: expected[n][:60] for n in ("model.embed_tokens.weight", "lm_head.weight")}
    model = fns.model_of(kind, 5, **fns.ITS_OWN)
    sw.load(model, tmp_path / "run")
    assert differences(hub_of(model, tmp_path / "hub"), expected) == []
    whole = dict(model.named_parameters())
    for now in (1, 2, 3):
        for one in ranks.run_ranks(now, fns.takes_over, str(tmp_path / "run"), kind, **fns.ITS_OWN):
            assert differences(one["model"], whole) == []
