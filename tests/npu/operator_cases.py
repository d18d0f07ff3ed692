"""Cases of torch operators for the virtual NPU: each runs on the CPU and on npu:0 and must give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from vendor_calls import CALLS, Call

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
Tensor = torch.Tensor
One = Callable[[Tensor], Any]
Two = Callable[[Tensor, Tensor], Any]
Placed = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Case:
    """``run`` of ``inputs``; ``exact``: bit for bit, else within the rounding of the type."""

    name: str
    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    exact: bool = True


def cases() -> Iterator[Case]:
    """Every case, by unique name; none that torch refuses on the CPU: a type, a number for a tensor."""
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        x, y, places = values(dtype, 4, 10), values(dtype, 4, 10, seed=1), torch.tensor([2, 0, 1, 1])
        y[y == 0] = 1
        label = str(dtype).removeprefix("torch.")
        for name, run in dict(_elementwise(dtype)).items():
            for view, take in VIEWS.items():
                if torch_takes(run, take, x, y):
                    exact = not name.startswith("gelu")  # another way through memory rounds otherwise
                    yield Case(f"{name}-{view}-{label}", partial(viewed, run, take), (x, y), exact)
        if not dtype.is_floating_point:
            for name in (_WHOLE if dtype == torch.bool else f"{_WHOLE} {_ORDERED}").split():
                yield Case(f"{name}-{label}", (_ANYWHERE | _REDUCED)[name], (x,))
            for name, two in (_LOGIC if dtype == torch.bool else _LOGIC | _COUNTED).items():
                yield Case(f"{name}-{label}", two, (x, y))
            continue
        for name, one in (_ANYWHERE | _REDUCED).items():
            for view, take in VIEWS.items():
                if name in _ANYWHERE or view not in ("empty", "scalar"):
                    yield Case(f"{name}-{view}-{label}", partial(viewed, one, take), (x,))
        for name, placed in _PLACED.items():
            yield Case(f"{name}-{label}", placed, (x, y, places))
        # Half sums are accumulated in another order than the CPU's own kernel does.
        for name, two in _PRODUCTS.items():
            yield Case(f"{name}-{label}", two, (x, y), exact=dtype == torch.float32)
        if dtype == torch.float32:
            for name, two in (_PLAIN | _BACKWARD).items():
                yield Case(name, two, (x, y))


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)
    low = 0 if dtype == torch.uint8 else -9
    return torch.randint(low, 10, shape, generator=generator).to(dtype)


def difference(expected: list[Tensor], found: list[Tensor], exact: bool = True) -> str:
    """ "" when both are the same, bit for bit if ``exact``; else what differs first."""
    if len(expected) != len(found):
        return f"{len(found)} results for {len(expected)}"
    for number, (want, have) in enumerate(zip(expected, found, strict=True)):
        if want.dtype != have.dtype or want.shape != have.shape:
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (want, have)]
            return f"result {number} is {kinds[1]} for {kinds[0]}"
        tolerance = 0.0 if exact or not want.is_floating_point() else 2 * torch.finfo(want.dtype).eps
        same = torch.isclose(want.double(), have.double(), tolerance, tolerance, equal_nan=True)
        if not bool(same.all()):
            return f"result {number} is {have.flatten()[:8].tolist()} for {want.flatten()[:8].tolist()}"
    return ""


# How an input lies in memory. Both sides get the same base tensor and take the same view of it.
VIEWS: dict[str, One] = {
    "dense": lambda t: t,
    "strided": lambda t: t[:, 1::2],
    "transposed": lambda t: t[:3, :3].t(),
    "offset": lambda t: t[1:],
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[0, 0],
}


def viewed(run: Callable[..., Any], take: One, *tensors: Tensor) -> Any:
    """``run`` of views, and the whole tensors: an operator in place must leave the rest as it was."""
    copies = [tensor.clone() for tensor in tensors]
    found = run(*(take(copy) for copy in copies))
    return [*([found] if isinstance(found, Tensor) else found), *copies]


def torch_takes(run: Two, take: One, *tensors: Tensor) -> bool:
    try:
        viewed(run, take, *tensors)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


def _elementwise(dtype: torch.dtype) -> Iterator[tuple[str, Two]]:
    """Every function of the two lists; those with a star also in place."""
    for entry in _UNARY.split():
        name = entry.rstrip("*")
        function = getattr(torch if hasattr(torch, name) else functional, name)
        if dtype.is_floating_point or name.endswith("_not"):
            yield name, lambda x, y, run=function: run(x)
            yield f"{name}-positive", lambda x, y, run=function: run(x.abs() + 1)
            if entry.endswith("*"):
                yield f"{name}_", lambda x, y, method=f"{name}_": getattr(x, method)()
    numbers = (2, 2.5) if dtype.is_floating_point else (2,)
    for entry in _BINARY.split():
        name = entry.rstrip("*")
        function, bits = getattr(torch, name), name.startswith(("bitwise", "logical"))
        shift_of_bool = dtype == torch.bool and name.endswith("shift")
        if shift_of_bool or not (bits or dtype in (*FLOATS, torch.int32, torch.int64)):
            continue
        for number in numbers:
            yield f"{name}-{number}", lambda x, y, run=function, number=number: run(x, number)
            yield f"{name}-{number}-left", lambda x, y, run=function, number=number: run(number, y)
        yield name, lambda x, y, run=function: run(x, y)
        if entry.endswith("*"):
            yield f"{name}_", lambda x, y, method=f"{name}_": getattr(x, method)(y)
            yield f"{name}-2_", lambda x, y, method=f"{name}_": getattr(x, method)(2)


_UNARY = """
    abs neg sign exp* exp2* expm1* log* log2* log10* log1p* sqrt* rsqrt* reciprocal* sigmoid* silu relu*
    tanh* erf* sin* cos* floor* ceil* round trunc gelu isfinite isposinf isneginf signbit logical_not*
    bitwise_not isnan isinf square softplus clone zeros_like ones_like
