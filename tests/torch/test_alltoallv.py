"""npu_alltoallv_gmm and npu_gmm_alltoallv: rows, products and gradients against one process that has all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_arguments import refused
from rank_processes import Ranks, values
from torch import Tensor

import ascend_moe
from ascend_moe.comm.place import Place
from ascend_moe.errors import ArgumentError
from ascend_moe.npu import npu_alltoallv_gmm, npu_gmm_alltoallv
from ascend_moe.ops.collectives import exchange

HIDDEN, WIDTH, LOCAL = 6, 10, 3
OPS = torch.ops.ascend_moe
WIDE = [2**32 + 2, 0, 3]  # counts whose low bits would fit


class Layer:
    """Uneven rows of all ranks for the experts of all ranks, and what one process makes of them."""

    def __init__(self, world: int, dtype: torch.dtype = torch.float32, most: int = 4) -> None:
        generator = torch.Generator().manual_seed(world)
        self.world, self.experts = world, world * LOCAL
        # (source, expert): rows; the first expert of each rank gets none, and the last rank has no tokens.
        self.counts = torch.randint(0, most, (world, self.experts), generator=generator)
        self.counts[:, ::LOCAL] = 0
        self.counts[0, -1] = 5 * most
        self.counts[world - 1 or 1 :] = 0

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

        self.x = [drawn(int(counts.sum()), HIDDEN) for counts in self.counts]
        self.up, self.down = drawn(self.experts, HIDDEN, WIDTH), drawn(self.experts, WIDTH, HIDDEN)

    def send(self, rank: int) -> list[int]:
        found: list[int] = self.counts[rank].tolist()
        return found

    def receive(self, rank: int) -> list[int]:
        found: list[int] = self.counts[:, rank * LOCAL :][:, :LOCAL].flatten().tolist()
        return found

    def one_process(self) -> list[list[Tensor]]:
        """By rank: the rows home, and the gradients of x, up and down."""
        results = []
        for x, counts in zip(self.x, self.counts, strict=True):
            expert = torch.arange(self.experts).repeat_interleave(counts)
            up = (x[:, None].float() @ self.up[expert].float())[:, 0].to(x.dtype)
            results.append(((up * up)[:, None].float() @ self.down[expert].float())[:, 0].to(x.dtype))
        sum((y.float().square().sum() for y in results), start=torch.zeros(())).backward()
        parts = [each.grad.split(LOCAL) for each in (self.up, self.down) if each.grad is not None]
        return [[results[r].detach(), self.x[r].grad, parts[0][r], parts[1][r]] for r in range(self.world)]  # type: ignore[list-item]

    def on_ranks(self, rank: int, group: str, *, transposed: bool = False, tensors: bool = False) -> list[Tensor]:
        x = self.x[rank].detach().clone().requires_grad_()
        up, down = (each.detach()[rank * LOCAL :][:LOCAL].clone() for each in (self.up, self.down))
        given = [each.transpose(1, 2).contiguous() if transposed else each for each in (up, down)]
        leaves = [each.requires_grad_() for each in given]
        options: dict[str, Any] = {"trans_gmm_weight": transposed}
        send, receive = self.send(rank), self.receive(rank)
        there, back = (send, receive), (receive, send)
        if tensors:
            options |= {"send_counts_tensor": torch.tensor(send), "recv_counts_tensor": torch.tensor(receive)}
            there, back = ([], []), (torch.tensor(receive), torch.tensor(send))  # type: ignore[assignment]
        rows, shared, came = npu_alltoallv_gmm(x, leaves[0], group, self.world, *there, **options)
        assert shared is None and came is None
        home = npu_gmm_alltoallv(rows * rows, leaves[1], group, self.world, *back, trans_gmm_weight=transposed)[0]
        home.float().square().sum().backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        grads = [grad.transpose(1, 2) for grad in grads] if transposed else grads
        assert x.grad is not None
        return [home.detach(), x.grad, *grads]


def compare(found: list[list[Tensor]], expected: list[list[Tensor]], tolerance: float = 1e-5) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == 4
        for one, other in zip(mine, theirs, strict=True):
            largest = float(other.abs().max()) if other.numel() else 0.0
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"transposed": True}, {"tensors": True}], ids=str)
def test_there_and_back_between_threads(
    world: int, options: dict[str, bool], dtype: torch.dtype, tolerance: float, clusters: Any
) -> None:
    layer = Layer(world, dtype)
    compare(clusters[world].run(layer.on_ranks, **options), layer.one_process(), tolerance)


def test_more_rows_than_one_dispatch_takes() -> None:
    layer = Layer(2, most=1000)
    assert layer.counts.max() > 4096 // 2
    with ascend_moe.LocalCluster(2, window_mib=1) as cluster:
        compare(cluster.run(layer.on_ranks), layer.one_process())


def test_rows_travel_a_few_at_a_time_where_windows_are_small() -> None:
    wide = torch.randn(40, 4096).bfloat16()

    def run(rank: int, group: str) -> list[Tensor]:
        return [exchange(wide * (rank + 1), [25, 15], [25 - 10 * rank] * 2, Place(group, 2, rank))]

    with ascend_moe.LocalCluster(2, window_mib=1) as cluster:
        (zero,), (one,) = cluster.run(run)
    assert torch.equal(zero, torch.cat([wide[:25], 2 * wide[:25]]))
    assert torch.equal(one, torch.cat([wide[25:], 2 * wide[25:]]))


def in_a_process(world: int, rank: int) -> list[Tensor]:
    return Layer(world).on_ranks(rank, ascend_moe.comm_name())


def test_there_and_back_over_a_process_group() -> None:
    with Ranks(2) as ranks:
        for rank in range(2):
            ranks.start(rank, in_a_process, 2, rank)
        compare(values([ranks.wait(rank) for rank in range(2)]), Layer(2).one_process())


def test_order_of_rows_and_the_shared_expert(clusters: Any) -> None:
    layer = Layer(2)
    shared, matrix = torch.randn(3, 4), torch.randn(4, 7)

    def run(rank: int, group: str) -> None:
        weight = layer.up.detach()[rank * LOCAL :][:LOCAL]
        send, receive = layer.send(rank), layer.receive(rank)
        options: dict[str, Any] = {"mm_x": shared, "mm_weight": matrix.t(), "trans_mm_weight": True}
        at = (weight, group, 2, send, receive)
        y, product, rows = npu_alltoallv_gmm(layer.x[rank].detach(), *at, permute_out_flag=True, **options)
        assert torch.equal(product, shared @ matrix)
        wanted = [
            layer.x[source].detach().split(layer.send(source))[rank * LOCAL + expert]
            for expert in range(LOCAL)
            for source in range(2)
        ]
        assert torch.equal(rows, torch.cat(wanted))
        assert y.shape == (sum(receive), WIDTH)
        leaves = [each.clone().requires_grad_() for each in (shared, matrix.t())]
        options |= {"mm_x": leaves[0], "mm_weight": leaves[1]}
        npu_gmm_alltoallv(y, weight.transpose(1, 2), group, 2, receive, send, **options)[1].sum().backward()
        expected = torch.ones(3, 7) @ matrix.t(), (shared.t() @ torch.ones(3, 7)).t()
        for leaf, grad in zip(leaves, expected, strict=True):
            torch.testing.assert_close(leaf.grad, grad)

    clusters[2].run(run)


def test_a_rank_that_uses_no_rows_takes_part_in_their_backward(clusters: Any) -> None:
    """Rank 1's loss is of the shared product alone; rank 0 sends the gradients of its rows there all the same."""
    layer = Layer(2)
    owner = torch.arange(layer.experts).repeat_interleave(layer.counts[0]) // LOCAL

    def run(rank: int, group: str) -> None:
        x = layer.x[rank].detach().clone().requires_grad_()
        options = {"mm_x": torch.ones(1, 4), "mm_weight": torch.ones(4, 7, requires_grad=True)}
        weight = torch.ones(LOCAL, HIDDEN, WIDTH)
        rows, product, _ = npu_alltoallv_gmm(x, weight, group, 2, layer.send(rank), layer.receive(rank), **options)
        (product if rank == 1 else rows).sum().backward()
        assert x.grad is not None
        if rank == 0:  # all rows are its own
            assert torch.equal(x.grad, torch.where(owner == 0, float(WIDTH), 0.0)[:, None].expand_as(x))

    clusters[2].run(run)


