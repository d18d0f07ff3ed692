"""Random numbers from the seed and offset that torch_npu's generator gives each call.

The same seed gives the same numbers on every run; they are not those of a device.
"""

from __future__ import annotations

import torch

from ascend_moe.vnpu.operators.registry import effect, in_place, returns

Seed = int | torch.Tensor
# A large odd number: nearby offsets get unlike seeds.
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
