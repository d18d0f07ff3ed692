"""A rank of torchrun: a bring-up with faults of rank 1 in every fourth probe; rank 0 checks that the others pass.

Arguments: the first probe with a fault, and the number of its kind; the kinds of the next ones follow.
"""

from __future__ import annotations

import sys

from planted_faults import KINDS, WRONG, Planted
from torch.distributed.rendezvous import rendezvous

from ascend_moe.validate import supervisor
from ascend_moe.validate.bringup import Ranks, steps
from ascend_moe.validate.probes import FAULT, PASS


def main(first: int, kind: int) -> None:
    supervisor.STEP_S, supervisor.GRACE_S = 30.0, 2.0
    store, rank, world = next(iter(rendezvous("env://")))
    names = [step.probe.name for step in steps("npu", Ranks("npu", world))]
    kinds = [name for name in KINDS if name != WRONG] * 2
    planted = Planted(dict(zip(names[first::4], kinds[kind:], strict=False)), real=True)
    outcome = supervisor.Supervisor(Ranks("npu", world, rank), store, str, str, planted).run()
    if rank != 0:
        return
    assert [result.name for result in outcome.results] == names
    for result in outcome.results:
        fault = result.name in planted.faults
        assert result.status == (FAULT if fault else PASS) or result.name == "cycle rate", result
        assert not fault or KINDS[planted.faults[result.name]][1] in str(result), result
    print(f"{len(planted.faults)} faults, {outcome.stored}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
