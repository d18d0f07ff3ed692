"""A whole run: one set of processes a number of ranks, all its cases and methods in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ascend_moe.bench import environment, ranks
from ascend_moe.bench.cases import Case
from ascend_moe.bench.job import Job
from ascend_moe.bench.methods import METHODS
from ascend_moe.bench.methods.transports import Mpi
from ascend_moe.bench.results import Run, evaluate, limits
from ascend_moe.comm.communicator import DEFAULT_WINDOW_MIB
from ascend_moe.plan import Request, plan

Progress = Callable[[Case, int], None]

_MIB = 1 << 20


def run(
    cases: Sequence[Case], methods: Sequence[str], iterations: int, *, with_limits: bool, progress: Progress
) -> Run:
    """Measures all cases. MPI's methods are left out where mpi4py or mpiexec is missing.

    Raises:
        RankFailed: a rank raised, died or stood still.
    """
    needs_mpi = any(getattr(METHODS[name], "transport", None) is Mpi for name in methods)
    mpi = needs_mpi and ranks.has_mpi()
    found = Run(environment.about(environment.mpi_version() if mpi else ""))
    cores = environment.cores()
    for world in sorted({case.world for case in cases}):
        mine = [case for case in cases if case.world == world]
        job = Job(
            world=world,
            cases=mine,
            methods=list(methods),
            iterations=iterations,
            mpi=mpi,
            limits=with_limits,
            window_mib=max(window_mib(case) for case in mine),
            lent_mib=max(lent_mib(case) for case in mine),
            bench_pid=os.getpid(),
            cores=cores,
        )

        def tell(number: int, done: int, mine: list[Case] = mine) -> None:
            if number < len(mine):
                progress(mine[number], done)

        marks, machine = ranks.run(job, tell)
        load = round(os.getloadavg()[0], 2)
        if machine:
            found.limits.append(limits(world, machine))
        for case, of_ranks in zip(mine, marks, strict=True):
            found.cases.append(evaluate(case, of_ranks, load, len(cores), environment.l2_bytes()))
    return found


def window_mib(case: Case) -> int:
    """HCCL_BUFFSIZE that the case needs."""
    request = Request(
        ranks=case.world,
        experts=case.experts,
        topk=case.topk,
        hidden=case.hidden,
        batch=case.batch,
        dtype=case.dtype,
        quant=bool(case.quant_mode),
    )
    return max(DEFAULT_WINDOW_MIB, plan(request).buffsize_mib)


def lent_mib(case: Case) -> int:
    """ASCEND_MOE_LENT_MIB for three tensors of the most rows that may come: in use, spent, taken beside."""
    most = case.world * case.batch * min(case.topk, case.local_experts)
    return max(DEFAULT_WINDOW_MIB, 3 * most * case.hidden * case.torch_dtype.itemsize // _MIB + 1)
