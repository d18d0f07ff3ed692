"""One MoE layer, one set of weights, by the calls of every supported system: the results are equal.

python examples/all_ways.py

Prints for each interface the largest difference from the expected result on any rank, and what is allowed: none
(equal) if the order of arithmetic is the same, else one rounding of bf16.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import ascend_moe
from ascend_moe.dispatchers import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, MC2Dispatcher
from ascend_moe.experts import grouped_mlp
from ascend_moe.interop import deep_ep, fused_moe, megatron, vllm
from ascend_moe.interop.sglang import EPMoE
from ascend_moe.layer_ops import dispatch_ffn_combine, get_symm_buffer_for_mega_moe, mega_moe
from ascend_moe.placement import ExpertPlacement
from ascend_moe.routers import softmax_topk

RANKS, E, K, H, F = 4, 8, 3, 256, 64
TOKENS = 12  # of a rank


@dataclass
class Layer:
    """A layer as one rank sees it: its tokens, their routing, and its experts."""

    rank: int
    group: dist.ProcessGroup
    x: Tensor  # (T, H) bf16
    logits: Tensor  # (T, E) fp32, of the router
    ids: Tensor  # (T, K) int32
    weights: Tensor  # (T, K) fp32
    every_w13: Tensor  # (E, 2F, H) bf16, gate rows first, as SGLang and vLLM store it
    every_w2: Tensor  # (E, H, F) bf16

    @classmethod
    def of(cls, rank: int, group: dist.ProcessGroup) -> Layer:
        generator = torch.Generator().manual_seed(7)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        every_x, every_logits = randn(RANKS, TOKENS, H).bfloat16(), randn(RANKS, TOKENS, E)
        w13, w2 = (randn(E, 2 * F, H) / H**0.5).bfloat16(), (randn(E, H, F) / F**0.5).bfloat16()
        weights, ids = softmax_topk(every_logits[rank], K, renormalize=True)
        return cls(rank, group, every_x[rank], every_logits[rank], ids, weights, w13, w2)

    @property
    def w13(self) -> Tensor:
        """(L, 2F, H), of this rank's experts."""
        return self.every_w13.chunk(RANKS)[self.rank]

    @property
    def w2(self) -> Tensor:
        """(L, H, F)."""
        return self.every_w2.chunk(RANKS)[self.rank]

    @property
    def w_gate_up(self) -> Tensor:
        """(L, H, 2F), as torch_npu's grouped matmul takes it."""
        return self.w13.transpose(1, 2)

    @property
    def w_down(self) -> Tensor:
        """(L, F, H)."""
        return self.w2.transpose(1, 2)

    @property
    def name(self) -> str:
        return ascend_moe.comm_name(self.group)


