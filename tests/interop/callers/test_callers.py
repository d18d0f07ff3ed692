"""Calls of the ops as callers spell them, keyword for keyword, each against the reference.

One row a version of a caller: which keywords it passes to dispatch and to combine, and with which values.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import op_runs
import pytest
import torch

import ascend_moe.reference as ref
from ascend_moe import npu as torch_npu
from ascend_moe.reference.cases import QUANTS, Case

Kwargs = dict[str, Any]
Given = ref.RankInput
WORLD = 2


@dataclass(frozen=True)
class Caller:
    """A caller's two calls: what it passes beside the tensors and numbers that all pass, by name."""

    name: str
    version: str  # "" or "_v2"
    case: Case
    dispatch: Callable[[Case, int, str], Kwargs]
    combine: Callable[[Case, int, str, tuple[Any, ...]], Kwargs]

    def run(self, rank: int, group: str) -> op_runs.RankRun:
        case, given = self.case, self.case.inputs[rank]
        place = {"group_ep": group, "ep_world_size": case.world, "ep_rank_id": rank, "moe_expert_num": case.experts}
        dispatch = getattr(torch_npu, f"npu_moe_distribute_dispatch{self.version}")
        sent = dispatch(x=given.x, expert_ids=given.expert_ids, **place, **self.dispatch(case, rank, group))[0:7]
        rows = op_runs.expert_rows(case, rank, sent)
        index = "assist_info_for_combine" if self.version else "expand_idx"
        result = getattr(torch_npu, f"npu_moe_distribute_combine{self.version}")(
            expand_x=rows,
            expert_ids=given.expert_ids,
            expert_scales=given.expert_scales.to(torch.float32),
            ep_send_counts=sent[4],
            **{index: sent[2]},
            **place,
            **self.combine(case, rank, group, sent),
        )
        return op_runs.RankRun(sent, rows, result, [])


def uninitialised(count: int) -> torch.Tensor:
    """What ``torch.empty`` may hold."""
    return torch.full((count,), -1_515_870_811, dtype=torch.int32)


# ---- vllm-ascend, MC2: one row a version


def _ascend(**over: Any) -> Case:
    sizes = {"world": WORLD, "local": 4, "topk": 3, "batch": 6, "units": 4, "tail": True, "seed": 11}
    return Case(**(sizes | over))


def _constants(case: Case) -> Kwargs:
    return {"expert_shard_type": 0, "shared_expert_rank_num": 0, "global_bs": case.global_bs}


def _tp(group: str) -> Kwargs:
    return {"group_tp": group, "tp_world_size": 1, "tp_rank_id": 0}


def _mask(given: Given) -> Kwargs:
    return {"x_active_mask": given.x_active_mask}


def _ascend_dispatch(words: str) -> Callable[[Case, int, str], Kwargs]:
    """``words``: which keywords a version passes to both calls or to one."""

    def kwargs(case: Case, rank: int, group: str) -> Kwargs:
        known = {
            "tp": _tp(group),
            "mask": _mask(case.inputs[rank]),
            "nums_type": {"expert_token_nums_type": case.expert_token_nums_type},
            "expert_scales": {"expert_scales": case.inputs[rank].expert_scales},
            "hierarchy": {"comm_alg": "hierarchy"},
        }
        named = {"scales": None, "quant_mode": case.quant_mode, **_constants(case)}
        return functools.reduce(operator.or_, (known.get(word, {}) for word in words.split()), named)

    return kwargs


def _ascend_combine(words: str) -> Callable[[Case, int, str, tuple[Any, ...]], Kwargs]:
    def kwargs(case: Case, rank: int, group: str, sent: tuple[Any, ...]) -> Kwargs:
        known = {
            # After a quantized dispatch nobody has written the counts: the op must not look at them.
            "tp": _tp(group) | {"tp_send_counts": uninitialised(1) if case.quant_mode else sent[5]},
            "mask": _mask(case.inputs[rank]),
            "expand_scales": {"expand_scales": sent[6]},
            "comm_quant_mode": {"comm_quant_mode": 0},
            "hierarchy": {"comm_alg": "hierarchy"},
        }
        return functools.reduce(operator.or_, (known.get(word, {}) for word in words.split()), _constants(case))

    return kwargs


