"""transformers' own module of FP8, in releases that import Triton for it, too."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tests.harness.versions import is_open

__all__ = ["fp8_module", "fp8_quantize"]


def fp8_module() -> Any:
    """``transformers.integrations.finegrained_fp8``.

    Before 5.7 it imports Triton, which torch's builds for CPUs lack, for kernels that no test calls. An empty module stands in.
    """
    if is_open("kept-fp8") or importlib.util.find_spec("triton") is not None:
        return _imported()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module(
            "torch._inductor.compile_fx"
        )  # else imported there, and would find what stands in
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(jit=lambda function: function, language=language)
    vars(language).update(constexpr=object)
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        return _imported()
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def _imported() -> Any:
    return importlib.import_module("transformers.integrations.finegrained_fp8")


def fp8_quantize(**settings: Any) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    """``Fp8Quantize`` with these settings: name and weight → the stored tensors."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    quantize = fp8_module().Fp8Quantize(FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**settings)))
    return lambda name, weight: dict(quantize.convert({name: [weight]}))
