"""Dispatch and combine of all ranks: routing, counts, collective errors, sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ascend_moe.call import SpecialExperts

from .records import (
    DispatchResult,
    Fault,
    Group,
    RankInput,
    Traffic,
    active_pairs,
    group_of,
    routed_pairs,
)

# One row; sorting orders an owner's rows: (local expert, source, token, k).
RowKey = tuple[int, int, int, int]
Row = npt.NDArray[np.float32]
NO_SPECIAL = SpecialExperts()


def dispatch(
    inputs: Sequence[RankInput],
    *,
    moe_expert_num: int,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    tp_world_size: int = 0,
    expert_scales_given: bool = False,
    special: SpecialExperts = NO_SPECIAL,
) -> list[DispatchResult]:
    """Return the outputs of dispatch on all ranks.

    Args:
        inputs: tensors by rank, including x ``(BS, H)``.
        moe_expert_num: E.
        quant_mode: 0, or 2 for int8 rows with a scale each.
        global_bs: 0 (equal batches) or W * maxBS.
        expert_token_nums_type: form of expert_token_nums: 0 running sums, 1 counts.
        tp_world_size: 0 or 1, the size of tp_recv_counts.
        expert_scales_given: dispatch takes expert_scales; it returns expand_scales, and ep_recv_counts may be longer.
        special: numbers of zero, copy and const experts, whose ids are valid and to which no row is sent.

    Raises:
        FaultyRouting: ids make the operators raise on every rank (see ``check``).
        ValueError: another value or shape is invalid, or differs between ranks.
    """
    group = require_sound(inputs, moe_expert_num, global_bs, special)
    _require_legal(inputs, quant_mode, expert_token_nums_type, tp_world_size)
    arriving: list[list[RowKey]] = [[] for _ in range(group.world)]
    sent = [[0] * group.world for _ in range(group.world)]
    for source, given in enumerate(inputs):
        for token, k, expert in routed_pairs(given, group.moe_experts):
            owner = expert // group.local_experts
            arriving[owner].append((expert % group.local_experts, source, token, k))
            sent[source][owner] += 1
    results = []
    for rank, keys in enumerate(arriving):
        keys.sort()
        segments, rows = Counter(key[:2] for key in keys), Counter(key[0] for key in keys)
        owned, sources = range(group.local_experts), range(group.world)
        counts = list(accumulate(segments[local, source] for local in owned for source in sources))
        nums = [rows[local] for local in owned]
        nums = list(accumulate(nums)) if expert_token_nums_type == 0 else nums
        expand_x, dynamic_scales = _payload(inputs, rank, keys, quant_mode, group)
        results.append(
            DispatchResult(
                expand_x=expand_x,
                dynamic_scales=dynamic_scales,
                expand_scales=_weights(inputs, keys) if expert_scales_given else None,
                expand_idx=_expand_idx(inputs[rank], group.moe_experts),
                assist_info=torch.tensor([key[1:] for key in keys], dtype=torch.int32).reshape(-1, 3),
                expert_token_nums=torch.tensor(nums, dtype=torch.int64),
                ep_recv_counts=torch.tensor(counts, dtype=torch.int32),
                tp_recv_counts=torch.tensor([len(keys)] * tp_world_size, dtype=torch.int32),
                rows_sent=sent[rank],
                expert_ids=inputs[rank].expert_ids,
                allocated=_allocated(inputs[rank], group, tp_world_size, expert_scales_given),
            )
        )
    return results


def _require_legal(inputs: Sequence[RankInput], quant_mode: int, nums_type: int, tp_world_size: int) -> None:
    if quant_mode not in (0, 2) or nums_type not in (0, 1) or tp_world_size not in (0, 1):
        values = f"quant_mode {quant_mode}, expert_token_nums_type {nums_type}, tp_world_size {tp_world_size}"
        raise ValueError(f"{values}: need 0 or 2, 0 or 1, 0 or 1, respectively")
    kinds = {(given.x.dtype, given.x.shape[1]) for given in inputs}
    if len(kinds) != 1:
        raise ValueError(f"the ranks disagree on the dtype or H of x: {kinds}; pass the same on all ranks")
    if len({given.scales is None for given in inputs}) != 1 or (quant_mode == 0 and inputs[0].scales is not None):
        raise ValueError(f"quant_mode is {quant_mode}; pass scales with 2 only, on all ranks or on none")
    for rank, given in enumerate(inputs):
        tokens, batch = given.x.shape[0], given.expert_ids.shape[0]
        if tokens != batch:
            raise ValueError(f"rank {rank}: x has {tokens} tokens, expert_ids has {batch}; they must be equal")


def _payload(
    inputs: Sequence[RankInput], rank: int, keys: list[RowKey], quant_mode: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return expand_x and dynamic_scales of one owner."""
    hidden = inputs[rank].x.shape[1]
    if quant_mode == 0:
        rows = [inputs[source].x[token].detach() for _, source, token, _ in keys]
        return (torch.stack(rows) if rows else inputs[rank].x.new_empty((0, hidden))), None
    codes = np.zeros((len(keys), hidden), np.int8)
    scales = np.zeros(len(keys), np.float32)
    for i, (local, source, token, _) in enumerate(keys):
        row = inputs[source].x[token].detach().float().numpy()
        table = inputs[source].scales
        smooth = None if table is None else table[rank * group.local_experts + local].detach().numpy()
        codes[i], scales[i] = quantize_row(row, smooth)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def _expand_idx(given: RankInput, experts: int) -> torch.Tensor:
    """Return for each (token, k) the number of earlier ones of this rank with the same expert."""
    batch, topk = given.expert_ids.shape
    indices = [0] * (batch * topk)
    seen: Counter[int] = Counter()
    for token, k, expert in routed_pairs(given, experts):
        indices[token * topk + k] = seen[expert]
        seen[expert] += 1
    return torch.tensor(indices, dtype=torch.int32)


