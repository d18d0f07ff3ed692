"""SGLang's own DeepEP dispatcher over this package, with SGLang installed.

DEEP_USE_MODE=ops torchrun --nproc-per-node 2 examples/inside/in_sglang.py
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ascend_moe.interop import deep_ep
from ascend_moe.shim import torch_npu as shim

if importlib.util.find_spec("torch_npu") is None:
    shim.install()  # off the NPU: "npu" means CPU
deep_ep.install("ascend")  # before SGLang imports deep_ep

from sglang.srt.layers.moe import utils  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher import deepep  # noqa: E402

E, K, H, T = 8, 2, 256, 6  # experts of all ranks, experts of a token, elements of a token, tokens of a rank


def round_trip(mode: str) -> str:
    """Dispatch tokens to experts that return them unchanged, combine, and return a line about the result."""
    world, low_latency = dist.get_world_size(), mode == "low_latency"
    dispatcher = deepep.DeepEPDispatcher(
        dist.group.WORLD,
        K,
        num_experts=E,
        num_local_experts=E // world,
        hidden_size=H,
        params_dtype=torch.bfloat16,
        deepep_mode=utils.DeepEPMode(mode),
        async_finish=True,
        return_recv_hook=low_latency,
    )
    g = torch.Generator().manual_seed(dist.get_rank())
    x, weights = torch.randn(T, H, generator=g).bfloat16(), torch.rand(T, K, generator=g)
    routing = SimpleNamespace(topk_ids=torch.rand(T, E, generator=g).topk(K).indices.int(), topk_weights=weights)
    sent = dispatcher.dispatch(hidden_states=x.npu(), topk_output=routing)
    rows = [int(number) for number in (sent.masked_m if low_latency else sent.num_recv_tokens_per_expert)]
    kind = deepep.DeepEPLLCombineInput if low_latency else deepep.DeepEPNormalCombineInput
    y = dispatcher.combine(kind(sent.hidden_states, sent.topk_ids, sent.topk_weights)).cpu()
    expected = sum(x.float() * weights[:, k, None] for k in range(K)).bfloat16()
    return f"rank {dist.get_rank()}, {mode}: rows of its experts {rows}, sums are right: {torch.equal(y, expected)}"


def main() -> None:
    dist.init_process_group("hccl")
    utils.get_server_args = lambda: None  # a server has arguments, this program none
    results = [round_trip("normal"), round_trip("low_latency")]
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            print(*results, sep="\n", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# Output:
# rank 0, normal: rows of its experts [5, 4, 3, 2], sums are right: True
# rank 0, low_latency: rows of its experts [5, 4, 3, 2], sums are right: True
# rank 1, normal: rows of its experts [4, 3, 2, 1], sums are right: True
# rank 1, low_latency: rows of its experts [4, 3, 2, 1], sums are right: True
