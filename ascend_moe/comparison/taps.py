"""What one forward exchanges, as recorded from its dispatcher or from its operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_moe import comm, reference
from ascend_moe.call import SpecialExperts
from ascend_moe.comm.place import Place
from ascend_moe.comparison.difference import first_of, mismatch
from ascend_moe.dispatchers.base import Dispatched, Dispatcher
from ascend_moe.dispatchers.mc2 import MC2Dispatcher

_OPS = ("npu_moe_distribute_dispatch", "npu_moe_distribute_combine")
#: Stage by the argument of dispatch that differs.
_ROUTED = {"x": "x", "expert_ids": "ids", "expert_scales": "scales"}


@dataclass
class Step:
    """Arguments and results of one dispatch and combine on a rank, copied to the CPU.

    Attributes:
        place, group: this rank in its group; the `Place` or process group over which results are gathered.
        experts, special: numbers of MoE experts, and of zero, copy and const experts.
        sent, returned: arguments of dispatch and of combine, by the operators' names.
        arrived: dispatch's results expand_x, dynamic_scales and ep_recv_counts.
        out: combine's result; None until it has returned.
        algorithm: comm_alg of the operators; "" with a dispatcher that does not call them.
    """

    place: Place
    group: Any
    experts: int
    special: SpecialExperts
    sent: dict[str, Any]
    arrived: tuple[Tensor, Tensor, Tensor]
    returned: dict[str, Any] = field(default_factory=dict)
    out: Tensor | None = None
    algorithm: str = ""

    def combined(self, out: Tensor, by_ops: bool) -> None:
        self.out = out.detach().cpu().clone()
        self.algorithm = comm.algorithm_of(self.place.group_ep) if by_ops else ""

    def given(self) -> dict[str, Any]:
        """Return this rank's inputs as fields of `reference.RankInput`."""
        weights = self.returned.get("expert_scales")
        given = {name: self.sent.get(name) for name in ("x", "expert_ids", "scales", "x_active_mask")}
        given["expert_scales"] = torch.empty(0, dtype=torch.float32, device="cpu") if weights is None else weights
        return given | {name: self.returned.get(name) for name in reference.OWN_TERMS}

    def expert_rows(self) -> Tensor:
        """Return the experts' output rows, as passed to combine, without unused rows at the end."""
        rows: Tensor = self.returned["expand_x"][: len(self.arrived[0])]
        return rows

    def route_difference(self, expected: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Return the first difference of this rank's dispatched tensors from ``expected`` (by name), or None."""
        given = self.given()
        for name, want in expected.items():
            got, want = given[name], want.detach().cpu()
            if got.numel() and (at := first_of(got, want.to(got.dtype))) is not None:
                token, k = at
                expert = int(given["expert_ids"][token, k]) if name != "x" else None
                where = {"token": token, "source": self.place.rank, "expert": expert, "element": k}
                return mismatch(_ROUTED[name], self.place.rank, want[token, k], got[token, k], where)
        return None


def _copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with copies of their tensors, which later ops may overwrite."""
    return {name: v.detach().cpu().clone() if isinstance(v, Tensor) else v for name, v in given.items()}


def _arrived(experts: int, rows: Tensor, scales: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ends = counts[:experts].cpu().clone()
    count = int(ends[-1])
    return rows[:count].detach().cpu().clone(), scales[:count].detach().cpu().clone(), ends


class DispatcherTap:
    """Context manager that records the calls of a dispatcher's dispatch and combine in ``step``; None: no call."""

    step: Any = None

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher: Any = dispatcher

    def __enter__(self) -> DispatcherTap:
        self._dispatcher.dispatch, self._dispatcher.combine = self._dispatch, self._combine
        return self

    def __exit__(self, *error: object) -> None:
        del self._dispatcher.dispatch, self._dispatcher.combine

    def _dispatch(self, x: Tensor, expert_ids: Tensor, **more: Any) -> Dispatched:
        of = self._dispatcher
        sent: Dispatched = type(of).dispatch(of, x, expert_ids, **more)
        given = _copied(of.options.options | more | {"x": x, "expert_ids": expert_ids})
        arrived = _arrived(of.num_experts, sent.expand_x, sent.dynamic_scales, sent.ep_recv_counts)
        group = getattr(of, "group", of.place)
        self.step = Step(of.place, group, of.num_experts, of.special, given, arrived)
        return sent

    def _combine(self, expert_out: Tensor, dispatched: Dispatched, expert_scales: Any = None, **more: Any) -> Tensor:
        of = self._dispatcher
        self.step.returned = _copied(
            of.options.options | more | {"expand_x": expert_out, "expert_scales": expert_scales}
        )
        out: Tensor = type(of).combine(of, expert_out, dispatched, expert_scales, **more)
        self.step.combined(out, isinstance(of, MC2Dispatcher))
        return out


class OpsTap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch dispatch mode that records calls of the operators, this package's or torch_npu's, in ``step``, or None."""

    step: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        device = next((one.device.type for one in args if isinstance(one, Tensor)), None)
        if func.namespace == "vllm" and device:  # Python that calls operators, seen only where this mode is on again
            key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device))
            with self:
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        if not name.startswith(_OPS):
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        given = {one.name: one.default_value for one in arguments if one.has_default_value()}
        given |= dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
        if name.startswith(_OPS[1]):
            self.step.returned = _copied(given)
            out = func(*args, **kwargs)
            self.step.combined(out, True)
            return out
        out = func(*args, **kwargs)
        place = Place(given["group_ep"], given["ep_world_size"], given["ep_rank_id"])
        special = SpecialExperts(*(given.get(name) or 0 for name in SpecialExperts._fields))
        experts = given["moe_expert_num"]
        self.step = Step(place, place, experts, special, _copied(given), _arrived(experts, out[0], out[1], out[4]))
        return out
