"""Is a method's result right? Rows of dispatch bit for bit, sums within what the order of addition allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.bench import ffn
from ascend_moe.bench.cases import Case
from ascend_moe.bench.data import Inputs
from ascend_moe.bench.methods.base import LIMIT, Arrived, Method
from ascend_moe.dispatchers import rows as row_ops

_FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Expected:
    """What one rank must get of an entry.

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


def expected(case: Case, rank: int, of_all: list[Inputs]) -> Expected:
    """From the inputs of all ranks, without any communication."""
    ids = torch.cat([one.expert_ids.reshape(-1) for one in of_all])
    order = torch.argsort(ids, stable=True)  # by expert, then source rank, then flat (token, k)
    first = rank * case.local_experts
    sorted_ids = ids[order].long()
    mine = (sorted_ids >= first) & (sorted_ids < first + case.local_experts)
    x = torch.cat([one.x for one in of_all])
    rows, scales = x.index_select(0, order[mine] // case.topk), None
    if case.quant_mode:
        rows, scales = row_ops.quantise(rows)
    counts = torch.bincount(sorted_ids[mine] - first, minlength=case.local_experts)
    sums, slack = _sums(case, of_all[rank])
    return Expected(rows, scales, counts, sums, slack)


def _sums(case: Case, one: Inputs) -> tuple[Tensor, Tensor]:
    total = torch.zeros(case.batch, case.hidden)
    size = torch.zeros(case.batch, case.hidden)
    codes, scales = row_ops.quantise(one.x) if case.quant_mode else (one.x, None)
    out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
    for k in range(case.topk):
        ffn.run(codes, scales, one.expert_ids[:, k].long(), out)
        term = out.float() * one.expert_scales[:, k, None]
        total += term
        size += term.abs()
    return total.to(case.torch_dtype), size * (2 * case.topk * _FP32)


def dispatch_fault(method: Method, arrived: Arrived, want: Expected) -> str:
    """What is wrong with the rows, or ''."""
    if method.kind == LIMIT:  # sends nothing
        return ""
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
    off = (got.float() - want.sums.float()).abs()
    wrong = ~(off <= allowed)  # also finds NaN
    if bool(wrong.any()):
        token, column = (int(i) for i in wrong.nonzero()[0])
        return (
            f"combine differs at token {token}, column {column}: {float(got[token, column])}, "
            f"reference {float(want.sums[token, column])}",
            False,
        )
    return "", False
