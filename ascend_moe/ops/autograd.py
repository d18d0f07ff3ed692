"""Gradients of dispatch and combine: each one's backward calls the other.

A combine without weights adds the gradients of a token's rows; a dispatch sends the gradient of a token's sum to its
rows. So a backward communicates: every rank must run the same backward, with the same tensors requiring grad. Forward
saves the routing of the call; combine also saves its rows if expert_scales require grad.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import comm
from .._tensors import without_autocast
from ..call import need_exact_rows
from ..errors import AscendMoeError, WindowTooSmall, need, need_dims, need_one_of, need_shape
from . import calls, registration

INT8_GRADIENTS = ("refuse", "straight_through")
_DISPATCH, _COMBINE = "npu_moe_distribute_dispatch", "npu_moe_distribute_combine"
# Arguments common to dispatch and combine; V1 has no comm_alg.
_COMMON = (
    "group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num", "group_tp", "tp_world_size", "tp_rank_id",
    "expert_shard_type", "shared_expert_num", "shared_expert_rank_num", "global_bs", "comm_alg",
)  # fmt: skip
# Combine's tensors of copy and const experts.
_SPECIAL_TENSORS = ("ori_x", "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")
_NARROW = 8  # fp32 columns of the narrowest row: rows are multiples of 32 bytes
_WIDEST = 16384  # elements of a row

_int8_gradient = "refuse"


def set_int8_gradient(mode: str) -> None:
    """Select the backward of a dispatch with quant_mode 2, for this process.

    Args:
        mode: "refuse" (default): the backward raises AscendMoeError. "straight_through": x gets the gradient of the
            rows returned by ``dequantize_rows``, as if nothing had been rounded.

    Raises:
        ArgumentError: ``mode`` is neither.
    """
    global _int8_gradient
    need_one_of("mode", mode, INT8_GRADIENTS)
    _int8_gradient = mode


def dequantize_rows(expand_x: Tensor, dynamic_scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert int8 rows of a dispatch with quant_mode 2 to floats; `set_int8_gradient` selects the gradient.

    Args:
        expand_x: ``(A, H)`` int8, from dispatch.
        dynamic_scales: ``(A,)`` float32, the tensor returned by the same dispatch.
        dtype: dtype of the result.

    Returns:
        ``(A, H)``: codes times the row's scale, in fp32, rounded once.

    Raises:
        ArgumentError: expand_x is not ``(A, H)`` int8, or dynamic_scales does not have one scale per row.
    """
    need_dims("expand_x", expand_x, 2, dtypes=(torch.int8,))
    need_shape("dynamic_scales", dynamic_scales, tuple(expand_x.shape[:1]))
    rows: Tensor = _Dequantize.apply(expand_x, dynamic_scales, dtype)  # type: ignore[no-untyped-call]
    return rows