def _weights(inputs: Sequence[RankInput], keys: Sequence[RowKey]) -> torch.Tensor:
    """Return the expert_scales of every row, (R,) fp32."""
    given = [given.expert_scales for given in inputs]
    values = [scales[token, k] for _, source, token, k in keys if (scales := given[source]) is not None]
    return torch.stack(values) if values else torch.empty(0)


def _allocated(
    given: RankInput, group: Group, tp_world_size: int, expert_scales_given: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the operator's whole output tensors; A is the maximum number of rows."""
    pairs = int(given.expert_ids.numel())
    a = group.world * group.capacity
    counts = group.world * group.local_experts
    if expert_scales_given:
        counts += 2 * group.world * group.max_bs * group.topk * (group.world // 8)
    return {
        "expand_x": (a, int(given.x.shape[1])),
        "dynamic_scales": (a,),
        "expand_idx": (pairs,),
        "assist_info_for_combine": (max(pairs, a * 128),),
        "expert_token_nums": (group.local_experts,),
        "ep_recv_counts": (counts,),
        "tp_recv_counts": (tp_world_size,),
        "expand_scales": (a,),
    }


# ---- quant_mode 2: one int8 row and one scale for each (token, k)


def quantize_row(
    row: npt.NDArray[np.float32], smooth: npt.NDArray[np.float32] | None = None
) -> tuple[npt.NDArray[np.int8], np.float32]:
    """Return codes (H,) int8 and the scale (fp32) of a row (H,) fp32, multiplied by ``smooth`` (H,) fp32 if given.

    Every step is rounded to fp32: m = max|v|, s = 127 / m, q = rint(v * s), scale = 1 / s (which is not
    m / 127). m ignores NaN unless all values are NaN; a NaN product gives code 0; codes are clamped to -128..127.
    A row whose m is 0 has codes 0 and scale 1.
    """
    with np.errstate(all="ignore"):
        v = row if smooth is None else row * smooth
        m = np.float32(np.fmax.reduce(np.abs(v)))
        if m == 0:
            return np.zeros(row.shape, np.int8), np.float32(1)
        s = np.float32(127) / m
        q = np.rint(v * s)
        q = np.clip(np.where(np.isnan(q), np.float32(0), q), -128, 127)
        return q.astype(np.int8), np.float32(1) / s


# ---- comm_quant_mode 2: rows on their way back, a scale for each block of 8 elements

CODES_OF_SCALE = 8


def quantize_blocks(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (R, H) int8 and scales (R, H / 8) of rows (R, H), bf16 or fp16; scales have the rows' dtype.

    For each block, in fp32: b = max|v| * (1 / 127) and v / b, which is rounded to fp16 and then to int8, both to
    nearest even; the stored scale is b rounded to the dtype. The maximum ignores NaN unless the block has no other
    value; a NaN quotient gives code 0. A block of zeros has codes and scale 0. Source: CANN's MoeDistributeCombine.
    Raises ValueError for fp32 rows, which combine refuses.
    """
    if rows.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"comm_quant_mode 2 is for bfloat16 and float16 rows, not {rows.dtype}; use comm_quant_mode 0")
    shape = (*rows.shape[:-1], rows.shape[-1] // CODES_OF_SCALE, CODES_OF_SCALE)
    blocks = rows.detach().float().numpy().reshape(shape)
    with np.errstate(all="ignore"):
        b = np.fmax.reduce(np.abs(blocks), axis=-1) * (np.float32(1) / np.float32(127))
        q = np.rint((blocks / b[..., None]).astype(np.float16))
        q = np.where(np.isnan(q), np.float16(0), q)
    codes = torch.from_numpy(q.astype(np.int8).reshape(rows.shape))
    return codes, torch.from_numpy(b).to(rows.dtype)


def restore_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows (R, H) in the dtype of ``scales``: ``codes`` times their block's scale in fp32, rounded once."""
    blocks = codes.reshape(*scales.shape, CODES_OF_SCALE).float() * scales.float()[..., None]
    return blocks.reshape(codes.shape).to(scales.dtype)


def quantized_row_bytes(hidden: int) -> tuple[int, int]:
    """Return the bytes of ``hidden`` int8 codes and their scales: written (both padded to 32), read (codes padded)."""
    scales = hidden // CODES_OF_SCALE * 2
    return _align32(hidden) + _align32(scales), _align32(hidden) + scales


# ---- the two collective errors of routing, which take a look at all ranks' ids


class FaultyRouting(ValueError):
    """Raised for ids with which the ops raise on every rank. ``fault``: a `Fault` that describes the error."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def check(
    inputs: Sequence[RankInput], moe_expert_num: int, global_bs: int = 0, special: SpecialExperts = NO_SPECIAL
) -> Fault | None:
    """Return the error that every rank must raise because of the ids of some rank, or None.

    The error is that of the lowest rank with faulty ids: its first invalid id by (token, k), or else the first owner
    to which it sends more than the capacity of maxBS * min(K, L) rows. Masked ids are ignored. Raises ValueError if the
    inputs are no collective call, as different K.

    Args:
        inputs: tensors by rank.
        moe_expert_num: E.
        global_bs: 0 (equal batches) or W * maxBS.
        special: numbers of zero, copy and const experts.
    """
    group = group_of(inputs, moe_expert_num, global_bs)
    for rank, given in enumerate(inputs):
        for token, k, expert in active_pairs(given):
            if not -1 <= expert < group.moe_experts + special.total:
                return Fault("InvalidExpertId", rank, token=token, k=k, expert_id=expert)
        rows = Counter(expert // group.local_experts for _, _, expert in routed_pairs(given, moe_expert_num))
        for owner in sorted(rows):
            if rows[owner] > group.capacity:
                return Fault("RoutingOverflow", rank, owner=owner, rows=rows[owner], capacity=group.capacity)
    return None


def require_sound(
    inputs: Sequence[RankInput], moe_expert_num: int, global_bs: int, special: SpecialExperts = NO_SPECIAL
) -> Group:
    """Return W, K, E, L and maxBS of a call; raise FaultyRouting if `check` returns a fault."""
    fault = check(inputs, moe_expert_num, global_bs, special)
    if fault is not None:
        raise FaultyRouting(fault)
    return group_of(inputs, moe_expert_num, global_bs)


# ---- combine: weighted sums of the rows that come back; a dense layer that never sends any


def combine(
    inputs: Sequence[RankInput],
    expand_xs: Sequence[torch.Tensor],
    dispatched: Sequence[DispatchResult],
    *,
    moe_expert_num: int,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    special: SpecialExperts = NO_SPECIAL,
    ranks_per_server: int = 0,
) -> list[torch.Tensor]:
    """Return the outputs of combine on all ranks, (BS, H) in the dtype of ``expand_xs``.

    The sum of a token is fp32: from 0, k ascending, each product with its weight rounded, then added (no FMA); then
    the shared expert's row; then one round-to-nearest-even cast. Inactive tokens give zeros. A copy expert's row is
    ori_x, a const expert's row is ``const_row`` of ori_x; a zero expert adds nothing. With comm_alg "hierarchy" every
    server sums its rows first, see ``_sum_by_server``.

    Args:
        inputs, moe_expert_num, global_bs, special: as for `dispatch`.
        expand_xs: expert outputs by rank, ``(>= R, H)``, in the order of the R rows that the rank received.
        dispatched: results of `dispatch`, by rank.
        comm_quant_mode: 0, or 2: every row, also a local one, is quantized by ``quantize_blocks`` and restored by
            ``restore_blocks`` before the sum; with hierarchy every server's sum instead.
        ranks_per_server: ranks per server with comm_alg "hierarchy"; 0: another algorithm.

    Raises:
        ValueError: ids and mask do not route exactly the rows of ``dispatched``, or a tensor that a sum needs is None.
    """
    group = group_of(inputs, moe_expert_num, global_bs)
    returned: list[dict[tuple[int, int], Row]] = [{} for _ in inputs]
    for rows, result in zip(expand_xs, dispatched, strict=True):
        arrived = rows.detach()[: len(result.assist_info)]
        if comm_quant_mode == 2 and ranks_per_server == 0:
            arrived = restore_blocks(*quantize_blocks(arrived))
        values = arrived.float().numpy()
        for i, (source, token, k) in enumerate(result.assist_info.tolist()):
            returned[source][token, k] = values[i]
    outputs = []
    for rank, given in enumerate(inputs):
        if {(token, k) for token, k, _ in routed_pairs(given, moe_expert_num)} != set(returned[rank]):
            raise ValueError(f"rank {rank}: combine's ids and mask differ from dispatch's; pass both the same inputs")
        batch, hidden = given.expert_ids.shape[0], expand_xs[rank].shape[1]
        returned[rank] |= _special_rows(given, moe_expert_num, special)
        out = np.zeros((batch, hidden), np.float32)
        mask = given.x_active_mask
        for token in range(batch):
            if mask is not None and not bool(mask[token].any()):
                continue
            if ranks_per_server == 0:
                total = _add_pairs(given, token, returned[rank], np.zeros(hidden, np.float32))
                out[token] = _add_shared(given, token, total)
                continue
            of_server = ranks_per_server * group.local_experts
            servers = {
                (token, k): expert // of_server
                for k, expert in enumerate(given.expert_ids[token].tolist())
                if 0 <= expert < moe_expert_num
            }
            rounding = _rounding(expand_xs[rank].dtype, comm_quant_mode)
            out[token] = _sum_by_server(given, token, returned[rank], hidden, servers, rounding)
        outputs.append(torch.from_numpy(out).to(expand_xs[rank].dtype))
    return outputs


def _add_pairs(given: RankInput, token: int, returned: dict[tuple[int, int], Row], acc: Row) -> Row:
    """Add the weighted rows of a token in ``returned``, k ascending."""
    with np.errstate(all="ignore"):
        for k in range(given.expert_ids.shape[1]):
            if (token, k) in returned:
                if given.expert_scales is None:
                    raise ValueError("expert_scales is None; combine needs (BS, K) weights, or an empty tensor")
                term = returned[token, k]
                if given.expert_scales.numel() > 0:
                    term = term * np.float32(given.expert_scales[token, k].item())
                acc = acc + term
    return acc


def _add_shared(given: RankInput, token: int, acc: Row) -> Row:
    shared = given.shared_row(token)
    with np.errstate(all="ignore"):
        total: Row = acc if shared is None else acc + shared.numpy()
    return total


def _rounding(dtype: torch.dtype, comm_quant_mode: int) -> Callable[[Row], Row]:
    """Round the sum of a server to ``dtype``, and quantize and restore it with comm_quant_mode 2."""

    def rounded(row: Row) -> Row:
        value = torch.from_numpy(row).to(dtype)[None]
        if comm_quant_mode == 2:
            value = restore_blocks(*quantize_blocks(value))
        sent: Row = value[0].float().numpy()
        return sent

    return rounded


def _sum_by_server(
    given: RankInput,
    token: int,
    returned: dict[tuple[int, int], Row],
    hidden: int,
    servers: dict[tuple[int, int], int],
    rounding: Callable[[Row], Row],
) -> Row:
    """Return the sum of a token by algorithm hierarchy; ``servers``: the server of each (token, k).

    Each server sums its rows in fp32, from 0, k ascending, and rounds the sum. The token's rank adds these in fp32,
    from 0, servers ascending; then its special experts, k ascending; then the shared expert's row.
    """
    acc = np.zeros(hidden, np.float32)
    for server in sorted({servers[pair] for pair in servers if pair in returned}):
        rows = {pair: returned[pair] for pair in returned if servers.get(pair) == server}
        with np.errstate(all="ignore"):
            acc = acc + rounding(_add_pairs(given, token, rows, np.zeros(hidden, np.float32)))
    others = {pair: row for pair, row in returned.items() if pair not in servers}
    return _add_shared(given, token, _add_pairs(given, token, others, acc))


def _special_rows(given: RankInput, experts: int, special: SpecialExperts) -> dict[tuple[int, int], Row]:
    """Return the row of every active (token, k) of a copy or const expert."""
    rows = {}
    for token, k, expert in active_pairs(given):
        if not experts <= expert < experts + special.total:
            continue
        kind, place = special.kind(expert, experts)
        if kind == "zero":
            continue
        if given.ori_x is None:
            raise ValueError(f"expert {expert} is a copy or const expert, ori_x is None; pass ori_x (BS, H)")
        row = given.ori_x[token].detach().float().numpy()
        if kind == "const":
            tensors = (given.const_expert_alpha_1, given.const_expert_alpha_2, given.const_expert_v)
            alphas = [tensor[place].detach().float().numpy() for tensor in tensors if tensor is not None]
            if len(alphas) != 3:
                raise ValueError(f"id {expert} needs const_expert_alpha_1, const_expert_alpha_2 and const_expert_v")
            row = const_row(row, *alphas)
        rows[token, k] = row
    return rows


def const_row(row: Row, alpha_1: Row, alpha_2: Row, v: Row) -> Row:
    """Return the output of a const expert for a row (H,) fp32: a1 * row + a2 * v, every product rounded to fp32.

    alpha_1, alpha_2: the scalars a1 and a2, or vectors (H,), from which they are computed:
    (a1, a2) = softmax(alpha_1 . row, alpha_2 . row), in fp32, in the order of ``_dot``. v: (H,).
    """
    with np.errstate(all="ignore"):
        if alpha_1.ndim == 0:
            a1, a2 = np.float32(alpha_1), np.float32(alpha_2)
        else:
            d1, d2 = _dot(alpha_1, row), _dot(alpha_2, row)
            a1, a2 = _share(d1, d2), _share(d2, d1)
        mixed: Row = a1 * row + a2 * v
    return mixed


_DOT_LANES = 256


def _dot(a: Row, b: Row) -> np.float32:
    """The sum of a * b in fp32: element i into lane i mod 256 by ascending i; then the second half of the lanes is
    added to the first, down to 8, which are added one by one."""
    products = np.zeros(-(-a.size // _DOT_LANES) * _DOT_LANES, np.float32)
    products[: a.size] = a * b
    lanes = np.zeros(_DOT_LANES, np.float32)
    for chunk in products.reshape(-1, _DOT_LANES):
        lanes = lanes + chunk
    while lanes.size > 8:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    total = lanes[0]
    for lane in lanes[1:]:
        total = total + lane
    found: np.float32 = np.float32(total)
    return found


def _share(mine: np.float32, other: np.float32) -> np.float32:
    """Return the softmax of the first of two numbers: 1 / (1 + exp(other - mine))."""
    power = np.float32(np.exp(np.float64(other - mine)))
    share: np.float32 = np.float32(1) / (np.float32(1) + power)
    return share


def dense(
    inputs: Sequence[RankInput],
    expert_fn: Callable[[int, torch.Tensor], torch.Tensor],
    moe_expert_num: int,
    special: SpecialExperts = NO_SPECIAL,
) -> list[torch.Tensor]:
    """Compute the layer token by token, without dispatch and combine; return (BS, H) in x's dtype for every rank.

    Sums are in combine's order. The code shares nothing with dispatch and combine, so that each checks the other.
    Const experts are computed by torch, whose dot products add in another order.

    Args:
        inputs: tensors by rank, with expert_scales.
        expert_fn: returns the output (H,) of an expert, given its id and a token's row (H,).
        moe_expert_num: E.
        special: numbers of zero, copy and const experts.

    Raises:
        ValueError: an active id is out of range, or a rank has no expert_scales.
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
                if not 0 <= expert < moe_expert_num + special.total:
                    last = moe_expert_num + special.total - 1
                    raise ValueError(f"token {token}, k {k}: id is {expert}; it must be in -1..{last}")
                if given.expert_scales is None:
                    raise ValueError("expert_scales is None; dense needs (BS, K) weights")
                if expert < moe_expert_num:
                    y = expert_fn(expert, given.x[token]).float()
                else:
                    made = _dense_special(given, token, *special.kind(expert, moe_expert_num))
                    if made is None:
                        continue
                    y = made
                total = total.add(y.mul(given.expert_scales[token, k]))
            shared = given.shared_row(token)
            out[token] = (total if shared is None else total.add(shared)).to(out.dtype)
        outputs.append(out)
    return outputs


def _dense_special(given: RankInput, token: int, kind: str, place: int) -> torch.Tensor | None:
    """Return the row of a copy or const expert, or None for a zero expert."""
    if kind == "zero":
        return None
    assert given.ori_x is not None
    row = given.ori_x[token].float()
    if kind == "copy":
        return row
    assert given.const_expert_alpha_1 is not None and given.const_expert_alpha_2 is not None
    assert given.const_expert_v is not None
    factors = torch.stack([given.const_expert_alpha_1[place].float(), given.const_expert_alpha_2[place].float()])
    if factors.dim() == 2:
        factors = (factors @ row).softmax(0)
    return factors[0] * row + factors[1] * given.const_expert_v[place].float()


# ---- bytes of rows that each rank must move: what the counters of a run are compared with


def predict_traffic(
    inputs: Sequence[RankInput],
    *,
    moe_expert_num: int,
    H: int,
    dtype: torch.dtype,
    quant_mode: int,
    contract: str,
    global_bs: int = 0,
    weights: bool = False,
    algorithm: str = "window",
    cores: int = 1,
    comm_quant_mode: int = 0,
    special: SpecialExperts = NO_SPECIAL,
) -> list[Traffic]:
    """Return the bytes that each rank moves in one dispatch and one combine of x (BS, H).

    A row of dispatch has its elements rounded up to 32 bytes, and 32 bytes for its scale when quantized.
    Window: 32 bytes more for its source index in V2, and 32 for its weight if dispatch takes weights.
    Local rows go through the window too; in V2 they return with a trailer of 32 bytes. Direct: a token's row is written
    once (with smooth scales once per expert) and read once for each expert, with 8 or more cores once by each owner.
    Each (token, k) has 4 bytes in a list and 4 for its weight; combine does not move local rows. With comm_quant_mode 2
    rows return in ``quantized_row_bytes``, in direct also local ones. Rows of special experts are not in windows.

    Args:
        inputs: tensors by rank.
        moe_expert_num: E.
        global_bs: 0 (equal batches) or W * maxBS.
        H, dtype: row size and dtype of x.
        quant_mode, comm_quant_mode: 0 or 2, for int8 rows in dispatch and in combine.
        contract: "v1" or "v2". weights: dispatch takes expert_scales. cores: AIV cores per rank.
        algorithm: "window" or "direct". special: numbers of zero, copy and const experts.

    Raises:
        ValueError: contract, quant_mode or algorithm has another value. FaultyRouting: as for `dispatch`.
    """
    if contract not in ("v1", "v2") or quant_mode not in (0, 2) or algorithm not in ("window", "direct"):
        values = f"contract {contract!r}, quant_mode {quant_mode}, algorithm {algorithm!r}"
        raise ValueError(f'{values}: need "v1" or "v2", 0 or 2, "window" or "direct", respectively')
    group = require_sound(inputs, moe_expert_num, global_bs, special)
    experts = group.moe_experts
    out_bytes = H * (1 if quant_mode else dtype.itemsize)
    stride = _align32(out_bytes) + 32 * (quant_mode != 0)
    if algorithm == "window":
        stride += 32 * ((contract == "v2") + weights)
    quantized = comm_quant_mode == 2
    back, read_back = quantized_row_bytes(H) if quantized else (_align32(H * dtype.itemsize), H * dtype.itemsize)
    routed = [routed_pairs(given, experts) for given in inputs]
    pairs = [[(token, expert // group.local_experts) for token, _, expert in one] for one in routed]
    moved = []
    for rank, given in enumerate(inputs):
        sent, received = len(pairs[rank]), sum(owner == rank for pair in pairs for _, owner in pair)
        stays = sum(owner == rank for _, owner in pairs[rank])
        if algorithm == "window":
            mark, k = 32 * (contract == "v2"), given.expert_ids.shape[1]
            marks = mark * given.expert_ids.numel()
            rows = (received * out_bytes, received * (back + mark), sent * read_back + marks)
            slack = mark * k * cores  # each core that shares a token reads its trailers
            moved.append(Traffic(sent * stride, received * stride, *rows, combine_window_read_slack=slack))
            continue
        smooth = given.scales is not None
        published = sent if smooth else len({token for token, _ in pairs[rank]})
        written = published * stride + 4 * sent + 4 * given.expert_ids.numel() * weights
        shares = cores >= _MANY_CORES and not smooth and group.local_experts > 1 and given.expert_ids.shape[1] > 1
        taken = sum(len({token for token, owner in pair if owner == rank}) for pair in pairs) if shares else received
        read = taken * stride + (4 + 8 * weights) * received
        returned, fetched = (received, sent) if quantized else (received - stays, sent - stays)
        rows = (received * out_bytes, returned * (back if quantized else read_back), fetched * read_back)
        padded = received + 14 * len(inputs) * group.local_experts  # a list is read in whole blocks of 8 entries
        again = shares or group.local_experts >= _MANY_EXPERTS or padded > _LIST_ENTRIES
        moved.append(Traffic(written, read, *rows, (4 + 8 * weights) * received * cores * again))
    return moved


def predict_crossings(
    inputs: Sequence[RankInput],
    *,
    moe_expert_num: int,
    ranks_per_server: int,
    hidden: int,
    dtype: torch.dtype,
    quant_mode: int = 0,
    comm_quant_mode: int = 0,
) -> list[tuple[int, int]]:
    """Return by rank the bytes that it sends to other servers with comm_alg "hierarchy": (in dispatch, in combine).

    They are whole 32-byte blocks of an item; kernels may write less.

    Dispatch: a token's row once for each other server with one of its experts, with 32 bytes for its source index, and
    K ids, row numbers and weights of 4 bytes, each rounded up to 32 bytes. Combine: one sum for each such row that
    ranks with the same local rank on other servers have sent.

    Args:
        inputs: tensors by rank.
        moe_expert_num: E.
        ranks_per_server: ranks per server, a divisor of W.
        hidden, dtype: H and dtype of x.
        quant_mode, comm_quant_mode: 0 or 2, for int8 rows in dispatch and int8 sums in combine.
    """
    world, of_server = len(inputs), moe_expert_num // len(inputs) * ranks_per_server
    crossing = [[0] * (world // ranks_per_server) for _ in inputs]  # by rank and server
    for rank, given in enumerate(inputs):
        pairs = {(token, expert // of_server) for token, _, expert in routed_pairs(given, moe_expert_num)}
        for _, server in pairs:
            crossing[rank][server] += server != rank // ranks_per_server
    topk = int(inputs[0].expert_ids.shape[1])
    row = _align32(hidden * (1 if quant_mode else dtype.itemsize)) + 32 * (quant_mode != 0)
    record = row + 32 + 3 * _align32(4 * topk)
    back = quantized_row_bytes(hidden)[0] if comm_quant_mode == 2 else _align32(hidden * dtype.itemsize)
    sums = [
        sum(
            crossing[peer][rank // ranks_per_server] for peer in range(rank % ranks_per_server, world, ranks_per_server)
        )
        for rank in range(world)
    ]
    return [(record * sum(rows), back * sent) for rows, sent in zip(crossing, sums, strict=True)]


_MANY_CORES = 8  # minimum for cores to share the rows of several experts
_MANY_EXPERTS = 8  # of a rank; minimum for parts of lists to be read again
_LIST_ENTRIES = 512  # of a core; more are read again too


def _align32(count: int) -> int:
    return (count + 31) // 32 * 32
