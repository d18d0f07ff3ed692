"""Checks of a run: every output against the reference bit for bit, the layer against a dense one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe import reference
from ascend_moe.call import CallOptions
from ascend_moe.comm.place import Place
from ascend_moe.comparison.experts import QUANT_TOLERANCE, TOLERANCES
from ascend_moe.dispatchers.base import Dispatcher
from ascend_moe.moe_config import MoEConfig
from ascend_moe.native.windows import ranks_per_server
from ascend_moe.ops.calls import core_count
from ascend_moe.run.layers import Progress, RankRecord, RunSpec, build

_SLICE_BYTES = 128 << 20  # of fp32 expert weights in memory at a time


@dataclass(frozen=True)
class Check:
    """Result of one check. ``detail``: its numbers, or a description of the first difference."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class RunChecks:
    """All checks; combine's largest differences from the reference and the dense layer, and the RMS of the latter."""

    checks: list[Check]
    reference_difference: float
    dense_difference: float
    dense_rms: float

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)


def verify(spec: RunSpec, records: Sequence[RankRecord], progress: Progress) -> RunChecks:
    """Run every check on the ``records`` of all ranks, by rank; report stages to ``progress``."""
    inputs = [record.given for record in records]
    experts, mode, share = spec.config.num_experts, spec.quant_mode, ranks_per_server()
    common: dict[str, Any] = {"moe_expert_num": experts, "global_bs": spec.global_rows}
    common["special"] = spec.config.special
    two_levels = records[0].algorithms["combine"] == "hierarchy"  # on one server it is window
    weighed = records[0].weighed
    progress("reference", 0, 2)
    sent = reference.dispatch(inputs, quant_mode=mode, expert_scales_given=weighed, **common)
    progress("reference", 1, 2)
    rows_of = [rank_record.expert_rows for rank_record in records]
    sums = reference.combine(inputs, rows_of, sent, ranks_per_server=share if two_levels else 0, **common)
    progress("reference", 2, 2)
    v2: dict[str, Any] = {"contract": "v2", "ranks_per_server": 0 if two_levels else share}
    dispatches = [
        reference.validate("dispatch", one.dispatched, want, rank=one.rank, **v2)
        for one, want in zip(records, sent, strict=True)
    ]
    combines = [
        reference.validate("combine", one.out, want, rank=one.rank) for one, want in zip(records, sums, strict=True)
    ]
    rows = sum(len(want.expand_x) for want in sent)
    hidden = spec.config.row_size
    sizes: dict[str, Any] = {"H": hidden, "dtype": spec.dtype, "quant_mode": mode, "cores": core_count(), **common}
    sizes["weights"] = weighed
    traffic = {
        name: reference.predict_traffic(inputs, contract="v2", algorithm=name, **sizes) for name in ("window", "direct")
    }
    dense = dense_layer(spec, records, progress)
    out = torch.cat([rank_record.out for rank_record in records]).float()
    gap = _furthest(out, torch.cat(sums).float())
    # between servers the counters include the status sent with the rows
    bytes_moved = [] if 0 < share < spec.ranks else [_bytes_moved(records, traffic)]
    unsteady = [record.rank for record in records if not record.steady]
    passes = f"ranks {unsteady} changed" if unsteady else f"{spec.iterations + 2} passes, MoELayer.forward one of them"
    checks = [
        _reports("dispatch = reference, bit for bit", dispatches, f"{rows} rows on {spec.ranks} ranks"),
        _reports("combine = reference, bit for bit", combines, f"{len(out)} tokens, max difference {gap:g}"),
        *bytes_moved,
        Check("every pass has the same bits", not unsteady, passes),
        _is_close(out, dense, spec),
    ]
    return RunChecks(checks, gap, _furthest(out, dense), float(dense.square().mean().sqrt()))


def _reports(name: str, reports: Sequence[reference.Comparison], fine: str) -> Check:
    wrong = [report.text for report in reports if not report.ok]
    if not wrong:
        return Check(name, True, fine)
    return Check(name, False, f"{len(wrong)} of {len(reports)} ranks differ\n{wrong[0]}")


def _bytes_moved(records: Sequence[RankRecord], traffic: Mapping[str, Sequence[reference.Traffic]]) -> Check:
    """Compare the kernels' MTE byte counters with the traffic predicted from the routing."""
    name = "bytes through the windows = predicted"
    total = 0
    for record in records:
        for op in ("dispatch", "combine"):
            want = traffic[record.algorithms[op]][record.rank]
            for past, word in (("written", "write"), ("read", "read")):
                got, predicted = record.traffic[op][f"{past}_window_data"], getattr(want, f"{op}_window_{word}")
                if not 0 <= got - predicted <= getattr(want, f"{op}_window_{word}_slack", 0):
                    what = f"{op} {'wrote' if word == 'write' else 'read'} {got} bytes"
                    return Check(name, False, f"rank {record.rank}: {what}, predicted {predicted}")
                total += got
    return Check(name, True, f"{total / 1e6:.1f} MB written and read, both ops")