class _Dequantize(torch.autograd.Function):
    """torch has no gradients for integer codes: the rows' gradient goes to the node of their scales."""

    @staticmethod
    def forward(ctx: Any, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.node = scales.grad_fn
        return (codes.float() * scales[:, None]).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not hasattr(ctx.node, "row_gradients"):
            raise AscendMoeError(
                "dequantize_rows: dynamic_scales were not returned by a dispatch: pass the tensor that it returned"
            )
        ctx.node.row_gradients.append(grad)
        return None, grad.new_zeros(grad.shape[0], dtype=torch.float32), None


def straight_through(node: Any, scales_gradient: Tensor | None, name: str) -> Tensor | None:
    """Return the gradient that `dequantize_rows` left at ``node``, the dispatch ``name`` in the graph; None: none.

    Raises:
        AscendMoeError: the mode is "refuse", or only dynamic_scales received a gradient (``scales_gradient``).
    """
    if _int8_gradient == "refuse":
        raise AscendMoeError(
            f"{name}: rows of quant_mode 2 are not differentiable: use quant_mode 0, or "
            'ascend_moe.set_int8_gradient("straight_through") and ascend_moe.dequantize_rows'
        )
    rows: list[Tensor] = node.row_gradients
    if scales_gradient is not None and not rows:
        raise AscendMoeError(
            f"{name}: only dynamic_scales have a gradient, the rows' is lost: convert the rows with "
            "ascend_moe.dequantize_rows(expand_x, dynamic_scales)"
        )
    total = sum(rows[1:], rows[0]) if rows else None
    rows.clear()
    return total


# ---- the functions


def _op(name: str) -> Any:
    return registration.OPERATORS[name].overload


def _below(op: Any, keys: Any, given: dict[str, Any]) -> Any:
    """Run the op below autograd."""
    args = [given[argument.name] for argument in op.arguments if not argument.kwarg_only]
    kwargs = {argument.name: given[argument.name] for argument in op.arguments if argument.kwarg_only}
    with torch._C._AutoDispatchBelowAutograd():
        return op.overload.redispatch(keys, *args, **kwargs)


def _on_several_servers(given: dict[str, Any]) -> bool:
    """Return whether the group in a call's arguments spans A2 servers; False for an unknown group, as tracers see."""
    group, world, rank = (given[name] for name in ("group_ep", "ep_world_size", "ep_rank_id"))
    return comm.size_and_rank(group) is not None and 0 < comm.ranks_per_server(group, world, rank) < world


def _need_one_level(given: dict[str, Any], wanted: Any) -> None:
    """Refuse hierarchy between servers: it sums with the weights sent by dispatch, which no backward can follow."""
    if any(wanted) and calls.is_two_level(given.get("comm_alg", "")):
        rule = 'is "hierarchy" between servers, which has no gradient: use "window" in both ops'
        need(not _on_several_servers(given), "comm_alg", rule)


class _Route:
    """The routing of a call, for the calls of its backward. Tensors are saved separately."""

    def __init__(self, op: Any, given: dict[str, Any]) -> None:
        self.contract = op.contract
        self.arguments = {name: given[name] for name in _COMMON if name in given}
        self.special = tuple(given.get(f"{kind}_expert_num", 0) for kind in ("zero", "copy", "const"))
        # Rows and gradients of special experts do not travel: the calls of a backward treat them as zero experts.
        if sum(self.special):
            self.arguments["zero_expert_num"] = sum(self.special)

    def dispatch(self, x: Tensor, ids: Tensor, mask: Tensor | None, weights: Tensor | None) -> Any:
        """Run the V2 op, whose rows equal V1's and which returns source indices."""
        return _op(f"{_DISPATCH}_v2")(x, ids, x_active_mask=mask, expert_scales=weights, **self.arguments)

    def add_rows(
        self, rows: Tensor, ids: Tensor, mask: Tensor | None, index: Tensor, counts: Tensor, contract: int
    ) -> Tensor:
        """Return for every token the sum of its rows; ``index``, ``counts``: of a dispatch with this contract."""
        name = _COMBINE if contract == 1 else f"{_COMBINE}_v2"
        nothing = torch.empty(0, dtype=torch.float32, device=rows.device)
        ignored = counts.new_zeros(self.arguments["tp_world_size"])
        options = {"tp_send_counts": ignored, "x_active_mask": mask, **self.arguments}
        if contract == 1:
            options.pop("comm_alg", None)
        added: Tensor = _op(name)(rows, ids, index, counts, nothing, **options)
        return added

    def has_source_indices(self, contract: int) -> bool:
        """Whether a dispatch of this contract returns the source index of each row: not V1, nor between A2 servers."""
        return contract == 2 and not _on_several_servers(self.arguments)

    def k_of_rows(self, ids: Tensor, mask: Tensor | None, index: Tensor, rows: int, contract: int) -> Tensor:
        """Return (rows,): the k of each row, sent in place of the weights if there are no source indices."""
        if self.has_source_indices(contract):
            return index[: 3 * rows].view(rows, 3)[:, 2]
        numbers = torch.arange(ids.shape[1], dtype=torch.float32, device=ids.device).expand(ids.shape)
        blank = torch.zeros(ids.shape[0], _NARROW, dtype=torch.float32, device=ids.device)
        ks: Tensor = self.dispatch(blank, ids, mask, numbers.contiguous())[6]
        return ks[:rows]


def _columns(values: Tensor, ks: Tensor, topk: int) -> Tensor:
    """Return (rows, K rounded up): each row's value in the column of its k, so that the sum over k keeps them apart."""
    width = -(-topk // _NARROW) * _NARROW
    column = torch.arange(width, device=ks.device)
    return torch.where(ks[:, None] == column, values.float()[:, None], 0.0)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, keys: Any, *values: Any) -> Any:
        given = dict(zip(op.names, values, strict=True))
        _need_one_level(given, ctx.needs_input_grad)
        outputs = _below(op, keys, given)
        wanted = dict(zip(op.names, ctx.needs_input_grad[2:], strict=True))
        ctx.want_x, ctx.want_weights = wanted["x"], wanted["expert_scales"]
        ctx.name, ctx.route = op.name, _Route(op, given)
        ctx.quantized, ctx.row_gradients = bool(given["quant_mode"]), []
        ctx.smooth, ctx.dtype = given["scales"] is not None, given["x"].dtype
        ctx.set_materialize_grads(False)
        constant = [] if ctx.want_x else [outputs[0]]
        constant += [] if ctx.want_x and ctx.quantized else [outputs[1]]
        constant += [] if ctx.want_weights else [outputs[6]]
        ctx.mark_non_differentiable(*constant, *outputs[2:6])
        ctx.save_for_backward(given["expert_ids"], given["x_active_mask"], outputs[2], outputs[4])
        ctx.shape = outputs[0].shape
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ids, mask, index, counts = ctx.saved_tensors
        route, rows, like = ctx.route, grads[0], {"device": ids.device}
        if ctx.quantized and ctx.want_x:
            rows = straight_through(ctx, grads[1], ctx.name)
            need(not ctx.smooth, "scales", 'have no gradient: call dispatch without them for "straight_through"')
        if rows is None:
            rows = torch.zeros(ctx.shape, dtype=ctx.dtype, **like)
        rows = rows.to(ctx.dtype)
        topk, gx, gw = ids.shape[1], None, None
        if ctx.want_weights:
            values = torch.zeros(ctx.shape[0], dtype=torch.float32, **like) if grads[6] is None else grads[6]
            ks = route.k_of_rows(ids, mask, index, ctx.shape[0], route.contract)
            columns = _columns(values, ks, topk)
            if ctx.want_x and ctx.dtype == torch.float32 and ctx.shape[1] + columns.shape[1] <= _WIDEST:
                # Wider rows may not fit into the windows; that is so on all ranks or on none.
                with contextlib.suppress(WindowTooSmall):
                    both = route.add_rows(torch.cat([rows, columns], 1), ids, mask, index, counts, route.contract)
                    gx, gw = both[:, : ctx.shape[1]], both[:, ctx.shape[1] :][:, :topk]
            if gw is None:
                gw = route.add_rows(columns, ids, mask, index, counts, route.contract)[:, :topk]
        if ctx.want_x and gx is None:
            gx = route.add_rows(rows, ids, mask, index, counts, route.contract)
        by_name = {"x": gx, "expert_scales": gw}
        return None, None, *(by_name.get(name) for name in registration.OPERATORS[ctx.name].names)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, keys: Any, *values: Any) -> Any:
        given = dict(zip(op.names, values, strict=True))
        _need_one_level(given, ctx.needs_input_grad)
        ctx.wanted = dict(zip(op.names, ctx.needs_input_grad[2:], strict=True))
        if ctx.wanted["expand_x"] or ctx.wanted["expert_scales"]:
            need_exact_rows(given)
        y = _below(op, keys, given)
        ctx.name, ctx.route = op.name, _Route(op, given)
        weights, rows, shared = (given[name] for name in ("expert_scales", "expand_x", "shared_expert_x"))
        # An empty tensor means no weights, unless there are no tokens either.
        ctx.weighted, ctx.shape = weights.shape == given["expert_ids"].shape, rows.shape
        ctx.shared_shape = None if shared is None else shared.shape
        index = given["assist_info_for_combine"] if op.contract == 2 else None
        ctx.save_for_backward(
            given["expert_ids"], given["x_active_mask"], index, given["ep_send_counts"], weights,
            rows if ctx.wanted["expert_scales"] and ctx.weighted else None,
            *(given.get(name) for name in _SPECIAL_TENSORS),
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> Any:
        every = ctx.saved_tensors  # read once: with activation checkpointing, reading recomputes
        saved, tensors = every[: -len(_SPECIAL_TENSORS)], every[-len(_SPECIAL_TENSORS) :]
        mask, grads = saved[1], dict[str, Tensor | None]()
        if ctx.wanted["shared_expert_x"]:
            active = None if mask is None else mask if mask.dim() == 1 else mask.any(1)
            shared = gy if active is None else torch.where(active[:, None], gy, 0.0)
            grads["shared_expert_x"] = shared.reshape(ctx.shared_shape)
        if ctx.wanted["expand_x"] or saved[-1] is not None:
            grads["expand_x"], grads["expert_scales"] = _rows_back(ctx, gy, *saved)
        if sum(ctx.route.special[1:]):
            weights = saved[4] if ctx.weighted else None
            ids, experts = saved[0], int(ctx.route.arguments["moe_expert_num"])
            active = True if mask is None else mask if mask.dim() == 2 else mask[:, None]
            kept = active & (ids >= experts)
            own = special_back(experts, ctx.route.special, gy.float(), ids, kept, weights, *tensors)
            for name, tensor in zip(_SPECIAL_TENSORS, tensors, strict=True):
                if tensor is not None and name in own and ctx.wanted[name]:
                    grads[name] = own[name].to(tensor.dtype)
            routed = grads.get("expert_scales")
            if routed is not None:
                grads["expert_scales"] = routed + own["expert_scales"]
        return None, None, *(grads.get(name) for name in registration.OPERATORS[ctx.name].names)


def _rows_back(
    ctx: Any,
    gy: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    index: Tensor | None,
    counts: Tensor,
    weights: Tensor,
    saved: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a combine's rows and weights."""
    route, count = ctx.route, ctx.shape[0]
    sent = route.dispatch(gy, ids, mask, weights if ctx.weighted else None)
    used = _used(route, counts)
    here = count if used is None else used
    rows, factors = _fit(sent[0], here), _fit(sent[6], here)
    order = None if used is None else _order(route, index, sent[2], used)
    if order is not None:
        rows, factors = rows[order], factors[order]
    gz = gw = None
    if ctx.wanted["expand_x"]:
        gz = (rows * factors[:, None]).to(rows.dtype) if ctx.weighted else rows
        if used is None:
            # Rows after the last are undefined, and anything times zero may be NaN.
            valid = torch.arange(count, device=rows.device) < counts[route.arguments["moe_expert_num"] - 1]
            gz = torch.where(valid[:, None], gz, torch.zeros_like(gz))
        gz = _fit(gz, count)
    if saved is not None:
        values = (rows.float() * saved[:here].float()).sum(1)
        if order is not None:
            values = torch.empty_like(values).index_copy_(0, order, values)
        values = _fit(values, sent[0].shape[0])
        ks = route.k_of_rows(ids, mask, sent[2], values.shape[0], 2)
        columns = _columns(values, ks, ids.shape[1])
        gw = route.add_rows(columns, ids, mask, sent[2], sent[4], 2)[:, : ids.shape[1]]
    return gz, gw


@without_autocast
def special_back(
    experts: int,
    special: tuple[int, int, int],
    gy: Tensor,
    ids: Tensor,
    active: Tensor,
    weights: Tensor | None,
    x: Tensor,
    alpha_1: Tensor | None,
    alpha_2: Tensor | None,
    v: Tensor | None,
) -> dict[str, Tensor]:
    """Return the fp32 gradients that copy and const experts contribute to a combine's arguments, by argument name.

    experts: E, the number of routed experts. special: numbers of zero, copy and const experts. gy: (BS, H), gradient of
    the result. active: (BS, K) bool. weights: (BS, K), None: ones. x: (BS, H) ori_x. The others: as combine's.
    """
    zero, copies, constants = special
    first = experts + zero
    w = torch.ones_like(ids, dtype=torch.float32) if weights is None else weights
    copied = active & (ids >= first) & (ids < first + copies)
    own = (active & (ids >= first)).any(1, keepdim=True)  # keeps 0 * NaN of other tokens out of the products
    x, gy = torch.where(own, x.float(), 0.0), torch.where(own, gy, 0.0)
    gain = (gy * x).sum(1)  # (BS,): gradient of a copy expert's weight
    factor = torch.where(copied, w, 0.0).sum(1)  # (BS,): factor of x
    grads = {"expert_scales": torch.where(copied, gain[:, None], 0.0)}
    if not constants or alpha_1 is None or alpha_2 is None or v is None:
        return grads | {"ori_x": gy * factor[:, None]}
    first += copies
    mixed = active & (ids >= first) & (ids < first + constants)
    place = torch.where(mixed, ids - first, 0).long()
    # (BS, C): the sum of a token's weights for each const expert.
    w_of = w.new_zeros(len(ids), constants).scatter_add_(1, place, torch.where(mixed, w, 0.0))
    products = [x @ alpha.float().T if alpha.dim() == 2 else alpha.float() for alpha in (alpha_1, alpha_2)]
    a1, a2 = (alpha.expand(w_of.shape) for alpha in products)
    if alpha_1.dim() == 2:
        a1, a2 = torch.sigmoid(a1 - a2), torch.sigmoid(a2 - a1)
    of_v = gy @ v.float().T  # (BS, C)
    picked = (a1 * gain[:, None] + a2 * of_v).gather(1, place)
    grads["expert_scales"] = grads["expert_scales"] + torch.where(mixed, picked, 0.0)
    grads["const_expert_v"] = (w_of * a2).T @ gy
    gx = gy * (factor + (w_of * a1).sum(1))[:, None]
    g1, g2 = w_of * gain[:, None], w_of * of_v
    if alpha_1.dim() == 1:
        alphas = g1.sum(0), g2.sum(0)
    else:
        g1 = a1 * a2 * (g1 - g2)  # gradient of the first product; the second's is its negative
        alphas = g1.T @ x, -(g1.T @ x)
        gx = gx + g1 @ (alpha_1.float() - alpha_2.float())
    return grads | {"ori_x": gx, "const_expert_alpha_1": alphas[0], "const_expert_alpha_2": alphas[1]}


def _used(route: _Route, counts: Tensor) -> int | None:
    """Return the number of received rows if the host may read it: not on an NPU, not while compiling."""
    if type(counts) is not Tensor or counts.device.type != "cpu":
        return None
    return int(counts[route.arguments["moe_expert_num"] - 1])


def _fit(rows: Tensor, count: int) -> Tensor:
    """Return the first ``count`` rows, padded with zeros."""
    if rows.shape[0] >= count:
        return rows[:count]
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])])


