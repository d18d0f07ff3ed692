"""A MoE layer on NPUs: dispatch, grouped matmul, SwiGLU, grouped matmul, combine; every step is checked.

    torchrun --nproc-per-node 4 examples/npu_moe_layer.py                        on a machine with NPUs
    ascend-moe vnpu -- torchrun --nproc-per-node 4 examples/npu_moe_layer.py     on any machine
    ascend-moe shim -- torchrun --nproc-per-node 4 examples/npu_moe_layer.py  without torch_npu, on CPU tensors

Every rank knows the tokens of all ranks, so each can compute the expected results: dispatch and combine must
match the reference bit for bit, the layer a dense computation within a tolerance.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch_npu

import ascend_moe
from ascend_moe import comm, reference

E, K, H, INNER = 16, 4, 512, 256  # experts of all ranks, experts a token, elements of a token, of an expert
BATCHES = [16, 10, 0, 5]  # tokens a rank; one rank has none
LARGEST = max(BATCHES)


# Name, V2, quant_mode, masked: equal padded batches with a mask, else unequal ones with global_bs
CASES = [
    ("V1, bf16, unequal batches", False, 0, False),
    ("V2, bf16, mask", True, 0, True),
    ("V2, int8, unequal batches", True, 2, False),
    ("V1, int8, mask", False, 2, True),
]


def tokens_of(rank: int, masked: bool) -> reference.RankInput:
    """Return the tokens of a rank and their routing."""
    g = torch.Generator().manual_seed(100 + rank)
    real = BATCHES[rank % len(BATCHES)]
    batch = LARGEST if masked else real
    x = torch.randn(batch, H, generator=g).bfloat16()
    top = torch.rand(batch, E, generator=g).topk(K)
    weights = top.values / top.values.sum(1, keepdim=True)
    mask = torch.arange(batch) < real if masked else None
    return reference.RankInput(x, top.indices.int(), x_active_mask=mask, expert_scales=weights)


def expert_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expert weights of all experts: gate and up (E, H, 2*INNER), down (E, INNER, H)."""
    g = torch.Generator().manual_seed(0)
    up = torch.randn(E, H, 2 * INNER, generator=g) / H**0.5
    down = torch.randn(E, INNER, H, generator=g) / INNER**0.5
    return up.bfloat16(), down.bfloat16()