VLLM_ASCEND = [
    Caller(
        f"vllm-ascend {label}, {quant}", version, replace(case, **QUANTS[quant]), _ascend_dispatch(words),
        _ascend_combine(words),
    )
    for quant in ("none", "int8")
    for label, version, case, words in (
        ("0.8.5rc1", "", _ascend(tp_world_size=1), "tp"),
        ("0.9.1 A3", "_v2", _ascend(contract=2, mask="prefix", tp_world_size=1), "tp mask"),
        ("0.9.1 A2", "", _ascend(batches="unequal"), ""),
        (
            "0.11.0 to 0.18.0", "_v2",
            _ascend(contract=2, mask="prefix", tp_world_size=1, expert_token_nums_type=0),
            "tp mask nums_type expand_scales",
        ),
        (
            "0.18.0 hierarchy", "_v2",
            _ascend(contract=2, batches="zero rank", expert_token_nums_type=0, weights=True),
            "nums_type expert_scales expand_scales hierarchy",
        ),
        (
            "0.23.0 no mask", "_v2", _ascend(contract=2, tp_world_size=1, expert_token_nums_type=1),
            "tp mask nums_type expand_scales comm_quant_mode",
        ),
    )
]  # fmt: skip


# ---- sgl-kernel-npu's low latency strategy: no tp, weights to dispatch too, ids behind the mask are not written


def _padded_inputs(shared: bool, world: int) -> list[Given]:
    """Six rows a rank, of which the first four are tokens; the others are what memory held."""
    rng, inputs = torch.Generator().manual_seed(5), []
    for rank in range(world):
        x = torch.randn(6, 64, generator=rng).bfloat16()
        ids = torch.stack([torch.randperm(8, generator=rng)[:3] for _ in range(6)]).to(torch.int32)
        weights = torch.rand(6, 3, generator=rng)
        x[4:], weights[4:] = float("nan"), float("nan")
        ids[4:] = uninitialised(6).reshape(2, 3) + rank
        shared_x = torch.randn(6, 64, generator=rng).bfloat16() if shared else None
        inputs.append(Given(x, ids, None, torch.arange(6) < 4, weights, shared_x))
    return inputs


_SGL: Kwargs = {"shared_expert_num": 0, "shared_expert_rank_num": 0, "performance_info": None}


def _sgl(quant: str, shared: bool) -> Caller:
    case = Case.of(_padded_inputs(shared, WORLD), 8, contract=2, **QUANTS[quant], weights=True)

    def dispatch(case: Case, rank: int, group: str) -> Kwargs:
        given = {"scales": None, "quant_mode": case.quant_mode, "expert_token_nums_type": 1, "comm_alg": ""}
        mine = case.inputs[rank]
        return given | {"expert_scales": mine.expert_scales, "x_active_mask": mine.x_active_mask} | _SGL

    def combine(case: Case, rank: int, group: str, sent: tuple[Any, ...]) -> Kwargs:
        mine = case.inputs[rank]
        given = {"expand_scales": sent[6], "shared_expert_x": mine.shared_expert_x, "comm_quant_mode": 0}
        return given | {"x_active_mask": mine.x_active_mask} | _SGL

    label = f"{quant}{' with shared_expert_x' if shared else ''}"
    return Caller(f"sgl-kernel-npu {label}", "_v2", case, dispatch, combine)


SGL = [_sgl(quant, shared) for quant in ("none", "int8") for shared in (False, True)]


@pytest.mark.parametrize("caller", [*VLLM_ASCEND, *SGL], ids=lambda caller: caller.name)
@pytest.mark.parametrize("algorithm", ["window", "auto"])
def test_callers_call_gives_what_the_reference_gives(
    caller: Caller, algorithm: str, clusters: op_runs.Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    _check(caller.case, clusters[caller.case.world].run(caller.run))


def _check(case: Case, runs: Sequence[op_runs.RankRun]) -> None:
    expected = case.dispatched()
    for rank, one in enumerate(runs):
        options = {"quantized": case.quant_mode != 0, "exact_shapes": True}
        op_runs.check_dispatch(case.contract, rank, one.dispatched, expected[rank], **options)
    op_runs.check_sums(case, runs, expected)
