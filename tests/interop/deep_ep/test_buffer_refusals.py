"""What DeepEP's Buffer refuses, integers that int32 does not hold among it, and the small things."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deep_ep_buffers import BF16, BUFFERS, Case, H, finish, low, low_sum, on_all, send
from op_runs import Clusters

from ascend_moe import LocalCluster, comm
from ascend_moe.errors import ArgumentError, ConfigMismatch, InvalidExpertId, RoutingOverflow, WindowTooSmall
from ascend_moe.interop.deep_ep import AscendBuffer, Buffer, Config, EventHandle, EventOverlap, utils

WIDE = [2**31, 2**32, 2**32 + 3, -(2**32), -(2**31) - 1, 2**63 - 1, -(2**63)]
Send = Callable[[Case, int, Any, torch.Tensor], Any]


def low_with(case: Case, rank: int, buffer: Any, ids: torch.Tensor, **more: Any) -> Any:
    given = {"use_fp8": False, **more}
    return buffer.low_latency_dispatch(case.x(rank), ids, case.most, case.experts, **given)


def fused(case: Case, rank: int, buffer: Any, ids: torch.Tensor, fuse_mode: int) -> Any:
    w13, w2 = (torch.ones(case.local, *shape).bfloat16() for shape in ((H, 64), (32, H)))
    given = (case.weights(rank), w13, None, w2, None, 64 if fuse_mode == 1 else 0, case.experts, 0, fuse_mode)
    return buffer.fused_deep_moe(case.x(rank), ids, *given)


SENDS: dict[str, tuple[str, Send]] = {
    "normal": ("deepep", lambda case, rank, buffer, ids: send(case, rank, buffer, topk_idx=ids)),
    "low latency": ("deepep", low_with),
    "hook": ("deepep", lambda *given: low_with(*given, return_recv_hook=True)[4]()),
    "fp8": ("deepep", lambda *given: low_with(*given, use_fp8=True)),
    "ascend, normal": ("ascend", lambda case, rank, buffer, ids: send(case, rank, buffer, topk_idx=ids)),
    "ascend, low latency": ("ascend", low_with),
    "ascend, pertoken": ("ascend", lambda *given: low_with(*given, quant_mode="pertoken_fp8_e4m3")),
    "ascend, fused": ("ascend", lambda *given: fused(*given, 1)),
    "ascend, ffn": ("ascend", lambda *given: fused(*given, 2)),
}


@pytest.mark.parametrize("way", SENDS)
def test_an_id_that_int32_does_not_hold_is_reported_as_it_is(clusters: Clusters, way: str) -> None:
    """The rank that gave it names it; the others do in normal mode, else they know that it is beyond int32."""
    case, draw = Case(kind="-1"), random.Random(way)
    flavour, call = SENDS[way]

    def body(rank: int, buffer: Any) -> None:
        for wrong in draws:
            ids = case.ids(rank)
            if rank == 1:
                ids[3, 2] = wrong
            with pytest.raises(InvalidExpertId) as raised:
                call(case, rank, buffer, ids)
            error: Any = raised.value
            assert (error.rank, error.token, error.k) == (1, 3, 2) and "\n" not in str(error)
            exact = way in ("normal", "ascend, normal") or rank == 1
            assert error.expert_id == (wrong if exact else max(min(wrong, 2**31 - 1), -(2**31)))
            assert str(error.expert_id) in str(error)

    draws = [*draw.sample(WIDE, 2), draw.choice((1, -1)) * draw.randrange(1, 2**30) * 2**32 + draw.randrange(6)]
    draws.append(draw.choice((-2, 6)))  # no expert, and no wide number
    on_all(clusters, case, body, flavour)


@pytest.mark.parametrize("flavour", ["deepep", "ascend"])
def test_combine_takes_the_ids_of_its_dispatch(clusters: Clusters, flavour: str) -> None:
    """Ids permuted within equal counts would be sums of other rows."""
    case = Case()

    def body(rank: int, buffer: Any) -> None:
        sent = low(case, rank, buffer)
        ids = case.ids(rank)
        swapped = ids.clone()
        swapped[:2] = ids[:2].flip(0)
        assert not torch.equal(ids, swapped)
        for other in (swapped, torch.where(ids == ids[1, 1], 2**32 + ids, ids)):
            with pytest.raises(ArgumentError, match=r"topk_idx of token [01], k.* pass dispatch's ids"):
                buffer.low_latency_combine(sent[0], other, case.weights(rank), sent[2])
        assert torch.isfinite(finish(case, rank, buffer, sent)).all()

    on_all(clusters, case, body, flavour)


def layout_of(case: Case, buffer: Any) -> dict[str, torch.Tensor]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.ids(0), case.experts)
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}


def one_wrong(given: torch.Tensor, number: int) -> torch.Tensor:
    wide = given.long().clone()
    wide.view(-1)[-1] = number
    return wide


@pytest.mark.parametrize("flavour", ["deepep", "ascend"])
def test_numbers_that_are_none_are_refused_before_anything_is_sent(clusters: Clusters, flavour: str) -> None:
    case, draw = Case(world=1), random.Random(7)
    wide = [draw.choice((1, -1)) * draw.randrange(1, 2**30) * 2**32 + draw.randrange(1, 6) for _ in range(4)]

    def body(rank: int, buffer: Any) -> None:
        tables = layout_of(case, buffer)
        first, hint = (case.x(0), case.ids(0)), (8, 512, 4, 16)
        calls: list[tuple[str, Callable[[Any], Any]]] = [
            ("num_max_dispatch_tokens_per_rank is", lambda n: buffer.low_latency_dispatch(*first, n, case.experts)),
            ("num_experts is", lambda n: buffer.low_latency_dispatch(*first, case.most, n)),
            ("num_experts is", lambda n: buffer.get_dispatch_layout(case.ids(0), n)),
            ("expert_alignment is", lambda n: send(case, 0, buffer, expert_alignment=n)),
            ("num_worst_tokens is", lambda n: send(case, 0, buffer, num_worst_tokens=n)),
            *((" is |hint", lambda n, i=i: buffer.get_low_latency_rdma_size_hint(*hint[:i], n, *hint[i + 1 :]))
              for i in range(4)),
        ]  # fmt: skip
        for number, (text, call) in itertools.product((*wide, -1, 0.5, True, None), calls):
            with pytest.raises(ArgumentError, match=text):
                call(number)
        if flavour == "deepep":
            for name in ("num_tokens_per_rank", "num_tokens_per_expert"):
                for number in (*wide, -1, 1000):
                    with pytest.raises(ArgumentError, match=f"{name} at .* is {number}; it must be one of 0"):
                        send(case, 0, buffer, **{name: one_wrong(tables[name], number)})
                with pytest.raises(ArgumentError, match=rf"{name} is torch\.float32"):
                    send(case, 0, buffer, **{name: tables[name].float()})
            with pytest.raises(ArgumentError, match=r"is_token_in_rank is torch\.float32"):
                send(case, 0, buffer, is_token_in_rank=tables["is_token_in_rank"].float())
            mask = tables["is_token_in_rank"].long() * 2**32  # a number that is not 0 is True
            assert torch.equal(send(case, 0, buffer, is_token_in_rank=mask)[0], send(case, 0, buffer)[0])
        for ids in (case.ids(0).float(), case.ids(0).short(), case.ids(0).bool()):
            with pytest.raises(ArgumentError, match="topk_idx is torch"):
                send(case, 0, buffer, topk_idx=ids)
            with pytest.raises(ArgumentError, match="topk_idx is torch"):
                low_with(case, 0, buffer, ids)

    on_all(clusters, case, body, flavour)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"x": torch.ones(3, 64, dtype=torch.float16)}, "x"),
        ({"x": torch.ones(3, 128, dtype=torch.bfloat16)}, "H"),
        ({"topk_idx": None}, "K of topk_idx"),
        ({"topk_weights": torch.ones(3, 2)}, "topk_weights"),
    ],
)
def test_rows_with_other_columns_than_on_other_ranks(clusters: Clusters, changed: dict[str, Any], field: str) -> None:
    def run(rank: int, group_ep: str) -> None:
        buffer, ids = Buffer((group_ep, 2, rank)), torch.tensor([[0, 1]] * 3)
        layout = buffer.get_dispatch_layout(ids, 2)
        counts = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2]}
        given: dict[str, Any] = {"x": torch.ones(3, 64, dtype=torch.bfloat16), "topk_idx": ids}
        handle = buffer.dispatch(**given, **counts)[4]
        given |= changed if rank else {}
        cached = {"x": given["x"], "handle": handle}
        for again in [given | counts, cached][: 1 + ("x" in changed)]:
            with pytest.raises(ConfigMismatch, match=rf"{field} is .* on rank {rank} and .* on rank {1 - rank}"):
                buffer.dispatch(**again)

    clusters[2].run(run)


def test_what_is_not_there_is_refused_by_name() -> None:
    case = Case(world=1)

    def run(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, 1, 0))
        sent, normal = low(case, rank, buffer), send(case, 0, buffer)[4]
        shrinkable = Buffer((group_ep, 1, 0), enable_shrink=True)
        ue8m0 = {"use_fp8": True, "round_scale": True, "use_ue8m0": True}
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("use_logfmt is True, but combine's kernel sums", lambda: finish(case, 0, buffer, sent, use_logfmt=True)),
            ("low_latency_update_mask_buffer", lambda: buffer.low_latency_update_mask_buffer(0, True)),
            ("low_latency_query_mask_buffer", lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1).int())),
            ("low_latency_clean_mask_buffer", buffer.low_latency_clean_mask_buffer),
            ("window_empty", lambda: buffer.get_local_buffer_tensor(BF16, use_rdma_buffer=True)),
            ("window_empty", lambda: shrinkable.get_local_buffer_tensor(BF16)),
            ("window_empty", lambda: shrinkable.get_local_buffer_tensor(BF16, offset=32, use_rdma_buffer=True)),
            ("use_ue8m0 is True without round_scale", lambda: low(case, 0, buffer, use_fp8=True, use_ue8m0=True)),
            ("round_scale is True without use_fp8", lambda: low(case, 0, buffer, round_scale=True)),
            ("x has 256 columns; with use_ue8m0", lambda: low(case, 0, buffer, **ue8m0)),
            ("num_tokens_per_rank is missing", lambda: buffer.dispatch(case.x(0))),
            ("handle is a tuple", lambda: buffer.dispatch(case.x(0), handle=tuple(sent[2]))),
            ("topk_idx is given with a handle", lambda: send(case, 0, buffer, handle=normal)),
            ("x has 4 rows; dispatch returned 5", lambda: buffer.combine(case.x(0)[:4], normal)),
            ("bias has 3 tensors", lambda: buffer.combine(case.x(0), normal, bias=(case.x(0),) * 3)),  # type: ignore[arg-type]
            ("per_rank is 3", lambda: buffer.low_latency_dispatch(case.x(0), case.ids(0), 3, case.experts)),
            ("num_experts is 7", lambda: Buffer((group_ep, 2, 0)).get_dispatch_layout(case.ids(0), 7)),
            ("comm is not supported", lambda: Buffer((group_ep, 1, 0), comm=object())),
            ("flavour is 'other'", lambda: Buffer((group_ep, 1, 0), flavour="other")),
            ("explicitly_destroy is False", buffer.destroy),
            ("event is None", lambda: send(case, 0, buffer)[5].current_stream_wait()),
        ]
        for text, call in refused:
            with pytest.raises(ArgumentError, match=text) as caught:
                call()
            assert "\n" not in str(caught.value)
        Buffer((group_ep, 1, 0), explicitly_destroy=True).destroy()

    with LocalCluster(1) as cluster:
        cluster.run(run)


def test_the_same_expert_more_than_once_is_an_overflow(clusters: Clusters) -> None:
    def body(rank: int, buffer: Buffer) -> None:
        ids = torch.zeros(4, 3, dtype=torch.int64)
        x = torch.ones(4, H, dtype=BF16)
        if rank == 0:
            with pytest.raises(RoutingOverflow, match="has 24 rows, but the result has room for 8"):
                buffer.low_latency_dispatch(x, ids, 4, 6, use_fp8=False)
        else:
            buffer.low_latency_dispatch(x, ids, 4, 6, use_fp8=False)

    on_all(clusters, Case(), body)


def test_what_is_not_there_between_servers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    case = Case(world=4)

    def run(rank: int, group_ep: str) -> None:
        for flavour in ("deepep", "ascend"):
            buffer = BUFFERS[flavour]((group_ep, 4, rank))
            per_rank, servers, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.ids(rank), case.experts)
            hits = [{to // 2 for to in case.hit(rank, token)} for token in range(case.tokens(rank))]
            assert servers is not None and servers.tolist() == [sum(server in hit for hit in hits) for server in (0, 1)]
            refusal = r"group has 4 ranks, 2 per server; .* cannot run between servers, as comm_alg 'hierarchy'"
            if flavour == "ascend":
                with pytest.raises(ArgumentError, match=refusal):
                    buffer.dispatch(case.x(rank), None, per_rank, servers, in_rank, per_expert, case.ids(rank))
            with pytest.raises(ArgumentError, match=refusal):
                low(case, rank, buffer)

    def unequal(rank: int, group_ep: str) -> None:
        refusal = r"group has 3 ranks on servers of 2 \(by ASCEND_MOE_RANKS_PER_SERVER or .*\); a Buffer needs equal"
        with pytest.raises(ArgumentError, match=refusal):
            Buffer((group_ep, 3, rank)).get_dispatch_layout(torch.zeros(1, 2, dtype=torch.int64), 6)

    for world, body in ((4, run), (3, unequal)):
        with LocalCluster(world) as cluster:
            cluster.run(body)


def test_internode_calls_take_deepeps_positions(clusters: Clusters) -> None:
    case = Case()

    def body(rank: int, buffer: Buffer) -> None:
        ids, weights = case.ids(rank), case.weights(rank)
        per_rank, servers, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, case.experts, None, True)
        config, given = Buffer.get_dispatch_config(2), (None, per_rank, servers, in_rank, per_expert, ids, weights)
        rows, _, _, numbers, handle, event = buffer.internode_dispatch(case.x(rank), *given, 4, config, event, True)
        wanted, _, _, exact, *_ = send(case, rank, buffer)
        assert torch.equal(rows, wanted) and numbers == [-(-n // 4) * 4 for n in exact] and event.event is not None
        home, summed, _ = buffer.internode_combine(rows, handle, None, case.x(rank), config, event)
        assert torch.equal(home, buffer.combine(rows, handle, bias=case.x(rank))[0]) and summed is None

    on_all(clusters, case, body)


def test_events() -> None:
    seen: list[int] = []
    event = Buffer.capture()
    event.register_hook_after_wait(lambda: seen.append(1))
    with pytest.raises(ArgumentError, match="second hook"):
        event.register_hook_after_wait(lambda: None)
    event.current_stream_wait()
    with event(release_handle=True) as same:
        assert same is event and event.event is not None
    assert seen == [1] and event.event is None
    with EventOverlap():
        pass
    EventHandle().current_stream_wait()


@pytest.mark.parametrize("algorithm", ["", "window", "direct"])
def test_a_window_as_large_as_the_hint_is_enough(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    case = Case(local=2, topk=4, hidden=8192)
    hint = Buffer.get_low_latency_rdma_size_hint(64, case.hidden, case.world, case.experts)
    mib = hint >> 20

    def enough(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, 2, rank))
        sent = buffer.low_latency_dispatch(case.x(rank), case.ids(rank), 64, case.experts, use_fp8=False)
        assert torch.equal(finish(case, rank, buffer, sent), low_sum(case, rank))

    def too_small(rank: int, group_ep: str) -> None:
        with pytest.raises(WindowTooSmall, match=f"HCCL_BUFFSIZE={mib}"):
            enough(rank, group_ep)

    for size, run in ((mib, enough), (mib - 1, too_small)):
        monkeypatch.setenv("HCCL_BUFFSIZE", str(size))
        with LocalCluster(2) as cluster:
            cluster.run(run)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("world", "algorithm"), [(2, ""), (2, "window"), (2, "direct"), (4, "hierarchy")])
def test_normal_mode_needs_no_more_than_the_hint(
    world: int, algorithm: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ids and weights beside the rows, and with two biases, where rows are fp32; on one server and on two."""
    tokens, hidden, experts, topk = 4096, 64, 64, 32
    one = Config().get_nvl_buffer_size_hint(2 * hidden, world)
    if algorithm == "hierarchy":
        monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
        assert Config().get_nvl_buffer_size_hint(2 * hidden, world) > one
    else:
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    monkeypatch.setenv("HCCL_BUFFSIZE", str(Config().get_nvl_buffer_size_hint(2 * hidden, world) >> 20))

    def run(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, world, rank))
        x, ids = torch.ones(tokens, hidden, dtype=BF16), torch.arange(topk).repeat(tokens, 1) * (4 // world)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        given = (None, per_rank, None, in_rank, per_expert, ids, torch.ones(ids.shape))
        rows, _, _, _, handle, _ = buffer.dispatch(x, *given)
        ranks = len({int(each) // (experts // world) for each in ids[0]})
        assert torch.equal(buffer.combine(rows, handle, bias=(x, x) if bias else None)[0], x * (ranks + 2 * bias))
        assert algorithm in ("", comm.algorithm_of(group_ep))

    with LocalCluster(world) as cluster:
        cluster.run(run)


def test_hints_are_what_the_windows_need() -> None:
    from ascend_moe import plan

    small, large = (Buffer.get_low_latency_rdma_size_hint(tokens, 7168, 4, 16) for tokens in (8, 128))
    topk = min(16, plan.limits()["topk"])
    asked = (plan.Request(4, 16, topk, 7168, 128, equal_batches=False, comm_alg=each) for each in ("window", "direct"))
    needs = [plan.window_need(each) for each in asked]
    assert small < large == max(min(need[op] for need in needs) for op in ("dispatch_mib", "combine_mib")) << 20
    with pytest.raises(ArgumentError):
        Buffer.get_low_latency_rdma_size_hint(-1, 512, 4, 16)
    config = Buffer.get_dispatch_config(8)
    assert config == Buffer.get_combine_config(8) == Config(Buffer.num_sms)
    assert config.get_nvl_buffer_size_hint(1024, 8) > 0 == config.get_rdma_buffer_size_hint(1024, 8)
    before = Buffer.num_sms
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(2).num_sms == AscendBuffer.num_sms == 24 and Buffer.is_sm90_compiled()
    Buffer.set_num_sms(before)
    with pytest.raises(ArgumentError, match="must be even"):
        Buffer.set_num_sms(3)


# ---- utils


@pytest.fixture
def defaults() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_rng_state(state)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_init_dist_makes_the_group_and_the_defaults(defaults: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(20000 + os.getpid() % 20000))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    rank, world, group = utils.init_dist(0, 1, seed=7)
    assert (rank, world, group.size()) == (0, 1, 1) and dist.get_backend() == "gloo"
    assert torch.get_default_dtype() == torch.bfloat16 and torch.ones(1).device.type == "cpu"
    assert (utils.get_local_seed(), utils.get_global_seed(), torch.initial_seed()) == (7, 7, 7)


@pytest.mark.parametrize("columns", [128, 100, 300])
def test_a_cast_and_back_is_within_the_steps_of_e4m3(columns: int) -> None:
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns))
    codes, scales = utils.per_token_cast_to_fp8(x)
    assert codes.shape == x.shape and scales.shape == (5, -(-columns // 128)) and codes.is_contiguous()
    back = utils.per_token_cast_back(codes, scales)
    assert back.dtype == torch.bfloat16 and bool(((back.float() - x).abs() <= x.abs() / 14 + 0.02).all())
    assert utils.per_token_cast_back(codes[:0], scales[:0]).shape == (0, columns)
    assert utils.calc_diff(x, x) == 0 and 0 < utils.calc_diff(x, back) < 1e-3


def test_unique_values_come_first_and_the_largest_before_the_others() -> None:
    x = torch.tensor([[3, 1, 3, -1], [-1, -1, -1, -1], [0, 1, 2, 3], [2, 2, 2, 2]])
    utils.inplace_unique(x, 4)
    assert x.tolist() == [[3, 1, -1, -1], [-1] * 4, [3, 2, 1, 0], [2, -1, -1, -1]]
    few = torch.tensor([[0, 1, 0]])
    utils.inplace_unique(few, 2)
    assert few.tolist() == [[1, 0, -1]]


def test_small_sums() -> None:
    scores = torch.arange(1, 9).float().view(1, 8)
    grouped = utils.create_grouped_scores(scores, torch.tensor([[1, 3]]), 4)
    assert grouped.tolist() == [[0, 0, 3, 4, 0, 0, 7, 8]]
    ones = torch.ones(2, 4, dtype=torch.int32)
    assert utils.hash_tensors(ones, (ones, None), [ones]) == 8 and utils.count_bytes(ones, (None, [ones])) == 64
    assert (utils.ceil_div(7, 4), utils.align(7, 4), utils.safe_div(0, 0)) == (2, 8, 0)
    with pytest.raises(ZeroDivisionError):
        utils.safe_div(1, 0)
