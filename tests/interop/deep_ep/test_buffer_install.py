"""import deep_ep after install(), and a Buffer of a process group."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_ep_buffers import Case, finish, low, low_sum, send
from gloo_ranks import run_processes

from ascend_moe import LocalCluster
from ascend_moe.errors import ArgumentError, InvalidExpertId
from ascend_moe.interop import deep_ep
from ascend_moe.interop.deep_ep import AscendBuffer, Buffer, Config, EventHandle, EventOverlap, strategies


@pytest.fixture
def uninstalled() -> Any:
    yield
    deep_ep.uninstall()


def test_install_and_uninstall(uninstalled: None) -> None:
    assert "deep_ep" not in sys.modules and "deep_ep_cpp" not in sys.modules
    deep_ep.uninstall()  # nothing to undo
    deep_ep.install()
    import deep_ep as installed  # type: ignore[import-not-found]
    import deep_ep_cpp  # type: ignore[import-not-found]

    assert (installed.Buffer, installed.utils.EventOverlap) == (Buffer, EventOverlap)
    assert (installed.Config, installed.topk_idx_t) == (Config, torch.int64)
    for name in ("deep_ep", "deep_ep_cpp", "deep_ep.utils"):  # how callers ask whether it is there
        assert importlib.util.find_spec(name) is not None
    assert deep_ep_cpp.EventHandle is EventHandle
    runtime = deep_ep_cpp.Buffer(0, 1, 0, 0, False, "nobody")
    assert all(callable(getattr(runtime, name)) for name in ("intranode_dispatch", "low_latency_combine"))
    deep_ep.install("ascend")
    import deep_ep as ascend

    assert "quant_mode" in inspect.signature(ascend.Buffer.dispatch).parameters  # SGLang asks so
    assert ascend.Buffer is AscendBuffer and ascend.NormalStrategy.ALLTOALL == "alltoall"
    deep_ep.install(package=False)
    assert "deep_ep" not in sys.modules and "deep_ep_cpp" in sys.modules
    other = sys.modules["deep_ep"] = type(sys)("deep_ep")
    deep_ep.install()
    deep_ep.uninstall()
    assert sys.modules.pop("deep_ep") is other and "deep_ep_cpp" not in sys.modules
    with pytest.raises(ArgumentError, match="flavour is 'x'"):
        deep_ep.install("x")


# The public names of sgl-kernel-npu's package by its modules, without what these import from elsewhere.
SGL = {
    "deep_ep": "Buffer Config EventOverlap LowLatencyStrategy NormalStrategy current_dir lib_path opp_path",
    "deep_ep.buffer": "Buffer Config EventHandle EventOverlap FuseMode LowLatencyStrategy NormalStrategy StrategyMap "
    "get_low_latency_strategy get_normal_strategy log_parameters",
    "deep_ep.ep_strategy": "EPCommStrategy EventOverlap LowLatencyEPCommStrategy LowLatencyStrategy "
    "NormalEPCommStrategy NormalStrategy StrategyMap VALID_QUANT_MODES get_low_latency_strategy get_normal_strategy "
    "register_low_latency_strategy register_normal_strategy",
    "deep_ep.strategies": "AlltoAllNormalCommStrategy DefaultLowLatencyCommStrategy DefaultNormalCommStrategy "
    "EPCommStrategy LowLatencyEPCommStrategy NormalEPCommStrategy OpsLowLatencyCommStrategy get_low_latency_strategy "
    "get_normal_strategy register_low_latency_strategy register_normal_strategy",
    "deep_ep.strategies.normal_strategy": "AlltoAllNormalCommStrategy COMM_STREAM DefaultNormalCommStrategy "
    "EventHandle EventOverlap NormalEPCommStrategy VALID_QUANT_MODES register_normal_strategy",
    "deep_ep.strategies.low_latency_strategy": "AllToAllLowLatencyCommStrategy DefaultLowLatencyCommStrategy "
    "EventHandle EventOverlap LowLatencyEPCommStrategy OpsLowLatencyCommStrategy register_low_latency_strategy",
    "deep_ep.utils": "Config EventHandle EventOverlap get_simplify_tensor log_parameters logger",
    "deep_ep_cpp": "Buffer Config EventHandle get_low_latency_rdma_size_hint",
}
DEEPEP = {
    "deep_ep": "Buffer Config ElasticBuffer EPHandle EventHandle EventOverlap check_nccl_so find_cuda_home "
    "find_nccl_root get_logical_domain_size get_physical_domain_size init_jit topk_idx_t",
    "deep_ep.buffer": "Buffer Config EventHandle EventOverlap",
    "deep_ep.buffers": "elastic legacy",
    "deep_ep.buffers.legacy": "Buffer Config EventHandle EventOverlap",
    "deep_ep.utils": "EventHandle EventOverlap check_nvlink_connections comm find_pkgs gate refs semantic",
    "deep_ep.utils.event": "EventHandle EventOverlap",
    "deep_ep.utils.envs": "check_fast_rdma_atomic_support check_nvlink_connections check_torch_deterministic "
    "dist_print get_global_seed get_local_seed get_logical_domain_size get_nvlink_gbs get_physical_domain_size "
    "get_rdma_gbs init_dist init_seed",
    "deep_ep.utils.math": "align calc_diff ceil_div count_bytes create_grouped_scores hash_tensor hash_tensors "
    "inplace_unique per_token_cast_back per_token_cast_to_fp8 safe_div",
    "deep_ep.utils.testing": "bench bench_kineto empty_suppress flush_l2_cache suppress_stdout_stderr",
}


@pytest.mark.parametrize(("flavour", "listed"), [("ascend", SGL), ("deepep", DEEPEP)])
def test_every_public_name_of_theirs_is_ours_or_refused(
    uninstalled: None, flavour: str, listed: dict[str, str]
) -> None:
    deep_ep.install(flavour)
    for module, line in listed.items():
        here = importlib.import_module(module)
        for name in line.split():
            reason = deep_ep.REFUSED[flavour].get(f"{module}.{name}")
            if reason is None:
                scope: dict[str, Any] = {}
                exec(f"from {module} import {name}", scope)
                ours = deep_ep.CPP if module == "deep_ep_cpp" else deep_ep.OURS[flavour][module]
                submodule = deep_ep.OURS[flavour].get(f"{module}.{name}")
                assert submodule is not None or scope[name] is ours[name]
                assert scope[name] is getattr(here, name)
                continue
            assert not hasattr(here, name)  # how callers ask
            for statement in (f"from {module} import {name}", f"import {module}.{name}"):
                with pytest.raises(
                    ImportError, match=f"^{module}.{name} is not in ascend_moe.interop.deep_ep: "
                ) as raised:
                    exec(statement, {})
                assert str(raised.value).endswith(reason) and "\n" not in str(raised.value)
    assert {name.rpartition(".")[0] for name in deep_ep.REFUSED[flavour]} <= set(listed)
    deep_ep.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deep_ep")


def test_a_strategy_of_a_caller(uninstalled: None) -> None:
    deep_ep.install("ascend")
    theirs = importlib.import_module("deep_ep.strategies")
    get_low_latency_strategy = theirs.get_low_latency_strategy

    @theirs.register_low_latency_strategy("twice")
    class Twice(theirs.DefaultLowLatencyCommStrategy):  # type: ignore[misc,name-defined]
        def low_latency_combine(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().low_latency_combine(x * 2, *args, **kwargs)

    def run(rank: int, group_ep: str) -> None:
        case = Case(world=2)
        given = {"runtime": None, "group": (group_ep, 2, rank)}
        assert get_low_latency_strategy("twice") is Twice and Twice(**given).rank == rank
        assert (Twice(**given).group_name, Twice(**given).group_size) == (group_ep, 2)
        alone = torch.distributed.ProcessGroup(rank, 2)  # all that sgl-kernel-npu's bases take
        assert (Twice(alone).runtime, Twice(alone).group) == (None, alone)
        buffer = deep_ep.AscendBuffer((group_ep, 2, rank), low_latency_strategy="twice")
        total = finish(case, rank, buffer, low(case, rank, buffer))
        assert torch.equal(total, low_sum(case, rank, lambda _: 2.0))
        buffer.low_latency_strategy = get_low_latency_strategy("default")(buffer.runtime, buffer.group)
        assert torch.equal(finish(case, rank, buffer, low(case, rank, buffer)), low_sum(case, rank))

    with LocalCluster(2) as cluster:
        cluster.run(run)
    del strategies.LOW_LATENCY.classes["twice"]
    with pytest.raises(ArgumentError, match="strategy is 'twice'; need one of default"):
        get_low_latency_strategy("twice")
    assert strategies.NormalStrategy.get_all_strategies() == ["default", "alltoall"]
    assert strategies.LowLatencyStrategy.get_all_strategies() == ["default", "ops", "alltoall"]
    assert strategies.AlltoAllNormalCommStrategy().get_name() == "alltoall"
    assert (Twice().get_name(), Twice().get_supported_modes()) == ("twice", ["low_latency"])
    with pytest.raises(ArgumentError, match="comm_alg is 'other'"):
        strategies.OpsLowLatencyCommStrategy(comm_alg="other")


# ---- a Buffer of a process group


def on_a_process_group(rank: int) -> None:
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    case = Case(world=group.size(), kind="-1")
    buffer = Buffer(group)
    x, _, weights, _, handle, _ = send(case, rank, buffer)
    assert torch.equal(buffer.combine(x, handle, weights)[0], case.sent_rows(rank).bfloat16())
    assert torch.equal(finish(case, rank, buffer, low(case, rank, buffer)), low_sum(case, rank))
    for strategy in ("default", "alltoall"):
        ascend: Any = AscendBuffer(group, normal_strategy=strategy, low_latency_strategy=strategy)
        wide = case.ids(rank)
        wide[1, 1] = 2**32 if rank == 0 else wide[1, 1]
        for call in (send, low_of):
            exact = rank == 0 or call is send
            with pytest.raises(InvalidExpertId, match="4294967296" if exact else "2147483647 or more"):
                call(case, rank, ascend, topk_idx=wide)
        rows, _, _, numbers, sent, _ = send(case, rank, ascend)
        if strategy == "alltoall":
            assert sent["topk_weights"] is not None and sent["hidden_shape"] == case.x(rank).shape
        assert numbers == [len(case.rows_of(rank * case.local + expert)) for expert in range(case.local)]
        assert torch.equal(ascend.combine(rows, sent)[0], low_sum(case, rank))
        got = low(case, rank, ascend)
        if strategy == "alltoall":
            check_blocks(case, rank, got)
        assert torch.equal(finish(case, rank, ascend, got), low_sum(case, rank))
        with pytest.raises(ArgumentError, match="topk_idx of token"):
            ascend.low_latency_combine(got[0], case.ids(rank).flip(0), case.weights(rank), got[2])


def low_of(case: Case, rank: int, buffer: Any, topk_idx: torch.Tensor) -> Any:
    return buffer.low_latency_dispatch(case.x(rank), topk_idx, case.most, case.experts, use_fp8=False)


def check_blocks(case: Case, rank: int, got: Any) -> None:
    """Each local expert has ``most`` rows of every source rank, zeros behind those that are there."""
    rows, count, handle, _, _ = got
    most = case.most + 1
    blocks = rows.view(case.local, case.world, most, -1)
    assert count.tolist() == [case.world * most] * case.local and len(handle) == 7
    for expert in range(case.local):
        for source in range(case.world):
            source_indices = [each for each in case.rows_of(rank * case.local + expert) if each[0] == source]
            expected = torch.zeros(most, case.hidden, dtype=rows.dtype)
            for place, (_, token, _) in enumerate(source_indices):
                expected[place] = case.x(source)[token]
            assert torch.equal(blocks[expert, source], expected)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_a_process_group(tmp_path: Path, world: int) -> None:
    run_processes(world, on_a_process_group, tmp_path)


@pytest.fixture
def alone() -> Iterator[Any]:
    """The default group, of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_process_group_of_one(alone: Any) -> None:
    on_a_process_group(0)
