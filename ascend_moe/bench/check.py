"""Is a method's result right? Rows of dispatch bit for bit, sums within what the order of addition allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe import reference
from ascend_moe.bench.cases import Case, inputs
from ascend_moe.bench.methods import Arrived


def run_experts(rows: Tensor, scales: Tensor | None, experts: Tensor, out: Tensor) -> None:
    """Stands for the experts: never timed, the same for every method.

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
    """What a rank must get: dispatch's result, and combine's (BS, H) sums in ascending k.

    ``slack``: how far another order of addition may be off before the last rounding.
    """

    dispatched: reference.DispatchResult
    sums: Tensor
    slack: float


def expected(case: Case, rank: int, number: int) -> Expected:
    """The reference's results for input set ``number``, without any communication."""
    call = case.call(number)
    dispatched = call.dispatched()
    rows = []
    for owner, result in enumerate(dispatched):
        local = torch.arange(case.local_experts).repeat_interleave(result.expert_token_nums)
        rows.append(torch.empty(result.expand_x.shape, dtype=case.torch_dtype))
        run_experts(result.expand_x, result.dynamic_scales, local + owner * case.local_experts, rows[-1])
    weights = inputs(case, rank, number).expert_scales
    largest = max(float(part.abs().max()) for part in rows if part.numel()) * float(weights.abs().max())
    slack = 2 * case.topk**2 * torch.finfo(torch.float32).eps * largest
    return Expected(dispatched[rank], call.combined(rows, dispatched)[rank], slack)


def dispatch_fault(arrived: Arrived, want: Expected) -> str:
    """What is wrong with the rows, or ''."""
    result, count = want.dispatched, want.dispatched.expand_x.size(0)
    if not torch.equal(arrived.counts.long(), result.expert_token_nums):
        return "rows per expert differ from the reference"
    if not torch.equal(arrived.rows[:count], result.expand_x):
        wrong = (arrived.rows[:count] != result.expand_x).any(1).nonzero()
        where = f"first at row {int(wrong[0])} of {count}" if len(wrong) else "NaN"
        return f"expand_x differs from the reference, {where}"
    scales, wanted = arrived.scales, result.dynamic_scales
    if wanted is not None and (scales is None or not torch.equal(scales[:count], wanted)):
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
