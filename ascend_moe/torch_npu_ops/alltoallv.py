"""torch_npu's all-to-all fused with a grouped matmul: ``npu_alltoallv_gmm`` and ``npu_gmm_alltoallv``.

The first sends rows to their experts and multiplies them, the second multiplies and sends rows back: each is the
other's backward. Off the NPU rows are sent by the process group's all-to-all; between the threads of a LocalCluster
by this package's dispatch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ascend_moe import comm
from ascend_moe.comm.place import Place
from ascend_moe.errors import need, need_dims, need_shape, need_unset
from ascend_moe.experts import npu_grouped_matmul
from ascend_moe.experts.products import float_matmul
from ascend_moe.native.torch_npu import npu_operator
from ascend_moe.ops.collectives import by_expert, exchange
from ascend_moe.ops.registration import wants_gradient

P = ParamSpec("P")
R = TypeVar("R")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_LEAVES = ("gmm_x", "gmm_weight", "mm_x", "mm_weight")


# ---- arguments


def read_counts(name: str, given: dict[str, Any]) -> list[int]:
    """Return the argument ``name``, "send_counts" or "recv_counts", as a list; ``{name}_tensor`` takes precedence."""
    if given[f"{name}_tensor"] is not None:
        name = f"{name}_tensor"
    counts = given[name]
    if isinstance(counts, torch.Tensor):
        need_dims(name, counts, 1, 2, dtypes=(torch.int64, torch.int32))
        counts = counts.reshape(-1).tolist()
    whole = all(isinstance(count, (int, torch.SymInt)) and not isinstance(count, bool) for count in counts)
    need(whole, name, "contains counts that are not int; give whole numbers of rows")
    return list(counts)


def _table(name: str, counts: list[int], world: int, experts: int) -> torch.Tensor:
    rule = "has {} counts; need {}: {} experts of each of {} ranks"
    need(len(counts) == world * experts, name, rule, len(counts), world * experts, experts, world)
    need(min(counts) >= 0, name, "contains {}; a count is at least 0", min(counts))
    return torch.tensor(counts, device="cpu").view(world, experts)


def _check(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables (W, L) of send_counts and of recv_counts."""
    need_unset(comm_mode=given["comm_mode"])
    x, weight, world = given["gmm_x"], given["gmm_weight"], given["ep_world_size"]
    need_dims("gmm_x", x, 2, dtypes=_FLOATS)
    need_dims("gmm_weight", weight, 3, dtypes=(x.dtype,))
    need(weight.shape[0] >= 1, "gmm_weight", "has no experts; need (L, H, N), L at least 1")
    size = weight.shape[2 if given["trans_gmm_weight"] else 1]
    need(size == x.shape[1], "gmm_weight", "multiplies rows of {}, gmm_x has {} columns", size, x.shape[1])
    comm.need_name("hcom", given["hcom"])
    there, _ = comm.size_and_rank(given["hcom"]) or (0, None)
    rule = "is {!r}, which names no open group: use ascend_moe.comm_name(process_group)"
    need(there > 0, "hcom", rule, given["hcom"])
    need(world == there, "ep_world_size", "is {} but group {!r} has {} ranks: pass that", world, given["hcom"], there)
    names = ("send_counts", "recv_counts")
    sent, came = (_table(name, read_counts(name, given), world, len(weight)) for name in names)
    rows = int(sent.sum())
    need(len(x) == rows, "gmm_x", "has {} rows, the sum of send_counts is {}; they must be equal", len(x), rows)
    return sent, came


def _multiply_shared(given: dict[str, Any]) -> torch.Tensor | None:
    """Return mm_x times mm_weight, which involves no other rank, or None."""
    x, weight = given["mm_x"], given["mm_weight"]
    need((x is None) == (weight is None), "mm_weight", "and mm_x must be passed together")
    if x is None:
        return None
    need_dims("mm_x", x, 2, dtypes=_FLOATS)
    need_dims("mm_weight", weight, 2, dtypes=(x.dtype,))
    weight = weight.t() if given["trans_mm_weight"] else weight
    need_shape("mm_weight", weight, (x.shape[1], weight.shape[1]))
    return float_matmul(x, weight, None)


# ---- the rows


