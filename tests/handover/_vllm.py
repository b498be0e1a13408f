"""An engine of vLLM on CPUs, in vLLM's own environment: ``python _vllm.py MODEL RANKS FOLDER URL``.

It pulls two versions, each after the file FOLDER/published-N, and writes what it then says for a prompt. After that it loads the weights of
FOLDER/export-N with vLLM's own reader, and writes what it says with these.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPT = [1, 5, 9, 20, 33, 7, 250, 110, 64, 2, 2, 190]


def main(model: str, ranks: str, folder: str, url: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        tensor_parallel_size=int(ranks),
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        weight_transfer_config={"backend": "shardwise"},
    )

    def said() -> list[Any]:
        wanted = SamplingParams(max_tokens=8, temperature=0, detokenize=False, logprobs=1, prompt_logprobs=1)
        (found,) = llm.generate([{"prompt_token_ids": PROMPT}], wanted, use_tqdm=False)
        of_prompt = [one and sorted((k, v.logprob) for k, v in one.items()) for one in found.prompt_logprobs]
        return [of_prompt, list(found.outputs[0].token_ids), found.outputs[0].cumulative_logprob]

    def tell(name: str) -> None:
        path = Path(folder) / name
        path.with_suffix(".part").write_text(json.dumps(said()))
        path.with_suffix(".part").rename(path)

    tell("before.json")
    llm.init_weight_transfer_engine({"init_info": {"url": url}})
    for version in (1, 2):
        while not (Path(folder) / f"published-{version}").exists():
            time.sleep(0.05)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"wait_s": 60}})
        llm.finish_weight_update()
        tell(f"version-{version}.json")
    for version in (1, 2):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": f"{folder}/export-{version}"})
        tell(f"expected-{version}.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
