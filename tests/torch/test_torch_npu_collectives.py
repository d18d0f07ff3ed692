"""Barrier, and combine with residual and RMS norm: over the threads of a LocalCluster and over processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch_calls import local_addends

import ascend_moe
from ascend_moe import npu_moe_distribute_combine_v2, npu_moe_distribute_dispatch_v2
from ascend_moe.errors import ArgumentError, CommTimeout, ConfigMismatch, WindowTooSmall
from ascend_moe.npu import _npu_distribute_barrier, npu_moe_distribute_combine_add_rms_norm
from ascend_moe.reference import OWN_TERMS

OPS = torch.ops.ascend_moe
EXPERTS, TOPK, HIDDEN = 4, 2, 48
SPECIAL = {"zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 2}
NAME = "npu_moe_distribute_combine_add_rms_norm"


# ---- barrier


@pytest.mark.parametrize("world", [1, 4])
def test_barrier_passes_any_tensor_through(world: int, clusters: Any) -> None:
    def each(rank: int, group: str) -> None:
        for x in (torch.arange(3), torch.ones(2, 0), torch.tensor(True), torch.randn(3, 4).t()):
            passed = OPS._npu_distribute_barrier(x, group, world)
            assert passed.dtype == x.dtype and torch.equal(passed, x) and passed.is_contiguous()
            assert passed.data_ptr() != x.data_ptr() or x.numel() == 0

    clusters[world].run(each)


def test_barrier_waits_for_the_late_rank(clusters: Any) -> None:
    arrived, left = [0.0] * 3, [0.0] * 3

    def each(rank: int, group: str) -> None:
        for round_, late in enumerate((2, 0, 1)):
            if rank == late:
                time.sleep(0.1)
            arrived[rank] = time.monotonic()
            _npu_distribute_barrier(torch.ones(1), group, 3, time_out=torch.tensor([20_000_000]).int())
            left[rank] = time.monotonic()
            _npu_distribute_barrier(torch.ones(1), group, 3)
            assert min(left) >= arrived[late], (round_, arrived, left)
            _npu_distribute_barrier(torch.ones(1), group, 3)

    clusters[3].run(each)


def test_barrier_names_the_missing_rank_after_its_own_time_out() -> None:
    gone = threading.Event()
    waited: dict[int, float] = {}

    def each(rank: int, group: str) -> None:
        _npu_distribute_barrier(torch.ones(1), group, 3)
        if rank == 1:
            gone.wait(15)
            return
        start = time.monotonic()
        with pytest.raises(CommTimeout, match="rank 1") as caught:
            _npu_distribute_barrier(torch.ones(1), group, 3, time_out=torch.tensor([400_000]).int())
        assert caught.value.rank == 1
        waited[rank] = time.monotonic() - start
        # Fatal, as for dispatch: the communicator stays failed.
        with pytest.raises(CommTimeout):
            _npu_distribute_barrier(torch.ones(1), group, 3)
        if len(waited) == 2:
            gone.set()

    with ascend_moe.LocalCluster(3) as cluster:
        cluster.run(each)
    assert set(waited) == {0, 2} and 0.3 < max(waited.values()) < 10, waited


def test_barrier_against_a_dispatch_is_a_named_mismatch(clusters: Any) -> None:
    def each(rank: int, group: str) -> None:
        with pytest.raises(ConfigMismatch):
            if rank == 0:
                _npu_distribute_barrier(torch.ones(1), group, 2)
            else:
                x, chosen = torch.ones(1, HIDDEN), torch.zeros(1, TOPK, dtype=torch.int32)
                npu_moe_distribute_dispatch_v2(x, chosen, group, 2, rank, EXPERTS)
        # Collective, not fatal: the group goes on.
        _npu_distribute_barrier(torch.ones(1), group, 2)

    clusters[2].run(each)


def test_barrier_names_wrong_arguments(group_ep: str) -> None:
    x = torch.ones(1)

    def refused(argument: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ArgumentError, match=argument) as caught:
            OPS._npu_distribute_barrier(*args, **kwargs)
        assert caught.value.argument == argument

    refused("group", x, "nobody", 1)
    refused("world_size", x, group_ep, 2)
    refused("elastic_info", x, group_ep, 1, elastic_info=torch.zeros(6, dtype=torch.int32))
    for time_out in (torch.tensor([0]).int(), torch.tensor([1.0]), torch.tensor([1, 2]).int()):
        refused("time_out", x, group_ep, 1, time_out=time_out)
    assert torch.equal(OPS._npu_distribute_barrier(x, group_ep, 1), x)
    with ascend_moe.LocalCluster(1) as cluster:
        refused("group", x, cluster.name, 1)  # which rank is this?


# ---- combine, residual, norm


def layer(
    rank: int, world: int, group: str, dtype: torch.dtype, batch: int, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the operator behind a dispatch; the experts double their rows."""
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    every = EXPERTS + sum(kwargs.get(name, 0) for name in SPECIAL)
    chosen = torch.randint(0, every, (batch, TOPK), generator=generator, dtype=torch.int32)
    place = (group, world, rank, EXPERTS)
    common = {name: kwargs[name] for name in ("x_active_mask", "global_bs", *SPECIAL) if name in kwargs}
    sent = npu_moe_distribute_dispatch_v2(random(batch, HIDDEN), chosen, *place, **common)
    weights = torch.rand((batch, TOPK), generator=generator)
    args = (sent[0] * 2, chosen, sent[2], sent[4], weights, random(batch, 1, HIDDEN), random(HIDDEN), *place)
    return args, kwargs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["plain", "shared", "masked", "unequal", "none here", "numbers", "products"])
