"""Is a method's result right? Rows of dispatch bit for bit, sums within what the order of addition allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.bench.cases import Case, Inputs
from ascend_moe.bench.methods.base import Arrived
from ascend_moe.dispatchers import rows as row_ops

_FP32 = torch.finfo(torch.float32).eps


def run_experts(rows: Tensor, scales: Tensor | None, experts: Tensor, out: Tensor) -> None:
    """What stands for the experts: never timed, the same for every method.

    Writes (n, H) output for ``rows`` (int8 rows have fp32 ``scales``) into ``out[:n]``. The factor depends
    on the expert (global numbers, (n,)): the sums then show a row that went to a wrong expert.
    """
    count = experts.numel()
    factors = (1 + (experts % 7).float() / 8)[:, None]
    if scales is None:
        torch.mul(rows[:count], factors.to(rows.dtype), out=out[:count])
    else:
        out[:count] = rows[:count].float().mul_(scales[:count, None]).mul_(factors)


@dataclass(frozen=True)
class Expected:
    """What a rank must get.

    Attributes:
        rows, scales: expand_x (n, H) and, with int8 rows, its scales.
        counts: (L,) rows a local expert.
        sums: (BS, H), summed in ascending k, product rounded, then added: what our ops promise bit for bit.
        slack: (BS, H) fp32, how far another order of addition may be off before the last rounding.
    """

    rows: Tensor
    scales: Tensor | None
    counts: Tensor
    sums: Tensor
    slack: Tensor


def expected(case: Case, rank: int, inputs_by_rank: Sequence[Inputs]) -> Expected:
    """From the inputs of all ranks, without any communication."""
    ids = torch.cat([inputs.expert_ids.reshape(-1) for inputs in inputs_by_rank])
    order = torch.argsort(ids, stable=True)  # by expert, then source rank, then flat (token, k)
    local_ids = ids[order].long() - rank * case.local_experts
    mine = (local_ids >= 0) & (local_ids < case.local_experts)
    x = torch.cat([inputs.x for inputs in inputs_by_rank])
    rows, scales = x.index_select(0, order[mine] // case.topk), None
    if case.quant_mode:
        rows, scales = row_ops.quantise(rows)
    counts = torch.bincount(local_ids[mine], minlength=case.local_experts)
    return Expected(rows, scales, counts, *_sums(case, inputs_by_rank[rank]))


def _sums(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    total = torch.zeros(case.batch, case.hidden)
    size = torch.zeros(case.batch, case.hidden)
    codes, scales = row_ops.quantise(inputs.x) if case.quant_mode else (inputs.x, None)
    out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
    for k in range(case.topk):
        run_experts(codes, scales, inputs.expert_ids[:, k].long(), out)
        term = out.float() * inputs.expert_scales[:, k, None]
        total += term
        size += term.abs()
    return total.to(case.torch_dtype), size * (2 * case.topk * _FP32)


def dispatch_fault(arrived: Arrived, want: Expected) -> str:
    """What is wrong with the rows, or ''."""
    count = want.rows.size(0)
    if not torch.equal(arrived.counts.long(), want.counts):
        return "rows per expert differ from the reference"
    if not torch.equal(arrived.rows[:count], want.rows):
        wrong = (arrived.rows[:count] != want.rows).any(1).nonzero()
        where = f"first at row {int(wrong[0])} of {count}" if len(wrong) else "NaN"
        return f"expand_x differs from the reference, {where}"
    scales = arrived.scales
    if want.scales is not None and (scales is None or not torch.equal(scales[:count], want.scales)):
        return "dynamic_scales differ from the reference"
    return ""


def combine_fault(got: Tensor, want: Expected) -> tuple[str, bool]:
    """What is wrong with the sums, or ''; and whether they are equal bit for bit."""
    if got.shape != want.sums.shape or got.dtype != want.sums.dtype:
        return f"is {tuple(got.shape)} {got.dtype}, not {tuple(want.sums.shape)} {want.sums.dtype}", False
    if torch.equal(got, want.sums):
        return "", True
    # Sums that differ by `slack` may round to neighbours.
    allowed = want.slack + 2 * torch.finfo(got.dtype).eps * want.sums.float().abs()
    wrong = ~((got.float() - want.sums.float()).abs() <= allowed)  # true for NaN too
    if not bool(wrong.any()):
        return "", False
    token, column = (int(i) for i in wrong.nonzero()[0])
    values = f"{float(got[token, column])}, reference {float(want.sums[token, column])}"
    return f"combine differs at token {token}, column {column}: {values}", False
