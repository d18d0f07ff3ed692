"""Operators of plain tensors. torch's own functions of the same meaning do the arithmetic.

The tables go by the name without ``aclnn``; each says how the result reaches the caller (`registry`).

Random numbers come from the seed and the offset that torch_npu's generator gives each call: the same seed
gives the same numbers on every run. They are not the numbers of a device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .registry import DTYPES, OPERATORS, Arguments, effect, in_place, resized, returns, write

Number = int | float
Table = dict[str, Callable[..., Any]]
aten = torch.ops.aten

# ---- element by element. A star: there is an in-place form too.

# torch's function has the same name: LogicalNot is torch.logical_not.
_SAME_NAME = """
    Abs Neg Sign Exp* Exp2* Expm1* Log* Log2* Log10* Log1p* Sqrt* Rsqrt* Reciprocal* Sigmoid* Relu* Tanh* Erf*
    Sin* Cos* Floor* Ceil* Round Trunc Signbit LogicalNot* BitwiseNot NanToNum*
    Mul* Div* FloorDivide* Atan2* Maximum Minimum ClampMin ClampMax* LogicalAnd* LogicalOr* LogicalXor Clamp
    Lerp* Max Min Median IndexSelect Cat Stack Flip Roll Tril* Triu* Bincount
"""
# torch has one function for all kinds of operands, which these names have behind.
_KINDS = {
    "Eq Ne Lt Le Gt Ge BitwiseAnd BitwiseXor": "Tensor* Scalar*",
    "BitwiseOr Fmod": "Tensor Scalar",
    "Remainder Pow": "TensorTensor* TensorScalar* ScalarTensor",
    "ClampMin ClampMax": "Tensor*",
    "Clamp": "Tensor",
}


def _torch_function(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(torch, re.sub(r"(?<!^)([A-Z])", r"_\1", name.rstrip("*")).lower())
    return function


_ELEMENTWISE: Table = {name: _torch_function(name) for name in _SAME_NAME.split()} | {
    name + kind: _torch_function(name)
    for names, kinds in _KINDS.items()
    for name in names.split()
    for kind in kinds.split()
}
_ELEMENTWISE |= {
    "Silu": functional.silu,
    "Gelu": functional.gelu,
    "FastGelu": lambda x: x.float() * torch.sigmoid(1.702 * x.float()),
    "Softplus": functional.softplus,
    "LogSigmoid": functional.logsigmoid,
    "IsFinite": torch.isfinite,
    "IsPosInf": torch.isposinf,
    "IsNegInf": torch.isneginf,
    "RoundDecimals*": lambda x, decimals: torch.round(x, decimals=decimals),
    "Add*": lambda x, other, alpha: torch.add(x, other, alpha=alpha),
    "Sub*": lambda x, other, alpha: torch.sub(x, other, alpha=alpha),
    "Rsub": lambda x, other, alpha: torch.rsub(x, other, alpha=alpha),
    "DivMod*": lambda x, other, mode: torch.div(x, other, rounding_mode=(None, "trunc", "floor")[mode]),
    "LeftShift": torch.bitwise_left_shift,
    "LeftShifts": torch.bitwise_left_shift,
    "RightShift": torch.bitwise_right_shift,
    "Equal": lambda x, other: torch.tensor([torch.equal(x, other)]),
    "IsClose": lambda x, other, rtol, atol, nan: torch.isclose(x, other, rtol, atol, bool(nan)),
    "Addcmul*": lambda x, left, right, value: torch.addcmul(x, left, right, value=value),
    "Addcdiv*": lambda x, left, right, value: torch.addcdiv(x, left, right, value=value),
    "SigmoidBackward": aten.sigmoid_backward,
    "LogSigmoidBackward": lambda grad, x, buffer: aten.log_sigmoid_backward(grad, x, aten.log_sigmoid_forward(x)[1]),
    "TanhBackward": aten.tanh_backward,
    "SiluBackward": aten.silu_backward,
    "ThresholdBackward": aten.threshold_backward,
    "GeluBackward": aten.gelu_backward,
}
# The forms with a number on the right have an s behind.
for _name in ("Add*", "Sub*", "Rsub", "Mul*", "Div*", "DivMod*", "FloorDivide*", "Lerp*"):
    _ELEMENTWISE[_name.replace("*", "") + "s" + "*" * _name.endswith("*")] = _ELEMENTWISE[_name]


# ---- sums, extremes, scans, softmax, sorting


def _dims(x: Tensor, dims: list[int] | None) -> list[int]:
    """The dimensions to reduce; none given are all."""
    return dims or list(range(x.dim()))


def _over_dims(reduce: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dims, keep: reduce(x, _dims(x, dims), bool(keep))


def _over_dim(reduce: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, keep: reduce(x, dim, bool(keep))


def _spread(reduce: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dims, correction, keep: reduce(x, _dims(x, dims), correction=correction, keepdim=bool(keep))


def _truth(reduce: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dims, keep: reduce(x, tuple(_dims(x, dims)), bool(keep)) if x.dim() else x != 0


_REDUCTIONS: Table = {
    "ReduceSum": lambda x, dims, keep, dtype: torch.sum(x, _dims(x, dims), bool(keep), dtype=DTYPES[dtype]),
    "Mean": lambda x, dims, keep, dtype: torch.mean(x, _dims(x, dims), bool(keep), dtype=DTYPES[dtype]),
    "Prod": lambda x, dtype: torch.prod(x, dtype=DTYPES[dtype]),
    "ProdDim": lambda x, dim, keep, dtype: torch.prod(x, dim, bool(keep), dtype=DTYPES[dtype]),
    "Amax": _over_dims(torch.amax),
    "Amin": _over_dims(torch.amin),
    "ArgMax": _over_dim(torch.argmax),
    "ArgMin": _over_dim(torch.argmin),
    "All": _truth(torch.all),
    "Any": _truth(torch.any),
    "Std": _spread(torch.std),
    "VarCorrection": _spread(torch.var),
    # without a dtype: that of x
    "LinalgVectorNorm": lambda x, order, dims, keep, dtype: torch.linalg.vector_norm(
        x, order, _dims(x, dims), bool(keep), dtype=DTYPES.get(dtype)
    ),
    "LogSumExp": _over_dims(torch.logsumexp),
    "Cumsum": lambda x, dim, dtype: torch.cumsum(x, dim, dtype=DTYPES[dtype]),
    "Cumprod": lambda x, dim, dtype: torch.cumprod(x, dim, dtype=DTYPES[dtype]),
    "SoftmaxBackward": lambda grad, y, dim: aten._softmax_backward_data(grad, y, dim, grad.dtype),
    "LogSoftmaxBackward": lambda grad, y, dim: aten._log_softmax_backward_data(grad, y, dim, grad.dtype),
    "MseLoss": aten.mse_loss,
    "MseLossBackward": aten.mse_loss_backward,
    "NLLLossBackward": lambda grad, x, target, weight, reduction, ignored, total: aten.nll_loss_backward(
        grad, x, target.long(), weight, reduction, ignored, total
    ),
    "SearchSorted": lambda sequence, x, narrow, right, sorter: torch.searchsorted(
        sequence, x, right=bool(right), sorter=sorter
    ),
}
_REDUCTIONS_TO_TWO: Table = {
    "NLLLoss": lambda x, target, weight, reduction, ignored: aten.nll_loss_forward(
        x, target.long(), weight, reduction, ignored
    ),
    "MaxDim": _over_dim(torch.max),
    "MinDim": _over_dim(torch.min),
    "MedianDim": _over_dim(torch.median),
    "Aminmax": lambda x, dims, keep: (
        torch.amin(x, _dims(x, dims), bool(keep)),
        torch.amax(x, _dims(x, dims), bool(keep)),
    ),
    "VarMean": _spread(torch.var_mean),
    "LinalgQr": lambda x, mode: torch.linalg.qr(
        x if x.dtype == torch.float64 else x.float(), ("reduced", "complete", "r")[mode]
    ),
    "Topk": lambda x, k, dim, largest, ordered: torch.topk(x, k, dim, bool(largest), bool(ordered)),
    "Sort": lambda x, stable, dim, descending: torch.sort(x, stable=bool(stable), dim=dim, descending=bool(descending)),
    "Kthvalue": lambda x, k, dim, keep: torch.kthvalue(x, k, dim, bool(keep)),
}

# ---- selecting, placing, joining, repeating, counting


def _indices(x: Tensor, tensors: list[Tensor]) -> list[Tensor | None]:
    # torch_npu passes a dimension that is not indexed as an empty tensor of x's type, without memory. So it passes an
    # index torch.empty(0) of x's type, too; an empty selection, mask or slice has memory.
    whole = [t.shape == (0,) and t.dtype == x.dtype and not t.untyped_storage().data_ptr() for t in tensors]
    return [None if no else t if t.dtype == torch.bool else t.long() for t, no in zip(tensors, whole, strict=True)]


def _index(x: Tensor, indices: list[Tensor], out: Tensor) -> None:
    if out.numel() > 0:  # an index may be empty itself
        out.copy_(aten.index(x, _indices(x, indices)))


def _index_put(x: Tensor, indices: list[Tensor], values: Tensor, accumulate: int, unsafe: int) -> None:
    given = _indices(x, indices)
    if any(index is not None for index in given):
        aten.index_put_(x, given, values, bool(accumulate))


def _scatter(x: Tensor, dim: int, index: Tensor, source: Any, reduce: int) -> Tensor:
    if reduce == 0:
        return torch.scatter(x, dim, index.long(), source)
    return torch.scatter(x, dim, index.long(), source, reduce={1: "add", 2: "multiply"}[reduce])


def _one_hot(x: Tensor, classes: int, on: Tensor, off: Tensor, axis: int) -> Tensor:
    return torch.where(x.unsqueeze(-1) == torch.arange(classes), on, off).movedim(-1, axis)


def _histc(x: Tensor, bins: int, low: Number, high: Number) -> Tensor:
    return torch.histc(x if x.is_floating_point() else x.double(), bins, low, high)


_SELECTIONS: Table = {
    "SWhere": torch.where,
    "IndexAdd": lambda x, dim, index, source, alpha: torch.index_add(x, dim, index, source, alpha=alpha),
    "IndexFill*": lambda x, dim, index, value: x.index_fill(dim, index.long(), value),
    "Gather": lambda x, dim, index: torch.gather(x, dim, index.long()),
    "Take": lambda x, index: torch.take(x, index.long()),
    "Scatter*": _scatter,
    "ScatterValue*": _scatter,
    "ScatterAdd": lambda x, dim, index, source: torch.scatter_add(x, dim, index.long(), source),
    "ConstantPadNd": lambda x, pad, value: functional.pad(x, pad, value=value),
    "Embedding": lambda weight, indices: functional.embedding(indices.long(), weight),
    "EmbeddingDenseBackward": lambda grad, indices, rows, padding, by_frequency: aten.embedding_dense_backward(
        grad, indices.long(), rows, padding, bool(by_frequency)
    ),
    "DropoutDoMask": lambda x, mask, probability: _do_mask(x, mask, probability),
    "Repeat": lambda x, repeats: x.repeat(repeats),
    "RepeatInterleave": lambda x, repeats, size: torch.repeat_interleave(x, repeats),
    "RepeatInterleaveInt": lambda x, repeats, size: torch.repeat_interleave(x, repeats),
    "RepeatInterleaveWithDim": lambda x, repeats, dim, size: torch.repeat_interleave(x, repeats, dim),
    "RepeatInterleaveIntWithDim": lambda x, repeats, dim, size: torch.repeat_interleave(x, repeats, dim),
    "RepeatInterleaveTensor": lambda repeats, size: torch.repeat_interleave(repeats),
    "OneHot": _one_hot,
    "Histc": _histc,
    "Cast": lambda x, dtype: x,  # writing the result converts it
}

# ---- matrix products and norms. Half types are summed in float32 and rounded once, as a cube unit does.


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    return torch.matmul(_wide(left), _wide(right))


def _scaled_sum(x: Tensor, left: Tensor, right: Tensor, beta: Number, alpha: Number) -> Tensor:
    """``beta * x + alpha * left @ right``; with beta 0 x is not looked at, as in torch."""
    add: Any = {1: torch.addmv, 2: torch.addmm, 3: torch.baddbmm}[right.dim()]
    total: Tensor = add(_wide(x), _wide(left), _wide(right), beta=beta, alpha=alpha)
    return total


def _transposed_matmul(left: Tensor, right: Tensor, *rest: Any) -> None:
    bias, scale, turn_left, turn_right, turn_out, _, parts, out = rest
    if bias is not None or scale is not None or parts != 1:
        raise NotImplementedError("aclnnTransposeBatchMatMul on the virtual NPU takes no bias, scale or batch split")
    out.copy_(_matmul(left.permute(turn_left), right.permute(turn_right)).permute(turn_out))


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    wide = x.float()
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    factor = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    y.copy_(wide * factor * gamma.float())
    rstd.copy_(factor.reshape(rstd.shape))


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor, x: Tensor) -> None:
    total = x1.float() + x2.float()
    x.copy_(total)
    _rms_norm(total, gamma, epsilon, y, rstd)


def _add_rms_norm_dynamic_quant(x1: Tensor, x2: Tensor, gamma: Tensor, *rest: Any) -> None:
    smooth, _, beta, epsilon, mask, codes, _, x, scale, _ = rest
    if mask not in (None, [1, 0]) or rest[1] is not None:
        raise NotImplementedError("the virtual NPU quantizes one output: pass output_mask [1, 0], one smooth scale")
    normed, rstd = torch.empty(x1.shape), torch.empty(x1.shape[: x1.dim() - gamma.dim()])
    _add_rms_norm(x1, x2, gamma, epsilon, normed, rstd, x)
    normed = normed if beta is None else normed + beta.float()
    quantize = OPERATORS["aclnnDynamicQuantV3"]  # of ascend_moe
    quantize(Arguments([normed, smooth, None, 2, 1, "pertoken", codes, scale, None], []))


def _write_wanted(outputs: Sequence[Tensor | None], results: Sequence[Tensor]) -> None:
    for out, result in zip(outputs, results, strict=True):
        if out is not None:
            out.copy_(result.reshape(out.shape))


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, epsilon: float, *outputs: Tensor | None
) -> None:
    _write_wanted(outputs, torch.native_layer_norm(x, shape, weight, bias, epsilon))


def _rms_norm_grad(dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor) -> None:
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    unit, slope = x.float() * rstd, dy.float() * gamma.float()
    dx.copy_((slope - unit * (slope * unit).mean(dims, keepdim=True)) * rstd)
    dgamma.copy_((dy.float() * unit).reshape(-1, *gamma.shape).sum(0))


def _layer_norm_backward(grad: Tensor, x: Tensor, shape: list[int], *given: Any) -> None:
    *floats, wanted, gx, gw, gb = given
    wide, mask = [None if part is None else part.float() for part in floats], [bool(part) for part in wanted]
    _write_wanted((gx, gw, gb), aten.native_layer_norm_backward(grad.float(), x.float(), shape, *wide, mask))


# ---- random numbers

Seed = int | Tensor
# Large odd numbers: nearby seeds become distant seeds.
_SPREAD, _STEP = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D


def _generator(seed: Seed, offset: Seed, within_graph: int = 0) -> torch.Generator:
    """A generator for one call. Seed and offset are tensors where a graph draws anew at each replay."""
    mixed = (int(seed) * _SPREAD + (int(offset) + within_graph) * _STEP) % 2**63
    return torch.Generator().manual_seed(mixed)


def _draw(name: str, parameters: int, out: int = 0) -> Callable[..., None]:
    """Fill the tensor at place ``out`` by its method, with the parameters that come before the seed."""

    def run(*arguments: Any) -> None:
        values = list(arguments)
        tensor = values.pop(out)
        getattr(tensor, name)(*values[:parameters], generator=_generator(*values[parameters:]))

    return run


def _normal_mean(mean: Tensor, std: float | Tensor, seed: int, offset: int) -> Tensor:
    return mean + std * torch.normal(torch.zeros_like(mean), 1.0, generator=_generator(seed, offset))


def _bernoulli(x: Tensor, chance: float | Tensor, seed: int, offset: int) -> Tensor:
    chances = torch.empty(x.shape, dtype=torch.float32).copy_(torch.as_tensor(chance))
    return torch.bernoulli(chances, generator=_generator(seed, offset))


_RANDOM: Table = {
    "NormalFloatTensor": lambda mean, std, *seed: torch.normal(mean, std, generator=_generator(*seed)),
    "NormalTensorFloat": _normal_mean,
    "NormalTensorTensor": _normal_mean,
    "Multinomial": lambda x, samples, replacement, *seed: torch.multinomial(
        x, samples, bool(replacement), generator=_generator(*seed)
    ),
}

# ---- those that write their outputs themselves


def _arange(start: Number, end: Number, step: Number, out: Tensor) -> None:
    values = torch.arange(start, end, step, dtype=out.dtype)
    if values.shape != out.shape:
        raise ValueError(f"arange has {len(values)} values, the output is {tuple(out.shape)}: pass one that fits")
    out.copy_(values)


def _range(start: Number, end: Number, step: Number, out: Tensor) -> None:
    # end is included, and already in out's size
    start, step = (value if out.is_floating_point() else int(value) for value in (start, step))
    out.copy_(start + step * torch.arange(out.numel(), dtype=out.dtype))


def _dropout_mask(shape: list[int], probability: float, *given: Any) -> None:
    """A bit an element, 1: kept."""
    *seed, _, out = given
    kept = torch.rand(8 * out.numel(), generator=_generator(*seed)) >= probability
    weights = 2 ** torch.arange(8, dtype=torch.int32)
    out.copy_((kept.reshape(-1, 8) * weights).sum(1).to(torch.uint8).view(out.dtype).reshape(out.shape))


def _do_mask(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    bits = mask.reshape(-1, 1).view(torch.uint8) >> torch.arange(8, dtype=torch.uint8) & 1
    kept = bits.reshape(-1)[: x.numel()].reshape(x.shape)
    return x * kept if probability >= 1 else x * kept / (1 - probability)


_WRITING: Table = {
    "DropoutGenMaskV2": _dropout_mask,
    "DropoutGenMaskV2Tensor": _dropout_mask,
    "InplaceCopy": lambda x, source: x.copy_(source),
    "InplaceFillTensor": lambda x, source: x.copy_(source),
    "InplaceFillScalar": lambda x, value: x.fill_(value),
    "InplaceFillDiagonal": lambda x, value, wrap: x.fill_diagonal_(value, bool(wrap)),
    "InplaceZero": lambda x: x.zero_(),
    "InplaceOne": lambda x: x.fill_(1),
    "InplaceMaskedFillScalar": lambda x, mask, value: x.masked_fill_(mask.to(torch.bool), value),
    "InplaceMaskedFillTensor": lambda x, mask, value: x.masked_fill_(mask.to(torch.bool), value),
    "InplaceIndexCopy": lambda x, dim, index, source: x.index_copy_(dim, index.long(), source),
    # A device keeps nothing in the buffer.
    "LogSigmoidForward": lambda x, out, buffer: out.copy_(functional.logsigmoid(x)),
    "ScatterNdUpdate": lambda x, places, rows: x.index_put_(tuple(places.long().unbind(-1)), rows),
    "Index": _index,
    "IndexPutImpl": _index_put,
    "Arange": _arange,
    "Range": _range,
    "Linspace": lambda start, end, steps, out: out.copy_(torch.linspace(start, end, steps, dtype=out.dtype)),
    "Eye": lambda rows, columns, out: out.copy_(torch.eye(rows, columns, dtype=out.dtype)),
    "Softmax": lambda x, dim, out: out.copy_(torch.softmax(x, dim, dtype=out.dtype)),
    "LogSoftmax": lambda x, dim, out: out.copy_(torch.log_softmax(x, dim, dtype=out.dtype)),
    "RmsNorm": _rms_norm,
    "AddRmsNorm": _add_rms_norm,
    "AddRmsNormDynamicQuantV2": _add_rms_norm_dynamic_quant,
    "RmsNormGrad": _rms_norm_grad,
    "LayerNorm": _layer_norm,
    "LayerNormBackward": _layer_norm_backward,
    "Addmm": lambda *given: given[5].copy_(_scaled_sum(*given[:5])),
    "Baddbmm": lambda *given: given[5].copy_(_scaled_sum(*given[:5])),
    "Addmv": lambda x, left, right, alpha, beta, out, cube_math: out.copy_(_scaled_sum(x, left, right, beta, alpha)),
    "InplaceAddmm": lambda x, *given: x.copy_(_scaled_sum(x, *given[:4])),
    "TransposeBatchMatMul": _transposed_matmul,
    "InplaceNormal": _draw("normal_", 2),
    "InplaceNormalTensor": _draw("normal_", 2),
    "NormalFloatFloat": _draw("normal_", 2, out=-1),
    "InplaceUniform": _draw("uniform_", 2),
    "InplaceUniformTensor": _draw("uniform_", 2),
    "InplaceRandom": _draw("random_", 2),
    "InplaceRandomTensor": _draw("random_", 2),
    "Randperm": lambda number, seed, offset, out: out.copy_(torch.randperm(number, generator=_generator(seed, offset))),
}
# ---- on lists of tensors, which optimizers use: torch's _foreach functions, by what follows their names

_FOREACH = {
    "": """
        Abs Acos Asin Atan Cos Cosh Erf Erfc Exp Expm1 Log Log10 Log1p Log2 Neg Reciprocal Sigmoid Sign Sin Sinh Sqrt
        Tan Tanh
    """,
    "List": "Mul Div Maximum Minimum Pow Lerp",
    "ListV2": "Add Sub",
    "Scalar": "Lerp",
    "ScalarV2": "Add Sub Mul Div Maximum Pow Addcdiv Addcmul",
    "ScalarList": "Add Sub Mul Div Maximum Minimum Pow",
    "ScalarAndTensor": "Pow",
}


def _foreach(name: str, form: str) -> Callable[..., None]:
    function = getattr(torch, f"_foreach_{name.lower()}")

    def run(*given: Any) -> None:
        *inputs, outputs = given
        named = {"alpha": inputs.pop()} if form == "ListV2" else {}
        _copy_all(outputs, function(*inputs, **named))

    return run


def _copy_all(outputs: list[Tensor], results: Sequence[Tensor]) -> None:
    for out, result in zip(outputs, results, strict=True):
        write(out, result)


def _zero(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


def _update_scale(scale: Tensor, tracker: Tensor, found: Tensor, *rest: Any) -> None:
    *numbers, scale_out, tracker_out = rest
    _copy_all([scale_out, tracker_out], [scale, tracker])
    torch._amp_update_scale_(scale_out, tracker_out, found, *numbers)


_WRITING |= {f"Foreach{name}{form}": _foreach(name, form) for form, names in _FOREACH.items() for name in names.split()}
_WRITING |= {
    "ForeachCopy": lambda tensors, outputs: _copy_all(outputs, tensors),
    "ForeachZeroInplace": _zero,
    "ForeachNonFiniteCheckAndUnscale": torch._amp_foreach_non_finite_check_and_unscale_,
    "AmpUpdateScale": _update_scale,
}
for _name in ("Matmul", "Mm", "BatchMatMul", "Mv"):
    _WRITING[_name] = lambda left, right, out, cube_math: out.copy_(_matmul(left, right))


for _name, _function in (_ELEMENTWISE | _REDUCTIONS | _SELECTIONS | _RANDOM | {"Dot": _matmul}).items():
    returns(f"aclnn{_name.removesuffix('*')}")(_function)
    if _name.endswith("*"):
        in_place(f"aclnnInplace{_name.removesuffix('*')}")(_function)
for _name, _function in _REDUCTIONS_TO_TWO.items():
    returns(f"aclnn{_name}", outputs=2)(_function)
for _name, _function in _WRITING.items():
    effect(f"aclnn{_name}")(_function)
in_place("aclnnInplaceBernoulli", "aclnnInplaceBernoulliTensor")(_bernoulli)
resized("aclnnMaskedSelect")(torch.masked_select)
resized("aclnnNonzero")(torch.nonzero)
resized("aclnnNonzeroV2")(lambda x: torch.nonzero(x).t())
resized("aclnnUnique2", outputs=3)(
    lambda x, ordered, inverse, counts: torch.unique(x, sorted=True, return_inverse=True, return_counts=True)
)