def test_counts_of_ranks_that_do_not_fit_are_refused(clusters: Any) -> None:
    def run(rank: int, group: str) -> None:
        weight = torch.ones(1, HIDDEN, WIDTH)
        with pytest.raises(ArgumentError, match=rf"recv_counts are {3 + rank} rows, but 2 arrived"):
            npu_alltoallv_gmm(torch.ones(2, HIDDEN), weight, group, 2, [1, 1], [1, 2 + rank])

    clusters[2].run(run)


@pytest.fixture
def sound(group_ep: str) -> dict[str, Any]:
    counts = [2, 0, 3]
    return {
        "gmm_x": torch.randn(5, HIDDEN), "gmm_weight": torch.randn(LOCAL, HIDDEN, WIDTH), "hcom": group_ep,
        "ep_world_size": 1, "send_counts": counts, "recv_counts": counts,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["npu_alltoallv_gmm", "npu_gmm_alltoallv"])
def test_opcheck(name: str, sound: dict[str, Any]) -> None:
    shared = {"mm_x": torch.randn(2, 4), "mm_weight": torch.randn(4, 3)}
    more = {"permute_out_flag": True} if name == "npu_alltoallv_gmm" else {}
    for wanting in (False, True):
        for leaf in (sound["gmm_x"], sound["gmm_weight"], *shared.values()):
            leaf.requires_grad_(wanting)
        assert len(torch.library.opcheck(getattr(OPS, name).default, (), sound | shared | more)) == 4


