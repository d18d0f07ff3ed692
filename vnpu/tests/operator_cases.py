"""Cases of torch operators for the virtual NPU: each runs on the CPU and on npu:0 and must give the same."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
# torch's own samples; it imports expecttest for its own tests alone.
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, SampleInput  # noqa: E402

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.uint8, torch.int32, torch.int64, torch.bool)
Tensor = torch.Tensor
One = Callable[[Tensor], Any]
SAMPLES = 4  # of an operator and type


@dataclass(frozen=True)
class Case:
    """``run`` of a sample's input and arguments; ``exact``: bit for bit, else within the type's rounding."""

    name: str
    run: Callable[..., Any]
    sample: SampleInput
    exact: bool = True

    def results(self, device: str) -> list[Tensor]:
        """Returns the results of fresh copies of the tensors; and these, which only an operator in place may change."""
        given = self.sample.transform(lambda value: placed(value, device))
        kwargs = given.kwargs | ({"device": device} if "device" in given.kwargs else {})
        found = self.run(given.input, *given.args, **kwargs)
        if isinstance(found, (Tensor, bool)):
            found = [found if isinstance(found, Tensor) else torch.tensor(found, device=device)]
        return [*found, *(arg for arg in (given.input, *given.args) if isinstance(arg, Tensor))]


def problem_of(function: Callable[[Any], str], case: Any) -> str:
    """Return what ``function`` finds wrong with a case, or the error that it raises."""
    try:
        return function(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def placed(value: Any, device: str) -> Any:
    """A copy there of a tensor, or of a list of them, with the same strides: the operator sees them."""
    if isinstance(value, Tensor):
        moved = value.detach().clone(memory_format=torch.contiguous_format).to(device)
        if value.is_contiguous():
            return moved
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(moved)
    return [placed(part, device) for part in value] if isinstance(value, list) else value


# The names of torch's table of operators.
NAMES = """
    abs neg sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid nn.functional.silu
    nn.functional.relu tanh erf sin cos floor ceil round trunc isfinite isposinf isneginf signbit logical_not
    bitwise_not isnan isinf square nn.functional.softplus clone zeros_like ones_like mul div floor_divide
    remainder fmod pow atan2 maximum minimum clamp_min clamp_max eq ne lt le gt ge logical_and logical_or
    logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift clamp add sub rsub
    sum mean any all softmax log_softmax cumsum contiguous nonzero masked_fill masked_select full_like fill
    max min amax amin aminmax argmax argmin var logsumexp prod topk sort argsort count_nonzero
    nn.functional.layer_norm index_select index_put index_add index_fill gather scatter scatter_add cat stack
    flip roll repeat repeat_interleave tril triu expand permute split searchsorted histc matmul mm bmm
    nn.functional.linear addmm baddbmm mv dot addmv lerp where isclose equal nan_to_num addcmul std addcdiv
    take cumprod var_mean median kthvalue arange linspace eye nn.functional.one_hot bincount __getitem__
    unique linalg.qr nn.functional.logsigmoid