"""
_BINARY = """
    mul* div* floor_divide* remainder* fmod pow* atan2* maximum minimum clamp_min* clamp_max* eq* ne*
    lt* le* gt* ge* logical_and* logical_or* logical_xor bitwise_and* bitwise_or bitwise_xor*
    bitwise_left_shift bitwise_right_shift clamp add* sub* rsub
"""


_ANYWHERE: dict[str, One] = {
    "sum": lambda a: a.sum(),
    "mean": lambda a: a.mean(),
    "mean-last": lambda a: a.mean(-1, keepdim=True),
    "sum-last": lambda a: a.sum(-1),
    "any": lambda a: (a > 0).any(),
    "all": lambda a: (a > 0).all(),
    "softmax": lambda a: a.softmax(-1),
    "softmax-float": lambda a: torch.softmax(a, -1, dtype=torch.float32),
    "log_softmax": lambda a: a.log_softmax(-1),
    "cumsum": lambda a: a.cumsum(-1),
    "to-int": lambda a: a.to(torch.int32),
    "to-bool": lambda a: a.bool(),
    "to-bf16": lambda a: a.to(torch.bfloat16),
    "to-fp32": lambda a: a.float(),
    "contiguous": lambda a: a.contiguous(),
    "nonzero": lambda a: (a > 0).nonzero(),
    "masked_fill": lambda a: a.masked_fill(a > 0, -1.0),
    "masked_select": lambda a: a.masked_select(a > 0),
    "full_like": lambda a: torch.full_like(a, 3),
    "fill_": lambda a: a.clone().fill_(2),
}

_REDUCED: dict[str, One] = {
    "max": torch.max,
    "min": torch.min,
    "max-dim": lambda a: a.max(1),
    "min-dim": lambda a: a.min(0),
    "amax": lambda a: a.amax(-1, keepdim=True),
    "amin": lambda a: a.amin((0, 1)),
    "aminmax": lambda a: torch.aminmax(a),
    "argmax": lambda a: a.argmax(-1),
    "argmin": lambda a: a.argmin(),
    "var": lambda a: a.var(-1),
    "norm": lambda a: a.norm(),
    "logsumexp": lambda a: a.logsumexp(-1),
    "prod": lambda a: a.prod(-1),
    "topk": lambda a: a.topk(2),
    "topk-smallest": lambda a: a.topk(2, dim=0, largest=False),
    "sort": lambda a: a.sort(stable=True),
    "sort-descending": lambda a: a.sort(dim=0, descending=True, stable=True),
    "argsort": lambda a: a.argsort(stable=True),
    "unique": lambda a: torch.unique(a),
    "count_nonzero": lambda a: (a > 0).count_nonzero(),
    "mask-index": lambda a: a[a > 0],
    "layer_norm": lambda a: functional.layer_norm(a, a.shape[-1:]),
}


def _set(t: Tensor, where: Any, value: Any) -> Tensor:
    t = t.clone()
    t[where] = value
    return t


def _columns(i: Tensor) -> Tensor:
    return torch.stack([i, i + 1], 1)


_PLACED: dict[str, Placed] = {
    "index-rows": lambda x, y, i: x[i],
    "index-pairs": lambda x, y, i: x[i, i + 1],
    "index-columns": lambda x, y, i: x[:, i],
    "index-int32": lambda x, y, i: x[i.int()],
    "index-none": lambda x, y, i: x[i[:0]],
    "index_select": lambda x, y, i: x.index_select(0, i),
    "index-put": lambda x, y, i: _set(x, i[:2], 1.5),
    "index-put-mask": lambda x, y, i: _set(x, x > 0, 9.0),
    "index-put-slice": lambda x, y, i: _set(x, (slice(1, 3), slice(2, 6)), 7.0),
    "index-put-add": lambda x, y, i: x.clone().index_put_((i,), y, accumulate=True),
    "index-copy": lambda x, y, i: x.clone().index_copy_(0, i[:3], y[:3]),
    "index-add": lambda x, y, i: x.clone().index_add_(0, i, y),
    "index-fill": lambda x, y, i: x.index_fill(0, i, 3.0),
    "gather": lambda x, y, i: x.gather(1, _columns(i)),
    "scatter": lambda x, y, i: x.scatter(1, _columns(i), y[:, :2]),
    "scatter-value_": lambda x, y, i: x.clone().scatter_(1, _columns(i), 2.0),
    "scatter-add": lambda x, y, i: x.clone().scatter_add_(1, _columns(i), y[:, :2]),
    "embedding": lambda x, y, i: functional.embedding(i, x),
    "cat": lambda x, y, i: torch.cat([x, y.t().contiguous().t(), x[:0]]),
    "cat-columns": lambda x, y, i: torch.cat([x, y[:, ::2], x[:, :0]], 1),
    "stack": lambda x, y, i: torch.stack([x, y], 1),
    "flip": lambda x, y, i: x.flip(0),
    "roll": lambda x, y, i: x.roll(1, 0),
    "repeat": lambda x, y, i: x.repeat(2, 3),
    "repeat_interleave": lambda x, y, i: x.repeat_interleave(2, 0),
    "repeat_interleave-counts": lambda x, y, i: x.repeat_interleave(i, 0),
    "tril": lambda x, y, i: torch.tril(x),
    "triu": lambda x, y, i: torch.triu(x, 1),
    "triu_": lambda x, y, i: x.clone().triu_(1),
    "zero_": lambda x, y, i: x.clone().zero_(),
    "expand": lambda x, y, i: x[:1].expand(4, 10).contiguous(),
    "permute": lambda x, y, i: x.reshape(2, 2, 10).permute(2, 0, 1).contiguous(),
    "split": lambda x, y, i: x.split(5, 1)[1] * 2,
    "copy-broadcast": lambda x, y, i: torch.zeros_like(x).copy_(y[0]),
    "copy-cast": lambda x, y, i: torch.zeros_like(x, dtype=torch.float32).copy_(y),
    "searchsorted": lambda x, y, i: torch.searchsorted(x.sort(-1).values, y),
    "histc": lambda x, y, i: torch.histc(x.float(), 5, -2, 2),
}

_PRODUCTS: dict[str, Two] = {
    "matmul": lambda x, y: x @ y.t(),
    "mm": lambda x, y: torch.mm(x.t(), y),
    "bmm": lambda x, y: torch.bmm(x.reshape(2, 2, 10), y.reshape(2, 10, 2)),
    "linear": lambda x, y: functional.linear(x, y),
    "linear-bias": lambda x, y: functional.linear(x, y, x[:, 0]),
    "addmm": lambda x, y: torch.addmm(x[:, :4], x, y.t(), beta=0.5, alpha=2),
    "baddbmm": lambda x, y: torch.baddbmm(
        x[:, :4].reshape(2, 2, 4), x.reshape(2, 2, 10), y.t().expand(2, 10, 4)
    ),
    "mv": lambda x, y: torch.mv(x, y[0]),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "matmul-empty": lambda x, y: x[:0] @ y.t(),
    "matmul-no-columns": lambda x, y: x[:, :0] @ y[:, :0].t(),
    "rms_norm": lambda x, y: functional.rms_norm(x, (10,), y[0]),
    "addmv": lambda x, y: torch.addmv(x[:, 0], x, y[0], beta=0.5, alpha=2),
    "addmm_": lambda x, y: x[:, :4].clone().addmm_(x, y.t(), beta=2),
}

# Seldom called: forms of one type.
_PLAIN: dict[str, Two] = {
    "div-trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div-floor-number": lambda x, y: torch.div(x, 2, rounding_mode="floor"),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp-tensor": lambda x, y: torch.lerp(x, y, x),
    "where": lambda x, y: torch.where(x > y, x, y),
    "isclose": lambda x, y: torch.isclose(x, x + 1e-9),
    "equal": lambda x, y: torch.tensor([torch.equal(x, y), torch.equal(x, x)]),
    "clamp-tensor": lambda x, y: torch.clamp(x, min=y),
    "nan_to_num": lambda x, y: torch.nan_to_num(x / torch.zeros_like(x)),
    "round-decimals": lambda x, y: torch.round(x, decimals=1),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "std": lambda x, y: x.std(0, correction=0),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "addcdiv_": lambda x, y: x.clone().addcdiv_(x, y),
    "addcmul_": lambda x, y: x.clone().addcmul_(x, y, value=2),
    "lerp_": lambda x, y: x.clone().lerp_(y, 0.25),
    "lerp-tensor_": lambda x, y: x.clone().lerp_(y, y),
    "div-trunc_": lambda x, y: x.clone().div_(y, rounding_mode="trunc"),
    "div-floor-number_": lambda x, y: x.clone().div_(3, rounding_mode="floor"),
    "nan_to_num_": lambda x, y: (x / torch.zeros_like(x)).nan_to_num_(1.0, 2.0, 3.0),
    "round-decimals_": lambda x, y: x.clone().round_(decimals=1),
    "isposinf": lambda x, y: torch.isposinf(x / torch.zeros_like(x)),
    "isneginf": lambda x, y: torch.isneginf(x / torch.zeros_like(x)),
    "tril_": lambda x, y: x.clone().tril_(-1),
    "fill_diagonal_": lambda x, y: x.clone().fill_diagonal_(3.0),
    "fill-tensor_": lambda x, y: x.clone().fill_(y[0, 0]),
    "masked_fill-tensor_": lambda x, y: x.clone().masked_fill_(x > 0, y[0, 0]),
    "scatter_": lambda x, y: x.clone().scatter_(0, torch.zeros_like(x, dtype=torch.int64)[:1], y),
    "scatter-value": lambda x, y: x.scatter(0, torch.zeros_like(x, dtype=torch.int64)[:1], 2.0),
    "index_fill_": lambda x, y: x.clone().index_fill_(0, torch.tensor([1, 3], device=x.device), 2.0),
    "take": lambda x, y: torch.take(x, torch.tensor([0, 13, 39], device=x.device)),
    "repeat_interleave-flat": lambda x, y: x.repeat_interleave(3),
    "repeat_interleave-flat-counts": lambda x, y: x[0].repeat_interleave(torch.arange(10, device=x.device)),
    "repeat_interleave-indices": lambda x, y: torch.repeat_interleave(
        torch.tensor([2, 0, 3], device=x.device)
    ),
    "range": lambda x, y: torch.range(1, 4, device=x.device),
    "cumprod": lambda x, y: x.cumprod(-1),
    "prod": lambda x, y: (x * 0.5).prod(),
    "var_mean": lambda x, y: torch.var_mean(x, 1),
    "median": lambda x, y: x.median(),
    "median-dim": lambda x, y: x.median(1),
    "kthvalue": lambda x, y: x.kthvalue(2),
    "arange": lambda x, y: torch.arange(7, device=x.device),
    "linspace": lambda x, y: torch.linspace(0, 1, 5, device=x.device),
    "eye": lambda x, y: torch.eye(4, device=x.device),
    "zeros-int8": lambda x, y: torch.zeros(3, dtype=torch.int8, device=x.device),
    "full-int64": lambda x, y: torch.full((3,), -1, dtype=torch.int64, device=x.device),
    "tensor": lambda x, y: torch.tensor([[1, 2], [3, 4]], device=x.device),
}


def _gradient(function: One) -> Two:
    def run(x: Tensor, slope: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, slope)[0]

    return run


_BACKWARD: dict[str, Two] = {
    "sigmoid-backward": _gradient(torch.sigmoid),
    "tanh-backward": _gradient(torch.tanh),
    "relu-backward": _gradient(torch.relu),
    "silu-backward": _gradient(functional.silu),
    "gelu-backward": _gradient(functional.gelu),
    "softmax-backward": _gradient(lambda x: x.softmax(-1)),
    "log_softmax-backward": _gradient(lambda x: x.log_softmax(-1)),
    "embedding-backward": _gradient(
        lambda x: functional.embedding(torch.tensor([1, 1, 0, 3], device=x.device), x)
    ),
}

# Of numbers without a fraction too.
_WHOLE, _ORDERED = "sum sum-last any all to-bool to-fp32 contiguous nonzero", "max min amax sort argmax"
_LOGIC: dict[str, Two] = {
    "integer-any": lambda x, y: x.any(1),
    "integer-cumsum": lambda x, y: x.cumsum(0),
    "integer-where": lambda x, y: torch.where(x > 0, x, y),
    "integer-cat": lambda x, y: torch.cat([x, y[:, ::2]], 1),
    "integer-index": lambda x, y: x[[0, 2]],
    "integer-to-half": lambda x, y: x.half(),
}

_COUNTED: dict[str, Two] = {
    "integer-clamp": lambda x, y: x.clamp(0, 3),
    "one_hot": lambda x, y: functional.one_hot(x.abs().long() % 7, 7),
    "bincount": lambda x, y: torch.bincount(x.abs().reshape(-1).long(), minlength=12),
    "bincount-weights": lambda x, y: torch.bincount(x.abs().reshape(-1).long(), y.reshape(-1).float()),
}


def calls() -> Iterator[Call]:
    """Of torch_npu's operators of MoE layers: those of the CPU's tests, and more of the arguments."""
    yield from CALLS
    rows, experts, hidden, wide = 10, 4, 16, 16
    counts = {
        "group_list": torch.tensor([3, 0, 5, 1]),
        "group_type": 0,
        "group_list_type": 1,
        "split_item": 2,
    }
    used = {0: 9}  # the last row belongs to nobody
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        x, w = values(dtype, rows, hidden), values(dtype, experts, hidden, wide)
        matmul, quant = "npu_grouped_matmul", "npu_dynamic_quant"
        pairs = {"group_list": torch.tensor([[2, 5], [0, 3], [3, 1], [1, 0]]), "group_list_type": 2}
        yield Call(f"pairs {label}", matmul, ([x], [w]), counts | pairs, used)
        transposed = w.transpose(1, 2).contiguous().transpose(1, 2)
        yield Call(f"transposed {label}", matmul, ([x], [transposed]), counts, used)
        yield Call(f"apart {label}", matmul, ([x], list(w)), counts, used)
        bias = values(torch.float32, experts, wide)
        yield Call(f"bias {label}", matmul, ([x], [w]), counts | {"bias": [bias]}, used)
        none = counts | {"group_list": torch.zeros(experts, dtype=torch.int64)}
        yield Call(f"no rows {label}", matmul, ([x], [w]), none, {0: 0})
        smooth, groups = values(dtype, 2, hidden).abs(), torch.tensor([4, 10], dtype=torch.int32)
        yield Call(f"groups {label}", quant, (x,), {"smooth_scales": smooth, "group_index": groups})
        yield Call(f"zeros {label}", quant, (torch.zeros(3, hidden, dtype=dtype),))
        static = {"quant_mode": 0, "quant_scale": values(torch.float32, hidden // 2).abs() + 0.1}
        yield Call(f"static {label}", "npu_dequant_swiglu_quant", (x,), static, {1: 0})
        clamped = {"quant_mode": 1, "activate_left": True, "swiglu_mode": 2, "clamp_limit": 1.5}
        clamped |= {"glu_alpha": 1.25, "glu_bias": 0.5}
        yield Call(f"clamped {label}", "npu_dequant_swiglu_quant", (x,), clamped)
        grouped = {"bias": values(dtype, 8), "k_group": 2, "group_count": 4, "group_select_mode": 1}
        grouped |= {"norm_type": 1, "out_flag": True, "routed_scaling_factor": 2.5, "eps": 1e-3}
        yield Call(f"groups {label}", "npu_moe_gating_top_k", (values(dtype, rows, 8), 2), grouped)
    # The one shape that torch_npu gives to an older entry.
    ids = torch.tensor([[5, 127], [0, 5], [64, 1]], dtype=torch.int32)
    older = {"expert_num": 128, "active_expert_range": [0, 128], "expert_tokens_num_type": 1}
    older |= {"expert_tokens_num_flag": True}
    yield Call("older", "npu_moe_init_routing_v2", (values(torch.float16, 3, 2048), ids), older, {3: 0})
