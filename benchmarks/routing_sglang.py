"""Which experts a running SGLang chooses, on a CPU; for `benchmarks.routing --sglang`.

    PYTHON -m benchmarks.routing_sglang MODEL DTYPE TOKENS.npy OUT.npz

PYTHON is SGLang's interpreter. TOKENS has `[N, T]` ids; OUT `routes` `[N, T, layers, K]` and
`logprobs` `[N, T]`, that of each token after those before it (NaN for the first). SGLang's own
scheduler serves the requests, without our part of it. SGLang 0.5.23 registers its copy of the
routes with CUDA even on a CPU; here it is plain memory.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host import common

SLOTS = 8


def _plain(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


common.ALLOC_MEMORY_FUNCS["cpu"] = _plain  # also in the scheduler's process, which imports this


def main(model: str, dtype: str, tokens: str, out: str) -> None:
    import sglang

    texts = np.load(tokens)
    length = texts.shape[1]
    engine = sglang.Engine(
        model_path=model, skip_tokenizer_init=True, device="cpu", dtype=dtype,
        attention_backend="torch_native", context_length=length + 16, page_size=1,
        max_running_requests=SLOTS, max_total_tokens=(SLOTS + 1) * (length + 16),
        disable_radix_cache=True, disable_overlap_schedule=True, disable_cuda_graph=True,
        skip_server_warmup=True, enable_return_routed_experts=True, log_level="warning",
    )  # fmt: skip
    answers = engine.generate(
        input_ids=texts.tolist(),
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        return_routed_experts=True,
    )
    described = json.loads((Path(model) / "config.json").read_bytes())
    shape = -1, described["num_hidden_layers"], described["num_experts_per_tok"]
    routes, logprobs = [], []
    for answer in answers:
        about = answer["meta_info"]
        chosen = np.frombuffer(base64.b64decode(about["routed_experts"]), np.int32)
        routes.append(chosen.reshape(shape)[:length])
        found = [np.nan if one[0] is None else one[0] for one in about["input_token_logprobs"]]
        logprobs.append(found)
    np.savez(out, routes=np.stack(routes), logprobs=np.array(logprobs, np.float32))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
