"""Predicted times of dispatch and combine on NPUs, from the kernels on the timed engine.

    from ascend_moe.plan import Request
    from ascend_moe.predict import predict
    call = Request(ranks=16, experts=256, topk=8, hidden=7168, batch=128, quant_mode=2)
    found = predict(call, soc="Ascend910_9391", algorithm="window")
    print(found.dispatch_us, found.combine_us, found.dispatch.phases)

Predictions come from a model that has not been compared with an NPU. docs/performance.md lists its assumptions;
`ascendc_twin.soc` contains the hardware costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ascendc_twin.soc import cost_table

from ..errors import need, need_one_of, with_typed_errors
from ..plan import Request, soc_of
from .world import ALGORITHMS, OpPrediction, TimedWorld, check, runnable

__all__ = ["ALGORITHMS", "OpPrediction", "Prediction", "check", "predict", "runnable"]


@dataclass(frozen=True)
class Prediction:
    """Predicted times of both ops for ``request`` and ``algorithm``. Print ``note`` with every number."""

    request: Request
    algorithm: str
    dispatch: OpPrediction
    combine: OpPrediction
    note: str = "model, not a measurement"

    @property
    def dispatch_us(self) -> float:
        return self.dispatch.us

    @property
    def combine_us(self) -> float:
        return self.combine.us

    @property
    def link_use(self) -> dict[str, float]:
        """Kind of link -> share of the bandwidth of its busiest link, in the op that uses more."""
        first, second = self.dispatch.link_use, self.combine.link_use
        return {name: max(first.get(name, 0.0), second.get(name, 0.0)) for name in first | second}


@with_typed_errors
def predict(
    call: Request,
    soc: str | None = None,
    world: int | None = None,
    *,
    cores: int | None = None,
    algorithm: str = "window",
    costs: Mapping[str, float] | None = None,
    events: int = 0,
    seed: int = 0,
    payload: bool = False,
) -> Prediction:
    """Predict one dispatch and one combine, each launched on all ranks at once.

    Args:
        call: the configuration.
        soc, world, cores: replace ``soc``, ``ranks`` and ``cores`` of ``call``; None: keep these.
        algorithm: one of ``ALGORITHMS``.
        costs: hardware costs by the names of `ascendc_twin.soc.cost_table`, which replace the SoC's.
        events: maximum number of timeline events per op to record; 0: none.
        seed: seed of the routing: every token picks ``topk`` different experts with equal probability.
        payload: also move rows and compute the outputs; False: only time them.

    Raises:
        ArgumentError: no such SoC or algorithm, or the operators or the algorithm refuse the configuration.
        AscendMoeError: the modelled op failed.
    """
    request = replace(
        call,
        soc=call.soc if soc is None else soc,
        ranks=call.ranks if world is None else world,
        cores=(call.cores if cores is None else cores) or soc_of(call.soc if soc is None else soc).aiv,
    )
    need_one_of("algorithm", algorithm, ALGORITHMS)
    for name, number in (("events", events), ("seed", seed)):
        need(type(number) is int and abs(number) < 2**63, name, "is {!r}; need a 64-bit integer", number)
    figures = {name: one.value for name, one in cost_table(soc_of(request.soc).name).items()}
    if request.ranks_per_server:
        figures["ranks_per_server"] = request.ranks_per_server
    figures |= dict(costs or {})
    with TimedWorld(request, algorithm, seed, payload) as timed:
        dispatch, combine = (timed.run(op, figures, events) for op in ("dispatch", "combine"))
    return Prediction(request, algorithm, dispatch, combine)