def tolerance_of(spec: RunSpec) -> float:
    """Return the tolerance of the comparison with the dense layer, relative to RMS + |value|; see ``TOLERANCES``."""
    return QUANT_TOLERANCE if spec.quant_mode else TOLERANCES[spec.dtype]


def _is_close(out: Tensor, dense: Tensor, spec: RunSpec) -> Check:
    tolerance, rms = tolerance_of(spec), dense.square().mean().sqrt()
    name = f"dense layer within {tolerance:g} x (RMS + |value|)"
    gap = (out - dense).abs()
    bad = ~(gap <= tolerance * (rms + dense.abs()))
    detail = f"max difference {_furthest(out, dense):.3g}, RMS of the output {float(rms):.3g}"
    if bad.any():
        detail += f"\n{int(bad.any(1).sum())} of {len(out)} tokens differ, {int(bad.sum())} elements"
    return Check(name, not bool(bad.any()), detail)


def _furthest(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().nan_to_num(nan=torch.inf).max()) if got.numel() else 0.0


def _special_terms(records: Sequence[RankRecord], config: MoEConfig) -> Tensor:
    """Addends of copy and const experts, (sum of BS, R) fp32."""
    parts, (zeros, copies, count) = [], config.special
    for record in records:
        row, ids = record.x.float(), record.expert_ids.long() - config.num_experts - zeros
        copied = record.expert_scales * ((ids >= 0) & (ids < copies))
        part = row * copied.sum(1, keepdim=True)
        constants = [record.own.get(f"const_expert_{name}") for name in ("alpha_1", "alpha_2", "v")]
        for place in range(count):
            alpha_1, alpha_2, v = (tensor[place].float() for tensor in constants if tensor is not None)
            if config.const_expert_gate:
                factors = torch.stack([row @ alpha_1, row @ alpha_2]).softmax(0)
            else:
                factors = torch.stack([alpha_1, alpha_2])[:, None]
            chosen = (record.expert_scales * (ids == copies + place)).sum(1)
            part += (factors[0] * chosen)[:, None] * row + (factors[1] * chosen)[:, None] * v
        parts.append(part)
    return torch.cat(parts)


class _Holder(Dispatcher):
    """A dispatcher that only selects the experts of a layer."""

    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    _combine = _dispatch


@torch.no_grad()
def dense_layer(spec: RunSpec, records: Sequence[RankRecord], progress: Progress) -> Tensor:
    """Compute combine's result without dispatch and combine, in one process: (sum of BS, R) fp32, R a row's elements.

    If the layer projects rows to a latent width, or splits a token into several rows, this is not the layer's output,
    and the shared expert is left out. Routing and weights are those of the ranks' routers. Expert weights are generated
    or read again, a slice of experts at a time, and never quantized.
    """
    config = spec.config
    x = torch.cat([record.x for record in records]).float()
    ids = torch.cat([record.expert_ids for record in records])
    scales = torch.cat([record.expert_scales for record in records])
    out = _special_terms(records, config)
    one_expert = 3 * config.row_size * config.moe_intermediate_size * 4
    held = max(1, min(config.num_experts, _SLICE_BYTES // one_expert))
    while config.num_experts % held:
        held -= 1
    slices = config.num_experts // held
    for number in range(slices):
        progress("dense layer", number, slices)
        holder = _Holder(Place("nobody", slices, number), config.num_experts, CallOptions(**config.special.given))
        layer = build(spec, holder, floats=True)
        if number == 0 and layer.shared_gate_up is not None and not layer.leaves_apart:
            shared = layer.run_shared(torch.cat([record.tokens for record in records]))
            assert shared is not None
            out += shared.float()
        for local in range(held):
            token, k = torch.nonzero(ids == number * held + local, as_tuple=True)
            if len(token):
                first, second = (
                    0.0 if bias is None else bias[local].float() for bias in (layer.gate_up_bias, layer.down_bias)
                )
                hidden = layer.activation(x[token] @ layer.w_gate_up[local].float() + first)
                y = hidden @ layer.w_down[local].float() + second
                out.index_add_(0, token, y * scales[token, k, None])
    progress("dense layer", slices, slices)
    return out