def _exchange(rows: torch.Tensor, send: list[int], receive: list[int], hcom: str) -> torch.Tensor:
    """All-to-all of rows over the process group of this name, or a LocalCluster's windows."""
    return exchange(rows, send, receive, comm.process_group(hcom) or Place.of(hcom, "hcom"))


def _multiply(x: torch.Tensor, given: dict[str, Any], table: torch.Tensor) -> torch.Tensor:
    weight = given["gmm_weight"]
    weight = weight.transpose(1, 2) if given["trans_gmm_weight"] else weight
    grouped: dict[str, Any] = {"group_type": 0, "group_list_type": 1, "split_item": 2}
    return npu_grouped_matmul([x], [weight], group_list=table.sum(0), **grouped)[0]


# ---- gradients


def with_gradients(name: str, given: dict[str, Any]) -> Any:
    """Call the operator ``name`` with the arguments ``given``, recorded by autograd, and return its results."""
    return _Fused.apply(name, given, *(given[leaf] for leaf in _LEAVES))  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    """Either operator. Its backward is the other one with the counts exchanged and the weight transposed."""

    @staticmethod
    def forward(ctx: Any, name: str, given: dict[str, Any], *leaves: torch.Tensor | None) -> Any:
        ctx.there, ctx.given = name == _THERE, dict(given)
        for counts in ("send_counts", "recv_counts"):
            ctx.given[counts] = read_counts(counts, given)
        more = {"permute_out_flag": True} if ctx.there else {}
        outputs = getattr(torch.ops.ascend_moe, name)(**given | more)
        # The rows that were multiplied: received or passed.
        ctx.save_for_backward(*leaves, outputs[2] if ctx.there else leaves[0])
        for leaf in _LEAVES:
            del ctx.given[leaf]
        ctx.set_materialize_grads(False)
        if not ctx.there:
            return outputs
        ctx.mark_non_differentiable(outputs[2])
        return *outputs[:2], outputs[2] if given["permute_out_flag"] else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: torch.Tensor | None, g_shared: torch.Tensor | None, *_: Any) -> Any:
        x, weight, mm_x, mm_weight, rows = ctx.saved_tensors
        given, transposed = ctx.given, ctx.given["trans_gmm_weight"]
        send, receive = given["send_counts"], given["recv_counts"]
        if gy is None:  # the other ranks still wait for this one
            gy = x.new_zeros(sum(receive), weight.shape[1 if transposed else 2])
        back = {"send_counts": receive, "recv_counts": send, "trans_gmm_weight": not transposed}
        back |= {name: given[name] for name in ("hcom", "ep_world_size")}
        back |= {} if ctx.there else {"permute_out_flag": True}
        made = getattr(torch.ops.ascend_moe, _BACK if ctx.there else _THERE)(gy, weight, **back)
        gw = None
        if ctx.needs_input_grad[3]:
            # Decided by the rows of this rank's experts, not by its tokens'.
            counts, grads = (receive, gy) if ctx.there else (send, made[2])
            groups = torch.tensor(counts, device=gy.device).view(given["ep_world_size"], -1).sum(0)
            grouped: dict[str, Any] = {"group_type": 2, "group_list_type": 1, "split_item": 3}
            # The operator, since a compiler traces this and the function would read the groups.
            gw = torch.ops.ascend_moe.npu_grouped_matmul([rows.t()], [grads], group_list=groups, **grouped)[0]
            gw = gw.transpose(1, 2) if transposed else gw
        g_mm_x = g_mm_weight = None
        if g_shared is not None:
            straight = not given["trans_mm_weight"]
            g_mm_x = float_matmul(g_shared, mm_weight.t() if straight else mm_weight, None)
            g_mm_weight = float_matmul(mm_x.t(), g_shared, None)
            g_mm_weight = g_mm_weight if straight else g_mm_weight.t()
        return None, None, made[0], gw, g_mm_x, g_mm_weight


