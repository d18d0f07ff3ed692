"""DTensors in npu_moe_token_permute and _unpermute, on two processes: values, placements, gradients, refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import Ranks, fork_server, nothing_left

from ascend_moe import npu
from ascend_moe.errors import ArgumentError

__all__ = ["fork_server", "nothing_left"]  # fixtures
T, K, H, E = 5, 2, 7, 4  # H is no multiple of the ranks
WAYS = {
    "operators": (torch.ops.ascend_moe.npu_moe_token_permute, torch.ops.ascend_moe.npu_moe_token_unpermute),
    "functions": (npu.npu_moe_token_permute, npu.npu_moe_token_unpermute),
}


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(T, E, generator=generator)
    return [torch.randn(T, H, generator=generator), scores.topk(K).indices.int(), scores[:, :K].clone()]


def there_and_back(way: str, x: Any, ids: Any, probs: Any, kept: int | None) -> list[Any]:
    """Rows, places and sums, and where the inputs want them the gradients of tokens and probabilities."""
    permute, unpermute = WAYS[way]
    rows, places = permute(x, ids, kept)
    y = unpermute(rows * rows, places, probs)
    if not x.requires_grad:
        return [rows, places, y]
    y.square().sum().backward()
    return [rows, places, y, x.grad, probs.grad]


def drawn_placements(seeds: int) -> None:
    """In a rank's process."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    for seed in range(seeds):
        draw = random.Random(seed)
        mesh = init_device_mesh("cpu", draw.choice([(2,), (1, 2)]))
        kept, way = draw.choice([None, 3, -2]), draw.choice(list(WAYS))
        x, ids, probs = tensors()
        expected = there_and_back(way, x.requires_grad_(), ids, probs.requires_grad_(), kept)

        def spread(tensor: torch.Tensor, kinds: list[Any], draw: Any = draw, mesh: Any = mesh) -> DTensor:
            placements = [draw.choice(kinds) for _ in range(mesh.ndim)]
            return distribute_tensor(tensor.detach(), mesh, placements)

        shards = [Replicate(), Shard(0), Shard(1)]
        given = [spread(x, shards), spread(ids, shards), spread(probs, shards)]
        with torch.inference_mode():
            found = there_and_back(way, *given, kept)
        found += there_and_back(way, given[0].requires_grad_(), given[1], given[2].requires_grad_(), kept)
        columns = tuple(each if each.is_replicate() else Shard(1) for each in given[0].placements)
        assert found[0].placements == found[2].placements == columns
        for one, other in zip(found, [*expected[:3], *expected], strict=True):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(one.full_tensor(), other.detach(), rtol=1e-5, atol=1e-6)
    parts = DTensor.from_local(x.detach() / 2, mesh, [Replicate()] * (mesh.ndim - 1) + [Partial()])
    rows, _ = WAYS["functions"][0](parts, spread(ids, [Replicate()]), kept)
    torch.testing.assert_close(rows.full_tensor(), expected[0].detach())


def refusals() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    x, ids, probs = (each.detach() for each in tensors())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for permute, unpermute in WAYS.values():
        with pytest.raises(
            ArgumentError, match=r"^indices must be a DTensor on the mesh of the other tensors"
        ) as error:
            permute(distribute_tensor(x, mesh, [Replicate()]), ids)
        assert error.value.argument == "indices"
        with pytest.raises(ArgumentError, match=r"^permuted_tokens must be a DTensor"):
            unpermute(x, distribute_tensor(ids.view(-1), mesh, [Replicate()]), probs)
        with pytest.raises(ArgumentError, match=r"^tokens is \(5,\); it must be 2-D"):
            permute(*(distribute_tensor(each, mesh, [Replicate()]) for each in (x[:, 0], ids)))


def compiled() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    x, ids, _ = (each.detach() for each in tensors())
    mesh = init_device_mesh("cpu", (2,))
    given = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(ids, mesh, [Replicate()])
    program = torch.compile(lambda *args: WAYS["operators"][0](*args)[0] * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(program(*given).full_tensor(), 2 * WAYS["functions"][0](x, ids)[0])


@pytest.mark.parametrize(
    "calls",
    [
        [(drawn_placements, 8), (refusals,)],
        pytest.param([(drawn_placements, 40), (compiled,)], marks=pytest.mark.nightly),
    ],
    ids=["some", "more, compiled"],
)
def test_rows_are_whole_or_sharded_along_h_and_all_else_is_refused(calls: list[tuple[Any, ...]]) -> None:
    with Ranks(2, timeout_s=60) as ranks:
        for call in calls:
            for rank in range(2):
                ranks.start(rank, *call)
            assert [ranks.wait(rank, 120).text for rank in range(2)] == ["", ""]