def experts(rows: torch.Tensor, counts: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the results of this rank's experts for the rows that it received, ``counts`` of each expert."""
    by_expert = {"group_list": counts, "group_list_type": 1, "group_type": 0, "split_item": 2}
    hidden = torch_npu.npu_grouped_matmul(x=[rows], weight=[up], bias=None, **by_expert)[0]
    return torch_npu.npu_grouped_matmul(x=[torch_npu.npu_swiglu(hidden)], weight=[down], bias=None, **by_expert)[0]


class Layer:
    """The layer on one rank."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # The group of dispatch and combine is theirs alone; everything else has one of its own.
        self.group = dist.new_group(list(range(self.world)))
        self.others = dist.group.WORLD
        self.group_ep = ascend_moe.comm_name(self.group)
        mine = slice(self.rank * E // self.world, (self.rank + 1) * E // self.world)
        self.up, self.down = (weight[mine].npu() for weight in expert_weights())

    def run(self, v2: bool, quant_mode: int, masked: bool) -> list[str]:
        """Run the layer once, and return a sentence for each wrong result."""
        inputs = [tokens_of(rank, masked) for rank in range(self.world)]
        counted = {"moe_expert_num": E, "global_bs": 0 if masked else LARGEST * self.world}
        place = {"group_ep": self.group_ep, "ep_world_size": self.world, "ep_rank_id": self.rank, **counted}
        me = inputs[self.rank]
        x, ids, weights = me.x.npu(), me.expert_ids.npu(), me.expert_scales.npu()
        place["x_active_mask"] = None if me.x_active_mask is None else me.x_active_mask.npu()
        contract = "_v2" if v2 else ""
        dispatch = getattr(ascend_moe, f"npu_moe_distribute_dispatch{contract}")
        combine = getattr(ascend_moe, f"npu_moe_distribute_combine{contract}")
        sent = dispatch(x, ids, quant_mode=quant_mode, **place)
        rows, scales, index, counts, recv_counts = sent[:5]
        self.overwrite_windows()
        if quant_mode:
            rows = (rows.float() * scales.unsqueeze(1)).bfloat16()
        y = experts(rows, counts, self.up, self.down)
        out = combine(y, ids, index, recv_counts, weights, **place)
        self.overwrite_windows()
        ascend_moe.check()  # waits; raises what a kernel has found

        expected = reference.dispatch(inputs, quant_mode=quant_mode, **counted)
        reports = [
            reference.validate(
                "dispatch",
                sent,
                expected[self.rank],
                rank=self.rank,
                contract="v2" if v2 else "v1",
                ranks_per_server=comm.ranks_per_server(self.group_ep, self.world, self.rank),
            )
        ]
        # Combine in bits, of the rows that the experts of all ranks gave.
        all_rows = [torch.empty_like(y) for _ in range(self.world)]
        dist.all_gather(all_rows, y, group=self.others)
        sums = reference.combine(inputs, [rows.cpu() for rows in all_rows], expected, **counted)
        reports.append(reference.validate("combine", out, sums[self.rank], rank=self.rank))
        wrong = [report.text for report in reports if not report.ok]
        if any(tensor.device != x.device for tensor in (*sent, y, out)):
            wrong.append(f"not all on {x.device}")
        want = dense(me)
        rms = want.square().mean().sqrt() if want.numel() else torch.zeros(())
        limit = (0.1 if quant_mode else 0.03) * (rms + want.abs())
        if not bool(((out.cpu().float() - want).abs() <= limit).all()):
            wrong.append("the layer is not the dense one")
        return wrong

    def overwrite_windows(self) -> None:
        """Run collectives of HCCL, which overwrite the windows that dispatch and combine use."""
        full = torch.full((1 << 20,), float("nan"), device="npu")
        dist.all_reduce(full, group=self.group)
        # A rank may still copy from its window when another one's next op writes there: all meet.
        torch.npu.synchronize()
        dist.barrier(self.others)


def dense(given: reference.RankInput) -> torch.Tensor:
    """Return the layer's output, computed token by token in fp32 on the CPU."""
    up, down = (weight.float() for weight in expert_weights())
    out = torch.zeros(given.x.shape)
    for token, ids in enumerate(given.expert_ids.tolist()):
        if given.x_active_mask is not None and not given.x_active_mask[token]:
            continue
        for k, expert in enumerate(ids):
            gate, value = (given.x[token].float() @ up[expert]).chunk(2)
            out[token] += given.expert_scales[token, k] * (torch.nn.functional.silu(gate) * value @ down[expert])
    return out


def main() -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    layer = Layer()
    right = True
    for name, v2, quant_mode, masked in CASES:
        wrong = layer.run(v2, quant_mode, masked)
        right &= not wrong
        for sentence in wrong:
            print(f"rank {layer.rank}: {name}: {sentence}", flush=True)
        failures = torch.tensor([len(wrong)], dtype=torch.int32, device="npu")
        dist.all_reduce(failures)
        if layer.rank == 0:
            tokens = [LARGEST if masked else BATCHES[r % len(BATCHES)] for r in range(layer.world)]
            outcome = "equal to the reference" if int(failures.cpu()) == 0 else "WRONG"
            print(f"{name:<28} tokens {tokens!s:<18} {outcome}", flush=True)
    outcome = "PASS" if right else "FAIL"
    for rank in range(layer.world):  # one after the other
        dist.barrier()
        if rank == layer.rank:
            print(f"rank {rank} on {torch.npu.get_device_name()}: {outcome}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

# Output:
# V1, bf16, unequal batches    tokens [16, 10, 0, 5]     equal to the reference
# V2, bf16, mask               tokens [16, 16, 16, 16]   equal to the reference
# V2, int8, unequal batches    tokens [16, 10, 0, 5]     equal to the reference
# V1, int8, mask               tokens [16, 16, 16, 16]   equal to the reference
# rank 0 on Ascend910_9391: PASS
# rank 1 on Ascend910_9391: PASS
# rank 2 on Ascend910_9391: PASS
# rank 3 on Ascend910_9391: PASS
