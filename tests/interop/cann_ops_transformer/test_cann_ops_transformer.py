"""cann_ops_transformer.ops: MoeDistributeBuffer against the operators, MegaMoe's pair, and how the module stands in."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_processes
from routed_tokens import KINDS, randn, routed

import ascend_moe
from ascend_moe import LocalCluster, plan
from ascend_moe.errors import ArgumentError, AscendMoeError, WindowTooSmall
from ascend_moe.interop import cann_ops_transformer as standin

E, K, H, MOST = 8, 3, 64, 12
BF16 = torch.bfloat16


@pytest.fixture
def ops() -> Iterator[ModuleType]:
    standin.install()
    yield importlib.import_module("cann_ops_transformer.ops")
    standin.uninstall()


# ---- the buffer


def round_trip(rank: int, buffer: Any, kind: str, tokens: int, quant_mode: int, **options: Any) -> None:
    """Both methods against both operators."""
    x, ids = randn(tokens, H, seed=rank).to(BF16), routed(tokens, E, K, kind)
    weights, shared = randn(tokens, K, seed=3).softmax(1), randn(tokens, H, seed=4).to(BF16)
    mask = torch.arange(tokens) % 3 != 1
    smooth = randn(E, H, seed=5).abs() + 0.5 if quant_mode else None
    place = (buffer.group_name, buffer.world_size, rank, E)
    given: dict[str, Any] = {"x_active_mask": mask, **options}
    op_given = {"x_active_mask": mask, "global_bs": MOST * buffer.world_size}
    found = buffer.low_latency_dispatch(
        x, ids, E, x_smooth_scale=smooth, topk_weights=weights, quant_mode=quant_mode, **given
    )
    expected = ascend_moe.npu_moe_distribute_dispatch_v2(
        x, ids, *place, scales=smooth, expert_scales=weights, quant_mode=quant_mode, **op_given
    )
    used = int(expected.ep_recv_counts[E - 1])
    assert len(found) == 6 and torch.equal(found[3], expected[3]) and torch.equal(found[4], expected[4])
    for at, name in ((0, "expand_x"), (1, "dynamic_scales"), (5, "expand_scales")):
        if name != "dynamic_scales" or quant_mode:
            assert torch.equal(found[at][:used], getattr(expected, name)[:used]), name
        assert getattr(found, name) is found[at]
    assert torch.equal(found[2][: 3 * used], expected[2][: 3 * used])
    rows = expected.expand_x.to(BF16)
    y = buffer.low_latency_combine(
        rows, ids, weights, *found[2:5:2], num_experts=E, expand_scales=found[5], shared_expert_x=shared, **given
    )
    triples, counts = expected[2], expected[4]
    whole = ascend_moe.npu_moe_distribute_combine_v2(
        rows, ids, triples, counts, weights, *place, shared_expert_x=shared, **op_given
    )
    assert torch.equal(y, whole) and bool((y[~mask] == 0).all())


@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_buffer_is_the_operators(clusters: Any, world: int, quant_mode: int) -> None:
    def body(rank: int, group: str) -> None:
        buffer = standin.MoeDistributeBuffer(group)
        assert (buffer.world_size, buffer.rank_id, buffer.group) == (world, rank, group)
        for number, kind in enumerate(KINDS):
            algorithm = ("", "fullmesh_v1", "fullmesh_v2", "direct")[number]
            tokens = (rank * 5 + number) % MOST  # none on rank 0 in the first case
            options = {"comm_alg": algorithm, "num_max_dispatch_tokens_per_rank": MOST}
            round_trip(rank, buffer, kind, tokens, quant_mode, **options)

    clusters[world].run(body)


def test_signatures_are_canns_and_refusals_name_the_operator(clusters: Any) -> None:
    """The keywords of CANN's documents, in their order; what the operators refuse, by the operator's name."""
    names = {
        "low_latency_dispatch": (
            "x topk_idx num_experts quant_mode comm_alg x_smooth_scale x_active_mask topk_weights zero_expert_num "
            "copy_expert_num const_expert_num elastic_info expert_shard_type shared_expert_num shared_expert_rank_num "
            "expert_token_nums_type num_max_dispatch_tokens_per_rank y_dtype x_dtype x_smooth_scales_dtype"
        ),
        "low_latency_combine": (
            "x topk_idx topk_weights assist_info_for_combine ep_send_counts num_experts comm_alg comm_quant_mode "
            "x_active_mask expand_scales shared_expert_x elastic_info ori_x const_expert_alpha_1 const_expert_alpha_2 "
            "const_expert_v zero_expert_num copy_expert_num const_expert_num expert_shared_type shared_expert_num "
            "shared_expert_rank_num num_max_dispatch_tokens_per_rank"
        ),
    }
    for method, arguments in names.items():
        found = inspect.signature(getattr(standin.MoeDistributeBuffer, method)).parameters
        assert " ".join(found) == f"self {arguments}"

    def body(rank: int, group: str) -> None:
        buffer = standin.MoeDistributeBuffer(group)
        x, ids = randn(2, H).to(BF16), routed(2, E, K)
        for argument, value in (("zero_expert_num", -1), ("shared_expert_num", 2), ("quant_mode", 3), ("x_dtype", 1)):
            with pytest.raises(ArgumentError, match=argument):
                buffer.low_latency_dispatch(x, ids, E, **{argument: value})
        sent = buffer.low_latency_dispatch(x, ids, E)
        for argument, value in (("comm_quant_mode", 1), ("ori_x", x[:1]), ("expert_shared_type", 1)):
            named = argument.replace("shared_type", "shard_type")
            with pytest.raises(ArgumentError, match=named):
                arguments = (sent.expand_x, ids, torch.ones(2, K), sent.assist_info_for_combine, sent.ep_recv_counts)
                buffer.low_latency_combine(*arguments, num_experts=E, **{argument: value})
        with pytest.raises(TypeError, match="Did you mean 'topk_weights'"):
            buffer.low_latency_dispatch(x, ids, E, topk_weight=None)

    clusters[1].run(body)
    with pytest.raises(ArgumentError, match="group of 'nobody' names no live group"):
        standin.MoeDistributeBuffer("nobody")
    with pytest.raises(ArgumentError, match="comm_alg is 'ring'"):
        standin.MoeDistributeBuffer("nobody", comm_alg="ring")


def test_the_size_is_what_the_windows_need() -> None:
    size = standin.MoeDistributeBuffer.get_low_latency_ccl_buffer_size
    request = plan.Request(2, 32, 8, 2048, 512, False)
    assert size(2, 512, 2048, 32, 8) == plan.window_need(request)["buffsize_mib"] > 1

    def body(rank: int, group: str) -> bool:
        buffer = standin.MoeDistributeBuffer(group)
        ids = torch.empty(0, 8, dtype=torch.int32)
        try:
            x = torch.empty(0, 2048, dtype=BF16)
            buffer.low_latency_dispatch(x, ids, 32, num_max_dispatch_tokens_per_rank=512, comm_alg="window")
        except WindowTooSmall:
            return False
        return True

    needed = size(2, 512, 2048, 32, 8, comm_alg="window")
    for window, enough in ((needed, True), (needed // 2, False)):
        with LocalCluster(2, window_mib=window) as cluster:
            assert cluster.run(body) == [enough, enough]
    for wrong, argument in (
        ((2, 512, 2048, 33, 8), "moe_expert_num"),
        ((2, 0, 2048, 32, 8), "num_max_dispatch_tokens_per_rank"),
        ((2, 512, 2048, 32, None), "topk"),
        ((2, 512, 2048, 32, 8, 2), "num_shared_expert"),
        ((2, 512, 2048, 32, 8, 1, 1), "num_shared_expert_ranks"),
    ):
        with pytest.raises(ArgumentError, match=argument):
            size(*wrong)


# ---- the module


def test_install_and_uninstall() -> None:
    assert importlib.util.find_spec("cann_ops_transformer") is None
    standin.uninstall()
    whole = standin.install()
    assert standin.install() is whole and "ascend_moe" in str(whole.__doc__)
    import cann_ops_transformer.ops as found  # type: ignore[import-not-found]

    assert importlib.util.find_spec("cann_ops_transformer") is not None
    assert found.mega_moe is ascend_moe.fused.mega_moe and found.MoeDistributeBuffer is standin.MoeDistributeBuffer
    assert found.get_symm_buffer_for_mega_moe is ascend_moe.fused.get_symm_buffer_for_mega_moe
    with pytest.raises(ImportError):
        importlib.import_module("cann_ops_transformer.common")
    standin.uninstall()
    assert not [name for name in sys.modules if name.startswith("cann_ops_transformer")]
    assert importlib.util.find_spec("cann_ops_transformer") is None


def test_it_stands_in_for_nothing_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cann_ops_transformer").mkdir()
    (tmp_path / "cann_ops_transformer" / "__init__.py").write_text("ops = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for _ in range(2):  # before it is imported, and after
            with pytest.raises(AscendMoeError, match="cann_ops_transformer can be imported here"):
                standin.install()
            real = importlib.import_module("cann_ops_transformer")
            standin.uninstall()
            assert sys.modules["cann_ops_transformer"] is real
    finally:
        del sys.modules["cann_ops_transformer"]


def in_a_process(rank: int) -> list[torch.Tensor]:
    """vllm-ascend's way: the module by its name, a process group; must be importable by name."""
    standin.install()
    ops = importlib.import_module("cann_ops_transformer.ops")
    torch.manual_seed(1)
    w1, w2 = [torch.randn(H, 64).to(BF16) for _ in range(2)], [torch.randn(32, H).to(BF16) for _ in range(2)]
    x, ids, probs = randn(6, H, seed=rank).to(BF16), routed(6, 4, 2), torch.full((6, 2), 0.5)
    buffer = ops.get_symm_buffer_for_mega_moe(dist.group.WORLD, 4, 6, 2, hidden=H, intermediate_hidden=64)
    mask = (torch.arange(6) < 5).to(torch.int8)
    y, nums = ops.mega_moe(x, ids, probs, w1, w2, buffer, x_active_mask=mask)
    low_latency = ops.MoeDistributeBuffer(dist.group.WORLD)
    sent = low_latency.low_latency_dispatch(x, ids, 4, x_active_mask=mask.bool())
    return [y, nums, sent.expert_token_nums]


def test_processes_of_a_process_group(tmp_path: Path) -> None:
    for y, nums, counts in run_processes(2, in_a_process, tmp_path):
        assert bool((y[5] == 0).all()) and bool((y[:5] != 0).any()) and torch.equal(nums.long(), counts)
        assert nums.dtype == torch.int32


def test_mega_moe_by_the_modules_name(ops: ModuleType, clusters: Any) -> None:
    def body(rank: int, group: str) -> None:
        buffer = ops.get_symm_buffer_for_mega_moe(group, 4, 6, 2, H, 32)
        x, ids = randn(6, H).to(BF16), routed(6, 4, 2)
        w1, w2 = randn(4, H, 64).to(BF16), randn(4, 32, H).to(BF16)
        y, _ = ops.mega_moe(x, ids, torch.ones(6, 2), [w1], [w2], buffer)
        assert y.shape == x.shape and bool(y.isfinite().all())

    clusters[1].run(body)
