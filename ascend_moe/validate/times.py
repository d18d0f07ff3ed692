"""Times of the phases of an op from its timestamps, with the model's prediction for the same configuration.

`ascend-moe validate --bringup --times` runs it on the ranks of a group, or on threads of the twin. Times on a CPU do
not apply to NPUs; they only show that the timestamps work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from .. import comm
from .._text import filled, table
from ..dispatchers import MC2Dispatcher
from ..errors import AscendMoeError
from ..native.timestamps import LAUNCH, OPS, spent
from ..ops import npu_communicator
from ..plan import Request
from ..predict import predict
from .probes_kernel import CYCLES_PER_MICRO
from .run import DevicePlace

ROUNDS, WARM_UPS = 20, 4
EXPERTS, MOST_PREDICTED = 256, 64  # ranks; more take minutes
NOTE = (
    "slowest: of all cores of all ranks; mean: of all cores; each the median of {} rounds. The model's launch is the "
    "whole launch, that of the timestamps a core's part of it. The model's phases are those of its critical path."
)


# op -> phase -> (cycles of the slowest core, cycles of all cores together, number of cores with this phase)
Round = Mapping[str, Mapping[str, tuple[int, int, int]]]


@dataclass(frozen=True)
class Phase:
    """Microseconds of one phase: of the slowest core, and the mean; and the number of cores of a rank that run it.

    ``predicted`` is 0 if there is no prediction, or the phase is not on the model's critical path.
    """

    op: str
    algorithm: str
    name: str
    slowest: float
    mean: float
    cores: int
    predicted: float = 0.0


def configuration(ranks: int) -> Request:
    """Return the configuration to run: int8 rows in dispatch, bf16 rows in combine, at least one expert per rank."""
    experts = ranks * max(1, EXPERTS // ranks)
    return Request(ranks=ranks, experts=experts, topk=min(8, experts), hidden=7168, batch=32, quant_mode=2)


def rounds(place: DevicePlace, request: Request, algorithm: str) -> list[Round]:
    """Run round trips; return the cycles of this rank's cores in each. Collective; needs `settings.TIMESTAMPS`."""
    generator = torch.Generator().manual_seed(place.rank)
    x = torch.randn(request.batch, request.hidden, generator=generator).bfloat16().to(place.device)
    scores = torch.rand(request.batch, request.experts, generator=generator)
    weights, ids = (part.to(place.device) for part in scores.topk(request.topk))
    dispatcher = MC2Dispatcher(place.group_ep, place.world, place.rank, request.experts, comm_alg=algorithm)
    found: list[Round] = []
    for number in range(WARM_UPS + ROUNDS):
        sent = dispatcher.dispatch(x, ids.int(), quant_mode=2)
        dispatcher.combine(sent.expand_x.to(x.dtype), sent, weights)
        if number >= WARM_UPS:
            found.append({op: _summed(spent(_end(place).timestamps(op))) for op in OPS})
    npu_communicator.check(place.group_ep)
    return found


def _summed(cores: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, int, int]]:
    own = {name: [core[name] for core in cores if name in core] for name in in_order(cores)}
    return {name: (max(cycles), sum(cycles), len(cycles)) for name, cycles in own.items()}


def in_order(cores: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of all phases, in order, from each core's phases; not every core has every phase."""
    names: list[str] = []
    for core in cores:
        place = len(names)
        for name in reversed([*core]):
            if name not in names:
                names.insert(place, name)
            place = names.index(name)
    return names


def _end(place: DevicePlace) -> Any:
    where = place.group_ep, place.world, place.rank
    return npu_communicator.find(*where, place.device) if place.device.type == "npu" else comm.lookup(*where)


def phases(ranks: Sequence[Sequence[Round]], algorithm: str) -> list[Phase]:
    """Return the microseconds of each phase from the rounds of all ranks.

    Raises:
        AscendMoeError: a rank has recorded no timestamps.
    """
    result = []
    for op in OPS:
        for rank, own in enumerate(ranks):
            if not all(each[op] for each in own):
                raise AscendMoeError(
                    f"rank {rank} recorded no timestamps of {op}: install this version's operators there"
                )
        by_round = [[rank[number][op] for rank in ranks] for number in range(len(ranks[0]))]
        for name in in_order(rank for each in by_round for rank in each):
            here = [[rank[name] for rank in each if name in rank] for each in by_round]
            cores = [sum(count for _, _, count in each) for each in here]
            slowest = median(max(most for most, _, _ in each) for each in here)
            mean = median(sum(total for _, total, _ in each) / count for each, count in zip(here, cores, strict=True))
            times = (slowest / CYCLES_PER_MICRO, mean / CYCLES_PER_MICRO)
            result.append(Phase(op, algorithm, name, *times, cores[0] // len(ranks)))
    return result


def with_prediction(measured: Sequence[Phase], request: Request, soc: str) -> list[Phase]:
    """Return the phases with the model's times, if the number of ranks is small enough for a quick prediction.

    ``soc``: SoC of the ranks; "": the default.
    """
    if request.ranks > MOST_PREDICTED:
        return list(measured)
    cores = max(phase.cores for phase in measured if phase.name == LAUNCH)  # all cores of a rank run it
    asked = replace(request, soc=soc or request.soc, cores=cores)
    found: list[Phase] = []
    for algorithm in dict.fromkeys(phase.algorithm for phase in measured):
        model = predict(asked, algorithm=algorithm)
        of_op = {"dispatch": model.dispatch.phases, "combine": model.combine.phases}
        own = [phase for phase in measured if phase.algorithm == algorithm]
        found += [replace(phase, predicted=of_op[phase.op].get(phase.name, 0.0)) for phase in own]
    return found


def lines(found: Sequence[Phase], request: Request) -> list[str]:
    """Format the phases as one table per op and algorithm."""
    text = [
        f"phases, us: {request.ranks} ranks, {request.batch} tokens each, H {request.hidden}, K {request.topk}, "
        f"E {request.experts}, int8 rows in dispatch, bf16 rows in combine, contract {request.contract}"
    ]
    for op, algorithm in dict.fromkeys((phase.op, phase.algorithm) for phase in found):
        own = [phase for phase in found if (phase.op, phase.algorithm) == (op, algorithm)]
        rows = []
        for phase in own:
            model = f"{phase.predicted:.1f}" if phase.predicted else "-"
            rows.append([phase.name, model, f"{phase.slowest:.1f}", f"{phase.mean:.1f}", str(phase.cores)])
        text += ["", *table([[f"{op}, {algorithm}", "model", "slowest", "mean", "cores"], *rows])]
    return [*text, "", *filled(NOTE.format(ROUNDS).split())]