def _differentiable(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: calls that want gradients use the registered operator."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises the right error
        bound.apply_defaults()
        given = bound.arguments
        if not wants_gradient(given[leaf] for leaf in _LEAVES):
            return function(*args, **kwargs)
        # The schema has lists here; a tensor instead is read, and a tensor in addition is read by the operator.
        lists = {name: read_counts(name, given | {f"{name}_tensor": None}) for name in ("send_counts", "recv_counts")}
        made: R = getattr(torch.ops.ascend_moe, function.__name__)(**given | lists)
        return made

    return run


# ---- the operators


@_differentiable
@npu_operator
def npu_alltoallv_gmm(
    gmm_x: torch.Tensor,
    gmm_weight: torch.Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_counts_tensor: torch.Tensor | None = None,
    recv_counts_tensor: torch.Tensor | None = None,
    mm_x: torch.Tensor | None = None,
    mm_weight: torch.Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    permute_out_flag: bool = False,
    comm_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send rows to the ranks of their experts, and multiply each by its expert's weight.

    W = ep_world_size ranks, L experts per rank. Differentiable: the backward is `npu_gmm_alltoallv`, on all ranks.

    Args:
        gmm_x: ``(sum(send_counts), H)`` bfloat16, float16 or float32, rows sorted by their expert's rank, then expert.
        gmm_weight: ``(L, H, N)``, gmm_x's dtype; ``(L, N, H)`` with trans_gmm_weight.
        hcom: name of a group: ``ascend_moe.comm_name``, a c10d group name, a LocalCluster's.
        ep_world_size: W.
        send_counts: W * L numbers of rows to send, by rank and expert of that rank; a list, or a tensor.
        recv_counts: W * L numbers of rows to receive, by source rank and expert of this rank.
        send_counts_tensor, recv_counts_tensor: the same as tensors, which take precedence.
        mm_x, mm_weight: ``(T, H2)`` and ``(H2, N2)`` of a shared expert, ``(N2, H2)`` with trans_mm_weight.
        permute_out_flag: also return the rows before the product.
        comm_mode: must be None.

    Returns:
        products ``(sum(recv_counts), N)``, sorted by expert, then source rank, then order there; mm_x @ mm_weight, None
        without mm_x; the received rows ``(sum(recv_counts), H)`` in that order, None without permute_out_flag.

    Raises:
        ArgumentError: an argument breaks one of these rules on this rank.

    Source: torch_npu ``npu_alltoallv_gmm``, which is called for NPU tensors.
    """
    given = dict(locals())
    sent, came = _check(given)
    shared: Any = _multiply_shared(given)  # before the others wait: its rules are this rank's
    rows = _exchange(gmm_x, sent.sum(1).tolist(), came.sum(1).tolist(), hcom)[by_expert(came)]
    return _multiply(rows, given, came), shared, rows if permute_out_flag else None  # type: ignore[return-value]


@_differentiable
@npu_operator
def npu_gmm_alltoallv(
    gmm_x: torch.Tensor,
    gmm_weight: torch.Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_counts_tensor: torch.Tensor | None = None,
    recv_counts_tensor: torch.Tensor | None = None,
    mm_x: torch.Tensor | None = None,
    mm_weight: torch.Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    comm_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply rows by their experts' weights, and send them back to the ranks of their tokens.

    It moves rows back that `npu_alltoallv_gmm` has moved. Differentiable: that is the backward, on all ranks.

    Args:
        gmm_x: ``(sum(send_counts), H)``, rows sorted by expert, then target rank: as `npu_alltoallv_gmm` returns them.
        send_counts: W * L numbers of rows to send, by target rank and expert of this rank.
        recv_counts: W * L numbers of rows to receive, by source rank and expert of that rank.
        gmm_weight, hcom, ep_world_size, send_counts_tensor, recv_counts_tensor, mm_x, mm_weight, trans_gmm_weight,
            trans_mm_weight, comm_mode: as for `npu_alltoallv_gmm`.

    Returns:
        ``(sum(recv_counts), N)`` rows sorted by the expert's rank, then expert; mm_x @ mm_weight, None without mm_x.

    Raises:
        ArgumentError: an argument breaks one of these rules on this rank.

    Source: torch_npu ``npu_gmm_alltoallv``, which is called for NPU tensors.
    """
    given = dict(locals())
    sent, came = _check(given)
    shared: Any = _multiply_shared(given)  # first: its rules are local
    product = _multiply(gmm_x, given, sent)
    rows = torch.empty_like(product).index_copy_(0, by_expert(sent), product)
    return _exchange(rows, sent.sum(1).tolist(), came.sum(1).tolist(), hcom), shared


_THERE, _BACK = npu_alltoallv_gmm.__name__, npu_gmm_alltoallv.__name__