def test_add_rms_norm_is_the_formula(form: str, dtype: torch.dtype, clusters: Any) -> None:
    world, eps = 2, 1e-5

    def each(rank: int, group: str) -> None:
        batch = {"unequal": 5 - 2 * rank, "none here": 5 * rank}.get(form, 5)
        kwargs: dict[str, Any] = {"global_bs": world * 5} if form in ("unequal", "none here") else {}
        if form == "masked":
            kwargs["x_active_mask"] = torch.tensor([[True, False], [False, False]] * 2 + [[True, True]])
        if form in ("numbers", "products"):  # copy and const experts, whose factors are either
            alphas, own = ((2,) if form == "numbers" else (2, HIDDEN)), torch.Generator().manual_seed(9 + rank)
            shapes = {"ori_x": (batch, HIDDEN), "const_expert_v": (2, HIDDEN)}
            shapes |= {"const_expert_alpha_1": alphas, "const_expert_alpha_2": alphas}
            kwargs |= {name: torch.randn(shape, generator=own).to(dtype) for name, shape in shapes.items()} | SPECIAL
        args, kwargs = layer(rank, world, group, dtype, batch, **kwargs)
        if form == "shared":
            kwargs |= local_addends(torch.randn(batch, 1, HIDDEN).to(dtype))
        y, rstd, x = npu_moe_distribute_combine_add_rms_norm(*args, **kwargs, norm_eps=eps)
        assert (y.dtype, rstd.dtype, x.dtype) == (dtype, torch.float32, dtype)
        assert (y.shape, rstd.shape, x.shape) == ((batch, 1, HIDDEN), (batch, 1, 1), (batch, 1, HIDDEN))
        # The same rows summed in fp32 by the combine that is tested elsewhere, and not rounded.
        kwargs |= {name: kwargs[name].float() for name in OWN_TERMS if name in kwargs}
        acc = npu_moe_distribute_combine_v2(args[0].float(), *args[1:5], *args[7:], **kwargs)
        # Each rounding where the formula has one; a sum rounded before the residual is another.
        total, gamma = acc + args[5].reshape(batch, HIDDEN).float(), args[6].float()
        assert torch.equal(x.reshape(batch, HIDDEN), total.to(dtype))
        scaled = (total * rstd.reshape(batch, 1)).to(dtype).float()
        assert torch.equal(y.reshape(batch, HIDDEN), (scaled * gamma).to(dtype))
        mean = total.double().square().mean(1)
        assert torch.allclose(rstd.reshape(batch).double(), (mean + eps).rsqrt(), rtol=1e-6)

    clusters[world].run(each)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({5: torch.ones(5, HIDDEN)}, "residual_x"),
        ({5: torch.ones(5, 1, HIDDEN, dtype=torch.float16)}, "residual_x"),
        ({6: torch.ones(HIDDEN - 1)}, "gamma"),
        ({2: torch.zeros(3, dtype=torch.int32)}, "expand_idx"),
        ({3: torch.zeros(1, dtype=torch.int64)}, "ep_send_counts"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"out_dtype": 1}, "out_dtype"),
        *(({name: torch.ones(1)}, name) for name in ("group_list", "activation_scale", "weight_scale")),
        ({"elastic_info": torch.zeros(6, dtype=torch.int32)}, "elastic_info"),
        ({"tp_world_size": 2}, "tp_world_size"),
        ({"zero_expert_num": -1}, "zero_expert_num"),
        ({"copy_expert_num": 1}, "ori_x"),
        *(({name: torch.ones(5, HIDDEN).half()}, name) for name in ("ori_x", *local_addends(None))),
        ({"comm_alg": "no such"}, "comm_alg"),
    ],
    ids=str,
)
def test_add_rms_norm_names_wrong_arguments(changed: dict[Any, Any], argument: str, group_ep: str) -> None:
    args, _ = layer(0, 1, group_ep, torch.float32, 5)
    wrong = [changed.get(index, value) for index, value in enumerate(args)]
    kwargs = {name: value for name, value in changed.items() if isinstance(name, str)}
    with pytest.raises(ArgumentError) as caught:
        OPS.npu_moe_distribute_combine_add_rms_norm(*wrong, **kwargs)
    assert caught.value.argument == argument
    assert "combine_v2" not in str(caught.value) and "assist_info" not in str(caught.value)
    npu_moe_distribute_combine_add_rms_norm(*args)