def _order(route: _Route, index: Tensor | None, sent: Tensor, used: int) -> Tensor | None:
    """Return (used,): the position of combine's rows in a dispatch's, or None if they are the same.

    Only the window algorithm accepts rows in another order than dispatch's.
    """
    if index is None or not route.has_source_indices(2):
        return None
    given, made = (words[: 3 * used].view(used, 3).long() for words in (index, sent))
    if torch.equal(given, made):
        return None
    given, made = ((source[:, 0] << 40) + (source[:, 1] << 8) + source[:, 2] for source in (given, made))
    order = torch.empty_like(given)
    order[given.argsort()] = made.argsort()
    return order


# ---- on the Autograd key


def _register(op: Any, function: Any) -> None:
    names = op.names

    def differentiate(keys: Any, *args: Any, **kwargs: Any) -> Any:
        below = keys & torch._C._after_autograd_keyset
        given = op.bind(args, kwargs)
        if not registration.wants_gradient(given.values()):
            return _below(op, below, given)
        return function.apply(op, below, *(given[name] for name in names))

    registration.LIBRARY.impl(op.name, differentiate, "Autograd", with_keyset=True)


for _name, _each in registration.OPERATORS.items():
    _register(_each, _Dispatch if _each.code == calls.OP_DISPATCH else _Combine)
