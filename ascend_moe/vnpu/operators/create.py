"""Filling, copying, ranges, triangles, random numbers.

Random numbers come from the seed and the offset that torch_npu's generator gives each call: the same seed
gives the same numbers on every run. They are not the numbers of a device.
"""

from __future__ import annotations

import torch

from ascend_moe.vnpu.operators.registry import effect, in_place, returns

Number = int | float


@effect("aclnnInplaceCopy", "aclnnInplaceFillTensor")
def _copy(self: torch.Tensor, source: torch.Tensor) -> None:
    self.copy_(source)


@returns("aclnnCast")
def _cast(self: torch.Tensor, dtype: int) -> torch.Tensor:
    return self  # writing the result converts it


@effect("aclnnInplaceZero")
def _zero(self: torch.Tensor) -> None:
    self.zero_()


@effect("aclnnInplaceOne")
def _one(self: torch.Tensor) -> None:
    self.fill_(1)


@effect("aclnnInplaceFillScalar")
def _fill(self: torch.Tensor, value: Number) -> None:
    self.fill_(value)


@effect("aclnnInplaceFillDiagonal")
def _fill_diagonal(self: torch.Tensor, value: Number, wrap: int) -> None:
    self.fill_diagonal_(value, bool(wrap))


@effect("aclnnArange")
def _arange(start: Number, end: Number, step: Number, out: torch.Tensor) -> None:
    values = torch.arange(start, end, step, dtype=out.dtype)
    if values.shape != out.shape:
        raise ValueError(f"arange has {len(values)} values, but the output given is {tuple(out.shape)}")
    out.copy_(values)


@effect("aclnnRange")
def _range(start: Number, end: Number, step: Number, out: torch.Tensor) -> None:
    # end is included, and already in out's size
    out.copy_(start + step * torch.arange(out.numel(), dtype=out.dtype))


@effect("aclnnLinspace")
def _linspace(start: Number, end: Number, steps: int, out: torch.Tensor) -> None:
    out.copy_(torch.linspace(start, end, steps, dtype=out.dtype))


@effect("aclnnEye")
def _eye(rows: int, columns: int, out: torch.Tensor) -> None:
    out.copy_(torch.eye(rows, columns, dtype=out.dtype))


@returns("aclnnTril")
@in_place("aclnnInplaceTril")
def _tril(self: torch.Tensor, diagonal: int) -> torch.Tensor:
    return torch.tril(self, diagonal)


@returns("aclnnTriu")
@in_place("aclnnInplaceTriu")
def _triu(self: torch.Tensor, diagonal: int) -> torch.Tensor:
    return torch.triu(self, diagonal)


Seed = int | torch.Tensor
# A large odd number: nearby seeds become distant seeds.
_SPREAD = 0x9E3779B97F4A7C15


def _generator(seed: Seed, offset: Seed, within_graph: int = 0) -> torch.Generator:
    """A generator for one call. Seed and offset are tensors where a graph draws anew at each replay."""
    mixed = (int(seed) * _SPREAD + (int(offset) + within_graph) * 0x2545F4914F6CDD1D) % 2**63
    return torch.Generator().manual_seed(mixed)


@effect("aclnnInplaceNormal", "aclnnInplaceNormalTensor")
def _normal_(self: torch.Tensor, mean: float, std: float, seed: Seed, offset: Seed, within: int = 0) -> None:
    self.normal_(mean, std, generator=_generator(seed, offset, within))


@effect("aclnnNormalFloatFloat")
def _normal(mean: float, std: float, seed: int, offset: int, out: torch.Tensor) -> None:
    out.normal_(mean, std, generator=_generator(seed, offset))


@returns("aclnnNormalFloatTensor")
def _normal_std(mean: float, std: torch.Tensor, seed: int, offset: int) -> torch.Tensor:
    return torch.normal(mean, std, generator=_generator(seed, offset))


@returns("aclnnNormalTensorFloat", "aclnnNormalTensorTensor")
def _normal_mean(mean: torch.Tensor, std: float | torch.Tensor, seed: int, offset: int) -> torch.Tensor:
    return mean + std * torch.normal(torch.zeros_like(mean), 1.0, generator=_generator(seed, offset))


@effect("aclnnInplaceUniform", "aclnnInplaceUniformTensor")
def _uniform(self: torch.Tensor, low: float, high: float, seed: Seed, offset: Seed, within: int = 0) -> None:
    self.uniform_(low, high, generator=_generator(seed, offset, within))


@effect("aclnnInplaceRandom", "aclnnInplaceRandomTensor")
def _random(self: torch.Tensor, low: int, high: int, seed: Seed, offset: Seed, within: int = 0) -> None:
    self.random_(low, high, generator=_generator(seed, offset, within))


@in_place("aclnnInplaceBernoulli", "aclnnInplaceBernoulliTensor")
def _bernoulli(self: torch.Tensor, chance: float | torch.Tensor, seed: int, offset: int) -> torch.Tensor:
    chances = torch.empty(self.shape, dtype=torch.float32).copy_(torch.as_tensor(chance))
    return torch.bernoulli(chances, generator=_generator(seed, offset))


@effect("aclnnRandperm")
def _randperm(number: int, seed: int, offset: int, out: torch.Tensor) -> None:
    out.copy_(torch.randperm(number, generator=_generator(seed, offset)))


@returns("aclnnMultinomial")
def _multinomial(self: torch.Tensor, samples: int, replacement: int, seed: int, offset: int) -> torch.Tensor:
    return torch.multinomial(self, samples, bool(replacement), generator=_generator(seed, offset))