def test_a_window_too_small_for_fp32_rows_says_how_many_mib() -> None:
    batch, hidden = 60, 8192

    def each(rank: int, group: str) -> None:
        place = (group, 1, 0, 1)
        x, chosen = torch.ones(batch, hidden, dtype=torch.bfloat16), torch.zeros(batch, 1, dtype=torch.int32)
        sent = npu_moe_distribute_dispatch_v2(x, chosen, *place)
        tensors = (sent[0], chosen, sent[2], sent[4], torch.ones(batch, 1))
        npu_moe_distribute_combine_v2(*tensors, *place)
        with pytest.raises(WindowTooSmall, match=NAME) as caught:
            npu_moe_distribute_combine_add_rms_norm(*tensors, x.unsqueeze(1), x[0], *place)
        assert caught.value.needed_mib > 2

    with ascend_moe.LocalCluster(1, window_mib=2) as cluster:
        cluster.run(each)


def test_opcheck_of_both_and_gradients(group_ep: str) -> None:
    args, _ = layer(0, 1, group_ep, torch.bfloat16, 5)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    fused = OPS.npu_moe_distribute_combine_add_rms_norm.default
    torch.library.opcheck(fused, args, test_utils=tests)
    barrier = (torch.ones(3, 4), group_ep, 1)
    torch.library.opcheck(OPS._npu_distribute_barrier.default, barrier, test_utils=tests)
    args = [arg.float() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
    args[0][int(args[3][-1]) :] = 0
    leaves = [args[place].requires_grad_() for place in (0, 4, 5, 6)]  # rows, weights, residual, gamma

    def run(*_: torch.Tensor) -> Any:
        return fused(*args)

    assert torch.autograd.gradcheck(run, leaves, eps=1e-2, atol=2e-2, rtol=2e-2)
