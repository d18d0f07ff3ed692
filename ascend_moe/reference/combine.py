"""Combine: weighted sums of the rows that come back, and a dense layer that never sends any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from .records import DispatchResult, RankInput, group_of, routed_pairs

Row = npt.NDArray[np.float32]


def combine(
    inputs: Sequence[RankInput],
    expand_xs: Sequence[torch.Tensor],
    dispatched: Sequence[DispatchResult],
    *,
    moe_expert_num: int,
    global_bs: int = 0,
) -> list[torch.Tensor]:
    """All ranks' combine outputs, (BS, H) in the dtype of ``expand_xs``.

    expand_xs[r]: (>= R, H) rank r's expert outputs, row for row as dispatch gave them.
    The sum of a token is fp32: from 0, k ascending, each product rounded, then added (no FMA); then
    shared_expert_x; then one round-to-nearest-even cast. Inactive tokens give zeros.
    Raises ValueError when the routed pairs are not exactly the rows that dispatch delivered.
    """
    group_of(inputs, moe_expert_num, global_bs)
    returned: list[dict[tuple[int, int], Row]] = [{} for _ in inputs]
    for rows, result in zip(expand_xs, dispatched, strict=True):
        values = rows.detach().float().numpy()
        for i, (source, token, k) in enumerate(result.assist_info.tolist()):
            returned[source][token, k] = values[i]
    outputs = []
    for rank, given in enumerate(inputs):
        if {(token, k) for token, k, _ in routed_pairs(given)} != set(returned[rank]):
            raise ValueError(f"rank {rank}: combine's ids and mask are not those of dispatch")
        batch, hidden = given.expert_ids.shape[0], expand_xs[rank].shape[1]
        out = np.zeros((batch, hidden), np.float32)
        for token in range(batch):
            if _live(given, token):
                out[token] = _sum(given, token, returned[rank], hidden)
        outputs.append(torch.from_numpy(out).to(expand_xs[rank].dtype))
    return outputs


def _live(given: RankInput, token: int) -> bool:
    return given.x_active_mask is None or bool(given.x_active_mask[token].any())


def _sum(given: RankInput, token: int, returned: dict[tuple[int, int], Row], hidden: int) -> Row:
    acc = np.zeros(hidden, np.float32)
    with np.errstate(all="ignore"):
        for k in range(given.expert_ids.shape[1]):
            if (token, k) in returned:
                if given.expert_scales is None:
                    raise ValueError("combine needs expert_scales")
                product = returned[token, k] * np.float32(given.expert_scales[token, k].item())
                acc = acc + product
        if given.shared_expert_x is not None:
            acc = acc + given.shared_expert_x.detach().reshape(-1, hidden)[token].float().numpy()
    return acc


def dense(
    inputs: Sequence[RankInput],
    expert_fn: Callable[[int, torch.Tensor], torch.Tensor],
    moe_expert_num: int,
) -> list[torch.Tensor]:
    """Run the layer without any dispatch: expert_fn(expert id, x[t] of shape (H,)) -> (H,), token by token.

    Outputs (BS, H) in x's dtype, summed as combine defines. It shares nothing with dispatch and combine, so
    that each checks the other.
    """
    outputs = []
    for given in inputs:
        out = torch.zeros_like(given.x)
        topk = given.expert_ids.shape[1]
        for token in range(given.x.shape[0]):
            mask = None if given.x_active_mask is None else given.x_active_mask[token].expand(topk)
            if mask is not None and not mask.any():
                continue
            total = torch.zeros(given.x.shape[1], dtype=torch.float32)
            for k, expert in enumerate(given.expert_ids[token].tolist()):
                if expert == -1 or (mask is not None and not mask[k]):
                    continue
                if not 0 <= expert < moe_expert_num or given.expert_scales is None:
                    raise ValueError("dense needs ids in -1..E-1 and expert_scales")
                y = expert_fn(expert, given.x[token]).float()
                total = total.add(y.mul(given.expert_scales[token, k]))
            if given.shared_expert_x is not None:
                total = total.add(given.shared_expert_x.reshape(out.shape)[token].float())
            out[token] = total.to(out.dtype)
        outputs.append(out)
    return outputs
