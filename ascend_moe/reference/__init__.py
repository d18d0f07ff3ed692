"""The plain reference of MoeDistributeDispatch and MoeDistributeCombine: all EP ranks in one process.

This is what every implementation is compared with, bit for bit. It imports numpy, torch, the standard library and the
record of a call's options only, and shares neither code nor design with the kernels: a dictionary of counts, one sort,
and float32 sums in the order the operators define. ``cases`` makes the calls that implementations are tried with.

    results = dispatch(inputs, moe_expert_num=E)              # one DispatchResult per rank
    outputs = combine(inputs, expert_outputs, results, moe_expert_num=E)
    report = validate("dispatch", op_outputs, results[rank], rank=rank)
    assert report.ok, report.text
"""

from __future__ import annotations

from ascend_moe.call import SpecialExperts

from .cases import Case
from .exchange import (
    FaultyRouting,
    check,
    combine,
    const_row,
    dense,
    dispatch,
    predict_crossings,
    predict_traffic,
    quantize_blocks,
    quantize_row,
    quantized_row_bytes,
    restore_blocks,
)
from .records import OWN_TERMS, Comparison, DispatchResult, Fault, RankInput, Traffic
from .report import same_bits, validate

__all__ = [
    "OWN_TERMS",
    "Case",
    "Comparison",
    "DispatchResult",
    "Fault",
    "FaultyRouting",
    "RankInput",
    "SpecialExperts",
    "Traffic",
    "check",
    "combine",
    "const_row",
    "dense",
    "dispatch",
    "predict_crossings",
    "predict_traffic",
    "quantize_blocks",
    "quantize_row",
    "quantized_row_bytes",
    "restore_blocks",
    "same_bits",
    "validate",
]
