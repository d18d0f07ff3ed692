"""sgl-kernel-npu's flavour of the Buffer against the V2 ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deep_ep_buffers import BF16, Case, H, each_case, finish, low, low_sum, on_all, send
from op_runs import Clusters
from routed_tokens import randn

import ascend_moe
from ascend_moe import LocalCluster
from ascend_moe.comm.place import Place
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import grouped_mlp
from ascend_moe.interop.deep_ep import AscendBuffer


def v2(case: Case, rank: int, place: Place, **changes: Any) -> Any:
    given = place.arguments(moe_expert_num=case.experts, global_bs=place.world * max(case.most, 1))
    return ascend_moe.npu_moe_distribute_dispatch_v2(case.x(rank), case.ids(rank).int(), **given | changes)


@each_case
@pytest.mark.parametrize("quant", ["bf16", "int8"])
def test_ascend_normal_mode(clusters: Clusters, case: Case, quant: str) -> None:
    def body(rank: int, buffer: Any) -> None:
        assert isinstance(buffer, AscendBuffer) and buffer.flavour == "ascend"
        later: dict[str, Any] = {"previous_event": buffer.capture(), "async_finish": True}
        got, ids, weights, numbers, handle, event = send(case, rank, buffer, quant_mode=quant, **later)
        event.current_stream_wait()
        expected = v2(case, rank, buffer._place, quant_mode=2 if quant == "int8" else 0)
        n = int(expected.ep_recv_counts[-1])
        rows = got[0] if quant == "int8" else got
        assert torch.equal(rows, expected.expand_x[:n]) and numbers == expected.expert_token_nums.tolist()
        if quant == "int8":
            assert torch.equal(got[1], expected.dynamic_scales[:n])
            rows = (got[0] * got[1][:, None]).bfloat16()
        source_indices = [row for expert in range(case.local) for row in case.rows_of(rank * case.local + expert)]
        assert len(handle) == 8 and handle[3].view(-1, 3).tolist() == [*map(list, source_indices)]
        assert handle[4].dtype == torch.int32
        assert torch.equal(handle[5][:-1], expected.ep_recv_counts) and handle[5][-1] == case.most
        for row, (source, token, k) in enumerate(source_indices):
            local = int(case.ids(source)[token, k]) - rank * case.local
            assert ids[row].tolist() == [local if each == k else -1 for each in range(case.topk)]
            assert weights[row, k] == case.weights(source)[token, k] and int(weights[row].count_nonzero()) <= 1
        total, home, event = buffer.combine(rows, handle, topk_weights=weights, **later)
        event.current_stream_wait()
        assert home is handle[7]
        if quant == "bf16":
            assert torch.equal(total, low_sum(case, rank))
        torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.05, atol=0.1)
        with pytest.raises(ArgumentError, match="handle of an earlier dispatch"):
            buffer.dispatch(case.x(rank), handle)

    on_all(clusters, case, body, "ascend")


@each_case
@pytest.mark.parametrize(("strategy", "entries"), [("default", 7), ("ops", 10)])
def test_ascend_low_latency(clusters: Clusters, case: Case, strategy: str, entries: int) -> None:
    def run(rank: int, group_ep: str) -> None:
        buffer = AscendBuffer((group_ep, case.world, rank), low_latency_strategy=strategy)
        for quant in (None, "int8"):
            got, count, handle, _, hook = low(case, rank, buffer, use_fp8=bool(quant), topk_weights=case.weights(rank))
            most = case.world * (case.most + 1)
            expected = v2(case, rank, buffer._place, quant_mode=2 if quant else 0, global_bs=most)
            n = int(expected.ep_recv_counts[-1])
            rows = got[0] if quant else got
            assert rows.shape == (most * min(case.topk, case.local), H)
            assert torch.equal(rows[:n], expected.expand_x[:n]) and count.dtype == torch.int64
            assert torch.equal(count, expected.expert_token_nums) and len(handle) == entries
            assert torch.equal(handle[1], expected.ep_recv_counts) and handle[2:5] == (case.most + 1, H, case.experts)
            hook()
            values = (got[0] * got[1][:, None]).bfloat16() if quant else got
            total = finish(case, rank, buffer, (values, count, handle))
            torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.05, atol=0.1)
            assert quant or torch.equal(total, low_sum(case, rank))

    clusters[case.world].run(run)


@pytest.mark.parametrize("quant_mode", [0, 1])
def test_ascend_fused_deep_moe(clusters: Clusters, quant_mode: int) -> None:
    case, inner = Case(kind="-1"), 64
    gate_up, down = randn(case.local, H, 2 * inner, seed=1).bfloat16(), randn(case.local, inner, H, seed=2).bfloat16()
    scales: Any = (None, None)
    if quant_mode:
        scales = (gate_up.float().abs().amax(1) / 127, down.float().abs().amax(1) / 127)
        gate_up = (gate_up / scales[0][:, None]).round().to(torch.int8)
        down = (down / scales[1][:, None]).round().to(torch.int8)

    def body(rank: int, buffer: Any) -> None:
        given = (gate_up, scales[0], down, scales[1], case.most, case.experts)
        bits = [scale.view(torch.int32).long() if quant_mode else None for scale in scales if quant_mode] or [None] * 2
        ids, weights = case.ids(rank), case.weights(rank)
        y, counts = buffer.fused_deep_moe(case.x(rank), ids, weights, *given, quant_mode=quant_mode)
        given = (gate_up, bits[0], list(down), bits[1], 1000, case.experts, quant_mode)
        again, nums = buffer.fused_deep_moe(case.x(rank), ids, weights, *given, fuse_mode=2)
        place = buffer._place.arguments(moe_expert_num=case.experts, global_bs=buffer._place.world * max(case.most, 1))
        sent = v2(case, rank, buffer._place, quant_mode=2 * quant_mode)
        more = {"dynamic_scales": sent.dynamic_scales, "w_gate_up_scale": scales[0], "w_down_scale": scales[1]}
        more = {**more, "output_dtype": BF16} if quant_mode else {}
        rows = grouped_mlp(sent.expand_x, gate_up, down, sent.expert_token_nums, **more)
        source_indices = sent.assist_info_for_combine
        expected = ascend_moe.npu_moe_distribute_combine_v2(
            rows, ids.int(), source_indices, sent.ep_recv_counts, weights, **place
        )
        assert torch.equal(y, expected) and torch.equal(again, expected)
        assert torch.equal(counts, sent.ep_recv_counts) and nums.dtype == torch.int32
        assert torch.equal(nums.long(), sent.expert_token_nums)

    on_all(clusters, case, body, "ascend")


def test_ascend_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(world=1)

    def run(rank: int, group_ep: str) -> None:
        buffer: Any = AscendBuffer((group_ep, 1, 0))
        sent = send(case, 0, buffer)
        ones = torch.ones(1, dtype=torch.int32)
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("quant_mode is 'mx_fp8_e4m3'", lambda: send(case, 0, buffer, quant_mode="mx_fp8_e4m3")),
            ("quant_mode is 'mx_fp4_e2m1'", lambda: low(case, 0, buffer, quant_mode="mx_fp4_e2m1")),
            ("use_ue8m0 is True", lambda: low(case, 0, buffer, use_ue8m0=True, use_fp8=True)),
            ("num_worst_tokens is 8", lambda: send(case, 0, buffer, num_worst_tokens=8)),
            ("use_mxfp4 is True", lambda: low(case, 0, buffer, use_mxfp4=True)),
            ("notify_verify", lambda: buffer.notify_verify(case.x(0))),
            ("get_notify_send_data", buffer.get_notify_send_data),
            ("end_profile", buffer.end_profile),
            ("combine_send_cost_stats", lambda: buffer.combine(sent[0], sent[4], combine_send_cost_stats=ones)),
            ("bias is not supported", lambda: buffer.combine(sent[0], sent[4], bias=sent[0])),
            ("handle is not a tuple of 8", lambda: buffer.combine(sent[0], sent[4][:7])),
            ("get_next_low_latency_combine_buffer", lambda: buffer.get_next_low_latency_combine_buffer(sent[4])),
            ("internode_dispatch", lambda: buffer.runtime.internode_dispatch(case.x(0))),
            ("internode_combine", lambda: buffer.runtime.internode_combine(case.x(0))),
            ("begin_profile", lambda: buffer.begin_profile(1, 1, "")),
            ("low_latency_strategy is 'x'", lambda: AscendBuffer((group_ep, 1, 0), low_latency_strategy="x")),
        ]
        for text, call in refused:
            with pytest.raises(ArgumentError, match=text):
                call()
        assert low(case, 0, buffer, use_ue8m0=True)[0].dtype == torch.bfloat16  # as in DeepEP, without use_fp8
        monkeypatch.setenv("DEEP_USE_MODE", "ops")
        assert AscendBuffer((group_ep, 1, 0)).low_latency_strategy.get_name() == "ops"
        monkeypatch.setenv("DEEP_USE_MODE", "other")
        with pytest.raises(ArgumentError, match="DEEP_USE_MODE is 'other'"):
            AscendBuffer((group_ep, 1, 0))
        monkeypatch.delenv("DEEP_USE_MODE")
        monkeypatch.setenv("DEEP_NORMAL_MODE_USE_INT8_QUANT", "1")
        assert send(case, 0, buffer)[0][0].dtype == torch.int8
        monkeypatch.setenv("MOE_EXPERT_TOKEN_NUMS_TYPE", "0")
        aligned = torch.tensor([-(-rows // 16) * 16 for rows in sent[3]])
        assert send(case, 0, buffer, expert_alignment=16)[3] == aligned.cumsum(0).tolist()
        ops = AscendBuffer((group_ep, 1, 0), low_latency_strategy="ops")
        assert torch.equal(low(case, 0, ops)[1], low(case, 0, buffer)[1].cumsum(0))
        monkeypatch.setenv("MOE_SHARED_EXPERT_RANK_NUM", "1")
        with pytest.raises(ArgumentError, match="MOE_SHARED_EXPERT_RANK_NUM is 1"):
            AscendBuffer((group_ep, 1, 0))
        monkeypatch.delenv("MOE_SHARED_EXPERT_RANK_NUM")
        monkeypatch.setenv("DEEPEP_NORMAL_LONG_SEQ_ROUND", "4")
        with pytest.raises(ArgumentError, match="DEEPEP_NORMAL_LONG_SEQ_ROUND is 4"):
            AscendBuffer((group_ep, 1, 0))

    with LocalCluster(1) as cluster:
        cluster.run(run)