def alone(layer: Layer) -> Tensor:
    """Return the expected result: the layer computed by its definition, without other ranks."""
    pairs = layer.ids.flatten().argsort(stable=True)
    counts = layer.ids.flatten().bincount(minlength=E)
    w_gate_up, w_down = layer.every_w13.transpose(1, 2), layer.every_w2.transpose(1, 2)
    rows = torch.empty(len(pairs), H)
    rows[pairs] = grouped_mlp(layer.x[pairs // K], w_gate_up, w_down, counts).float()
    total = torch.zeros(TOKENS, H)
    for k in range(K):
        total += layer.weights[:, k : k + 1] * rows[k::K]
    return total.bfloat16()


WAYS: dict[str, tuple[Callable[[Layer], Tensor], bool]] = {}  # interface -> function, equal bits


def way(name: str, equal: bool = True) -> Callable[[Callable[[Layer], Tensor]], Callable[[Layer], Tensor]]:
    """Return a decorator that adds a function to `WAYS`. ``equal``: its result must be bitwise the expected one."""

    def add(function: Callable[[Layer], Tensor]) -> Callable[[Layer], Tensor]:
        WAYS[name] = function, equal
        return function

    return add


def through(dispatcher: Dispatcher, layer: Layer) -> Tensor:
    """Compute the layer by dispatch, grouped MLP and combine."""
    sent = dispatcher.dispatch(layer.x, layer.ids)
    rows = grouped_mlp(sent.expand_x, layer.w_gate_up, layer.w_down, sent.expert_token_nums)
    return dispatcher.combine(rows, sent, layer.weights)


def windows(layer: Layer, comm_alg: str) -> Tensor:
    return through(MC2Dispatcher.from_group(layer.group, E, comm_alg=comm_alg), layer)


for algorithm in ("window", "direct", "hierarchy"):
    way(algorithm)(functools.partial(windows, comm_alg=algorithm))


@way("dispatch_ffn_combine")
def one_call(layer: Layer) -> Tensor:
    """Compute the layer in one call, as vllm-ascend's FUSED_MC2 does."""
    out, rows = torch.empty_like(layer.x), torch.empty(E // RANKS, dtype=torch.int32)
    weights = ([layer.w_gate_up], [layer.w_down], layer.ids, None, None, None, None, layer.weights)
    dispatch_ffn_combine(layer.x, *weights, layer.name, 0, out, rows)
    return out


@way("mega_moe")
def cann_mega_moe(layer: Layer) -> Tensor:
    """Compute the layer in one call of CANN's newest front end."""
    buffer = get_symm_buffer_for_mega_moe(layer.group, E, TOKENS, K, H, F)
    return mega_moe(layer.x, layer.ids, layer.weights, list(layer.w_gate_up), list(layer.w_down), buffer)[0]


@way("zero copy")
def zero_copy(layer: Layer) -> Tensor:
    """Compute the layer with experts that write into registered memory, from which combine sends."""
    dispatcher = MC2Dispatcher.from_group(layer.group, E, comm_alg="direct", zero_copy=True)
    sent = dispatcher.dispatch(layer.x, layer.ids)
    out = dispatcher.empty_expert_out(sent, layer.x.dtype)
    rows = grouped_mlp(sent.expand_x, layer.w_gate_up, layer.w_down, sent.expert_token_nums, out=out)
    return dispatcher.combine(rows, sent, layer.weights)


def collectives(layer: Layer, dispatcher: type[AllToAllDispatcher | AllGatherDispatcher]) -> Tensor:
    return through(dispatcher(layer.group, E), layer)


way("all-to-all")(functools.partial(collectives, dispatcher=AllToAllDispatcher))
way("all-gather")(functools.partial(collectives, dispatcher=AllGatherDispatcher))


def mine(layer: Layer, every: Tensor) -> Tensor:
    """Return the rows of this rank's tokens, given those of all ranks' tokens."""
    return every[layer.rank * TOKENS : (layer.rank + 1) * TOKENS]


def ends() -> Tensor:
    """Return the running sum of the ranks' numbers of tokens."""
    return torch.arange(1, RANKS + 1, dtype=torch.int32) * TOKENS


def ep_moe(layer: Layer, reduce: str) -> Tensor:
    """Compute SGLang's layer, in which every rank has the tokens of all ranks."""
    experts = EPMoE(E, K, H, F, torch.bfloat16, reduce=reduce, group=layer.group)
    experts.w13_weight.data, experts.w2_weight.data = layer.w13, layer.w2
    x, logits = (fused_moe.naive_multicast(part, ends(), layer.group) for part in (layer.x, layer.logits))
    return mine(layer, experts(x, logits))


way("EPMoE, all-reduce", equal=False)(functools.partial(ep_moe, reduce="all_reduce"))
way("EPMoE, mc2")(functools.partial(ep_moe, reduce="mc2"))


@way("aligned blocks", equal=False)
def aligned_blocks(layer: Layer) -> Tensor:
    """Compute vLLM's FusedMoE with expert and data parallelism."""
    x, weights, ids = (
        fused_moe.naive_multicast(part, ends(), layer.group) for part in (layer.x, layer.weights, layer.ids)
    )
    expert_map = ExpertPlacement.contiguous(E, RANKS).expert_map(layer.rank)
    part = fused_moe.fused_experts(
        x,
        layer.w13,
        layer.w2,
        weights,
        ids,
        global_num_experts=E,
        expert_map=expert_map,
        block_size=4,
        out_dtype=torch.float32,
    )
    return fused_moe.all_reduce_dp(part, ends(), layer.group).bfloat16()


def modular_kernel(layer: Layer, kind: str) -> Tensor:
    """Compute the layer by vLLM's modular kernel with dispatcher ``kind``."""
    config = vllm.MoEKernelConfig(layer.name, layer.rank, RANKS, E, TOKENS, kind)
    kernel: Callable[..., Tensor] = vllm.select(config)
    return kernel(layer.x, layer.w13, layer.w2, layer.weights, layer.ids, global_num_experts=E)


for kind, title in (
    ("mc2", "standard"),
    ("batched", "batched"),
    ("alltoall", "all-to-all"),
    ("allgather", "all-gather"),
):
    way(f"modular kernel, {title}")(functools.partial(modular_kernel, kind=kind))


def six_phases(layer: Layer, kind: str) -> Tensor:
    """Compute the layer by Megatron-LM's dispatcher, which adds a token's rows in the order of experts, not of ids."""
    dispatcher = megatron.TokenDispatcher(kind, layer.group, E, K, probs_on="combine")
    experts = megatron.GroupedMLP(E // RANKS, H, F).load_experts(layer.w_gate_up, layer.w_down)
    probs = torch.zeros(TOKENS, E).scatter(1, layer.ids.long(), layer.weights)
    tokens, slots, handle = dispatcher.dispatch_preprocess(layer.x, probs > 0, probs)
    arrived = dispatcher.token_dispatch(tokens, slots, handle)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(*arrived, handle)
    out, _ = experts(rows, counts, row_probs)
    home = dispatcher.token_combine(dispatcher.combine_preprocess(out, handle), handle)
    return dispatcher.combine_postprocess(home, handle).detach()


for kind in ("mc2", "alltoall", "allgather"):
    way(f"Megatron-LM, six phases, {kind}", equal=False)(functools.partial(six_phases, kind=kind))


def deep_ep_normal(layer: Layer, kind: type[deep_ep.Buffer | deep_ep.AscendBuffer]) -> Tensor:
    """Compute it by DeepEP, a row per rank, weighted by experts; or sgl-kernel-npu, per expert, weighted by combine."""
    buffer, ids = kind(layer.group), layer.ids.long()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, E)
    x, local_ids, weights, counts, handle, _ = buffer.dispatch(
        layer.x, None, per_rank, None, in_rank, per_expert, ids, layer.weights
    )
    if isinstance(buffer, deep_ep.AscendBuffer):
        rows = grouped_mlp(x, layer.w_gate_up, layer.w_down, torch.tensor(counts))
        return buffer.combine(rows, handle)[0]
    assert local_ids is not None and weights is not None
    part = fused_moe.fused_experts(
        x, layer.w13, layer.w2, weights, local_ids.int(), block_size=4, out_dtype=torch.float32
    )
    return buffer.combine(part, handle)[0].bfloat16()  # parts in fp32: bf16 ones would be rounded on each rank


way("DeepEP, normal", equal=False)(functools.partial(deep_ep_normal, kind=deep_ep.Buffer))
way("DeepEP of sgl-kernel-npu, normal")(functools.partial(deep_ep_normal, kind=deep_ep.AscendBuffer))


@way("DeepEP, low latency")
def deep_ep_low_latency(layer: Layer) -> Tensor:
    buffer, ids = deep_ep.Buffer(layer.group, low_latency_mode=True), layer.ids.long()
    x, counts, handle, _, hook = buffer.low_latency_dispatch(
        layer.x, ids, TOKENS, E, use_fp8=False, return_recv_hook=True
    )
    hook()
    rows = torch.zeros_like(x)
    for expert, count in enumerate(counts.tolist()):
        w_gate_up, w_down = layer.w_gate_up[expert : expert + 1], layer.w_down[expert : expert + 1]
        rows[expert, :count] = grouped_mlp(x[expert, :count], w_gate_up, w_down, torch.tensor([count]))
    return buffer.low_latency_combine(rows, ids, layer.weights, handle)[0]


def compare(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[float, bool]]:
    """Return interface -> largest difference from the expected result on this rank, and whether it is allowed."""
    layer = Layer.of(rank, group)
    expected = alone(layer)
    found = {}
    for name, (function, equal) in WAYS.items():
        try:
            out = function(layer)
        except ascend_moe.AscendMoeError as error:
            print(f"rank {rank}: {name}: {error}", file=sys.stderr)
            found[name] = float("inf"), False
            continue
        difference = (out.float() - expected.float()).abs()
        one_rounding = expected.float().abs() * 2**-7 + 2**-16  # two neighbours of bf16
        fits = torch.equal(out, expected) if equal else bool((difference <= one_rounding).all())
        found[name] = float(difference.max()), fits and out.dtype == expected.dtype
    return found


def table(ranks: list[dict[str, tuple[float, bool]]]) -> tuple[str, bool]:
    """Return the table of the results of all ranks as text, and whether every difference is allowed."""
    lines = [f"{'interface':<36}{'largest difference':>20}  must be"]
    every_fits = True
    for name, (_, equal) in WAYS.items():
        difference, fits = max(rank[name][0] for rank in ranks), all(rank[name][1] for rank in ranks)
        every_fits &= fits
        rule = "equal" if equal else "one rounding"
        lines.append(f"{name:<36}{difference:>20.3g}  {rule}{'' if fits else ': FAIL'}")
    return "\n".join(lines), every_fits


def rank_main(rank: int, rendezvous: str) -> None:
    """Run one rank, in a process of its own."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    ranks: list[dict[str, tuple[float, bool]]] = [{} for _ in range(RANKS)]
    group = dist.group.WORLD
    assert group is not None
    dist.all_gather_object(ranks, compare(rank, group))
    text, fits = table(ranks)
    if rank == 0:
        print(text)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(str(Path(folder) / "rendezvous"),), nprocs=RANKS)