"""
# torch_npu gives those of whole numbers a type of its own.
FLOATS_ONLY = ("exp", "erf", "clamp", "clamp_min", "clamp_max")
# The CPU's own kernel may accumulate halves, and float32 with gaps in place, in an order of its own.
PRODUCTS = "matmul mm bmm nn.functional.linear addmm baddbmm mv dot addmv"


def cases() -> Iterator[Case]:
    """Every case, by unique name; none that torch refuses on the CPU."""
    names = NAMES.split()
    for info in op_db:
        for dtype in FLOATS if info.name in FLOATS_ONLY else DTYPES:
            if info.name not in names or dtype not in info.dtypes:
                continue
            label = f"{info.name}-{info.variant_test_name}-{str(dtype).removeprefix('torch.')}"
            product = info.name in PRODUCTS.split()
            for number, sample in enumerate(islice(info.sample_inputs("cpu", dtype), SAMPLES)):
                for way, run, given in _ways(info, sample):
                    exact = not product or (dtype == torch.float32 and not way.endswith("strided"))
                    case = Case(f"{label}-{number}-{way}", run, given, exact)
                    if _torch_takes(case):
                        yield case
    for dtype in FLOATS:
        x, y = values(dtype, 4, 10), values(dtype, 4, 10, seed=1)
        for name, more in (_MORE | (_BACKWARD if dtype == torch.float32 else {})).items():
            sample = SampleInput(x, args=(y, torch.tensor([2, 0, 1, 1])))
            yield Case(f"{name}-{dtype}", more, sample, exact=False)


def _ways(info: Any, sample: SampleInput) -> Iterator[tuple[str, Callable[..., Any], SampleInput]]:
    """Also strided, in place, with a number for a tensor."""
    forms = [("", info.op)] + ([("in place", info.inplace_variant)] if info.inplace_variant else [])
    if info.name == "fmod":
        forms.pop()  # torch_npu has no aclnn entry for it
    for name, run in forms:
        yield f"{name} dense", run, sample
        if isinstance(sample.input, Tensor):
            yield f"{name} strided", run, sample.noncontiguous()
        if isinstance(info, BinaryUfuncInfo):
            yield f"{name} by 2", lambda x, y, run=run, **kwargs: run(x, 2, **kwargs), sample
    if isinstance(info, BinaryUfuncInfo):
        yield "2 by", lambda x, y, **_: info.op(2, y), sample


def _torch_takes(case: Case) -> bool:
    try:
        case.results("cpu")
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


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
        steps = 16 if want.dtype == torch.float32 else 2
        tolerance = 0.0 if exact or not want.is_floating_point() else steps * torch.finfo(want.dtype).eps
        same = torch.isclose(want.double(), have.double(), tolerance, tolerance, equal_nan=True)
        if not bool(same.all()):
            return f"result {number} is {have.flatten()[:8].tolist()} for {want.flatten()[:8].tolist()}"
    return ""


def _fast_gelu(x: Tensor) -> Tensor:
    """As CANN defines it, without an exponential that overflows."""
    wide, size = x.float(), x.float().abs()
    return (wide * torch.exp(0.851 * (wide - size)) / (1 + torch.exp(-1.702 * size))).to(x.dtype)


# Forms that torch's samples lack: of x, y and rows of theirs.
_MORE: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "to-int": lambda x, y, i: x.to(torch.int32),
    "to-bool": lambda x, y, i: x.bool(),
    "to-bf16": lambda x, y, i: x.to(torch.bfloat16),
    "to-fp32": lambda x, y, i: x.float(),
    "copy-cast": lambda x, y, i: torch.zeros_like(x, dtype=torch.float32).copy_(y),
    "norm": lambda x, y, i: x.norm(),
    "gelu": lambda x, y, i: functional.gelu(x),
    "fast_gelu": lambda x, y, i: torch.ops.npu.npu_fast_gelu(x) if x.device.type == "npu" else _fast_gelu(x),
    "relu_": lambda x, y, i: x.relu_(),
    "clamp": lambda x, y, i: x.clamp(0, 3),
    "index-rows": lambda x, y, i: x[i.int()],
    "index-pairs": lambda x, y, i: x[i, i + 1],
    "index-columns": lambda x, y, i: x[:, i],
    "index-mask": lambda x, y, i: x[x > 0],
    "index_put-none": lambda x, y, i: x.index_put_((i.new_empty(0), i[:1]), y[0, 0]),
    "index_put-none-int64": lambda x, y, i: x.long().index_put_((i[:0], i[:1]), i[3]),
    "index-copy": lambda x, y, i: x.index_copy_(0, i[:3], y[:3]),
    "scatter-value": lambda x, y, i: x.scatter(0, i[None], 2.0),
    "scatter-value_": lambda x, y, i: x.scatter_(0, i[None], 2.0),
    "embedding": lambda x, y, i: functional.embedding(i, x),
    "cat": lambda x, y, i: torch.cat([x, y[:, ::2], x[:, :0]], 1),
    "repeat_interleave-counts": lambda x, y, i: x[:, 0].repeat_interleave(i),
    "repeat_interleave-rows": lambda x, y, i: x.repeat_interleave(i, 0),
    "repeat_interleave-indices": lambda x, y, i: torch.repeat_interleave(i),
    "relu_-view": lambda x, y, i: x[:, 1::2].relu_(),
    "mul_-view": lambda x, y, i: x[:, 1::2].mul_(y[:, ::2]),
    "copy_-view": lambda x, y, i: x.t()[1::2].copy_(y[:, 0]),
    "fill_-view": lambda x, y, i: x[:, 1::2].fill_(2),
    "fill-tensor_": lambda x, y, i: x.fill_(y[0, 0]),
    "fill_diagonal_": lambda x, y, i: x.fill_diagonal_(3.0),
    "matmul-no-columns": lambda x, y, i: x[:, :0] @ y[:, :0].t(),
    "rms_norm": lambda x, y, i: functional.rms_norm(x, (10,), y[0]),
    "lerp-tensor": lambda x, y, i: torch.lerp(x, y, y),
    "lerp-tensor_": lambda x, y, i: x.lerp_(y, y),
    "range": lambda x, y, i: torch.range(1, 4, device=x.device),
    "range-int": lambda x, y, i: torch.range(0.5, 5, 1.5, dtype=torch.int64, device=x.device),
    "unique-none": lambda x, y, i: torch.unique(x[:0]),
    "tensor": lambda x, y, i: torch.tensor([[1, 2], [3, 4]], device=x.device),
    "bincount-weights": lambda x, y, i: torch.bincount(i, y[:, 0].float()),
}


def _gradient(function: One, x: Tensor, slope: Tensor, _: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf, slope)[0]


_BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    **{
        f"{function.__name__}-backward": partial(_gradient, function)
        for function in (torch.sigmoid, torch.tanh, torch.relu, functional.silu, functional.gelu, functional.logsigmoid)
    },
    "softmax-backward": partial(_gradient, lambda x: x.softmax(-1)),
    "log_softmax-backward": partial(_gradient, lambda x: x.log_softmax(-1)),
    "embedding-backward": partial(
        _gradient, lambda x: functional.embedding(torch.tensor([1, 1, 0, 3], device=x.device), x)
    ),
}