@pytest.mark.parametrize(
    ("change", "argument", "words"),
    [
        ({"gmm_x": torch.zeros(4, HIDDEN)}, "gmm_x", "has 4 rows, the sum of send_counts is 5"),
        ({"gmm_x": torch.zeros(5, HIDDEN).int()}, "gmm_x", "it must be bfloat16 or float16 or float32"),
        ({"gmm_weight": torch.zeros(LOCAL, 5, WIDTH)}, "gmm_weight", "multiplies rows of 5, gmm_x has 6"),
        ({"send_counts": [5, 0]}, "send_counts", "has 2 counts; need 3: 3 experts of each of 1 ranks"),
        ({"recv_counts": [-1, 0, 6]}, "recv_counts", "contains -1; a count is at least 0"),
        *(
            ({name: wrong}, name, ".")
            for name in ("send_counts", "recv_counts")
            for wrong in ([1.9, 0, 3.2], [True] * 3)
        ),
        ({"send_counts": WIDE, "recv_counts": WIDE}, "gmm_x", f"the sum of send_counts is {2**32 + 5}"),
        ({"hcom": "nobody"}, "hcom", "'nobody', which names no open group"),
        ({"ep_world_size": 2}, "ep_world_size", "is 2 but group '0' has 1 ranks"),
        ({"mm_x": torch.zeros(2, 2)}, "mm_weight", "and mm_x must be passed together"),
        ({"mm_x": torch.zeros(2, 2), "mm_weight": torch.zeros(3, 2)}, "mm_weight", r"is \(3, 2\)"),
        ({"comm_mode": "ai_cpu"}, "comm_mode", "is not supported off the NPU"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_refused(change: dict[str, Any], argument: str, words: str, sound: dict[str, Any]) -> None:
    for function in (npu_alltoallv_gmm, npu_gmm_alltoallv):
        refused(argument, function, **sound | change, says=words)
