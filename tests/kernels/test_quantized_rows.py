"""comm_quant_mode 2: rows come back as int8. Sums are the reference's in every bit, and so are the bytes moved."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import op_runs
import pytest
import torch

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe import plan
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.native import library
from ascend_moe.reference.cases import Case

WORLD = 4
BASE = Case(world=WORLD, comm_quant_mode=2, cores=3, local=3, topk=4, batch=6, units=5, seed=7)
CASES = {
    "a row a core and more": replace(BASE, cores=48),
    "hot expert, NaN and infinities": replace(BASE, ids="hot", odd=True),
    "fp16 with NaN rows behind": replace(BASE, dtype="fp16", tail=True, odd=True),
    "shared expert's rows in parts": replace(BASE, contract=2, shared=2, units=66, batch=2, cores=9, topk=3),
    "parts, the last one shorter": replace(BASE, units=133, batch=2, cores=9),
    "rows of H 7168": replace(BASE, units=448, batch=3),
    "rows in pieces": replace(BASE, units=1024, topk=2, batch=3, cores=2),
}


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_scale_divides_by_zero_and_none_but_zero_changes(dtype: torch.dtype, flushes: bool) -> None:
    """Of every maximum that a block can have, also on a unit that flushes subnormal numbers to 0."""
    text = (library.native_source_root() / "op_kernel/common/quantize.h").read_text()
    found = re.search(r"kInstead = (\S+)f, kHuge = (\S+)f;", text)
    assert found is not None
    instead, huge = (np.float32(float.fromhex(number)) for number in found.groups())
    least = np.float32(2.0**-126)

    def unit(values: Any) -> Any:
        values = np.float32(values)
        return np.where(np.abs(values) < least, np.float32(0), values) if flushes else values

    most = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype).float().numpy()
    most = unit(most[~np.isnan(most)])
    with np.errstate(all="ignore"):
        scale = unit(most * (np.float32(1) / np.float32(127)))
        divisor = np.maximum(scale, unit(unit(scale * -huge) + instead))
        assert (unit(np.array([instead, huge])) == [instead, huge]).all() and (divisor > 0).all()
        assert np.array_equal(divisor, np.where(scale == 0, instead, scale))
        for value in (np.zeros_like(most), most, unit(most / 2)):
            quotient = np.rint(unit(value / divisor))
            assert (np.abs(quotient[np.isfinite(most)]) <= 128).all()
            assert not np.isnan(quotient[np.isfinite(most)]).any()
            assert (quotient[scale == 0] == 0).all()


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_sums_and_bytes(name: str, contract: int, algorithm: str, clusters: op_runs.Clusters) -> None:
    case = CASES[name]
    if contract != case.contract and case.shared:
        pytest.skip("V1 takes no shared expert's rows")
    case = replace(case, contract=contract)
    runs = op_runs.run(clusters[WORLD], case)
    assert op_runs.check(case, runs)
    assert {run.algorithms for run in runs if not isinstance(run, AscendMoeError)} == {(algorithm, algorithm)}
    # Rounding is seen.
    rows = [run.rows for run in runs if not isinstance(run, AscendMoeError)]
    exact = replace(case, comm_quant_mode=0).combined(rows, case.dispatched())
    assert any(not ref.same_bits(one, other) for one, other in zip(exact, (run.result for run in runs), strict=True))


def test_a_dispatcher_refuses_what_combine_does_not_take() -> None:
    with pytest.raises(ArgumentError, match="comm_quant_mode is 1; need 0 or 2"):
        MC2Dispatcher("group", 2, 0, 2, comm_quant_mode=1)
    with pytest.raises(ArgumentError, match="zero_copy does not work with comm_quant_mode 2"):
        MC2Dispatcher("group", 2, 0, 2, comm_quant_mode=2, zero_copy=True)


def test_the_fused_norm_adds_what_the_codec_makes(clusters: op_runs.Clusters) -> None:
    """Its rows travel as fp32, of the same values."""
    case = replace(BASE, contract=2, batches="unequal", mask="pair", odd=True, dtype="fp16")

    def body(rank: int, group_ep: str) -> list[torch.Tensor]:
        sent, given = op_runs.dispatch(case, rank, group_ep), case.inputs[rank]
        rows = op_runs.expert_rows(case, rank, sent)
        values = [rows, ref.restore_blocks(*ref.quantize_blocks(rows))]
        residual = torch.ones(case.batch_of(rank), 1, case.hidden, dtype=case.torch_dtype)
        gamma = torch.ones(case.hidden, dtype=case.torch_dtype)
        results = []
        for mode, each in zip((2, 0), values, strict=True):
            results += ascend_moe.npu.npu_moe_distribute_combine_add_rms_norm(
                each, given.expert_ids, sent[2], sent[4], given.expert_scales, residual, gamma, group_ep, WORLD, rank,
                case.experts,
                x_active_mask=given.x_active_mask, global_bs=case.global_bs, comm_quant_mode=mode,
            )  # fmt: skip
        return results

    for results in clusters[WORLD].run(body):
        for coded, plain in zip(results[:3], results[3:], strict=True):
            assert ref.same_bits(coded, plain)


def test_codes_need_smaller_windows() -> None:
    """Codes need less than rows: H 7168 takes 8960 bytes, not 14336."""
    request = plan.Request(ranks=16, experts=256, topk=8, hidden=7168, batch=512, comm_alg="direct")
    needs = [plan.window_need(replace(request, comm_quant_mode=mode))["combine_bytes"] for mode in (0, 2)]
    rows = 2 * 16 * 512 * 8
    assert needs == [rows * 14336, rows * 8960]
