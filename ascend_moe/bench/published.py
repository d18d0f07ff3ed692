"""Round trips of the tuned peers that were measured before, with other code: does a peer here do as well?

p10 of one run of this project's first prototypes, on a shared machine of two cores, ranks pinned; MPI was
OpenMPI 4.1.4 over shared memory. Only ratios to the limit of the same run are compared, p10 to p10.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_moe.bench.cases import Case

SOURCE = "the prototypes' table"
MPI_TUNED, GLOO_TUNED = "mpi-a2a-tuned", "gloo-a2a-tuned"
TOLERANCE = 0.25


@dataclass(frozen=True)
class Row:
    """µs; at more than 2 ranks the limit is W/2 times that of 2 ranks."""

    limit: float
    mpi_tuned: float
    gloo_tuned: float

    def ratio(self, method: str) -> float | None:
        """The method's round trip over the limit, None of a method that is not in the table."""
        times = {MPI_TUNED: self.mpi_tuned, GLOO_TUNED: self.gloo_tuned}
        return times[method] / self.limit if method in times else None


# (W, H, K, E, BS), bf16, uniform routing
TABLE = {
    (2, 2048, 6, 64, 8): Row(14, 445, 2201),
    (2, 2048, 6, 64, 32): Row(48, 901, 1984),
    (2, 4096, 8, 128, 32): Row(176, 1982, 4104),
    (2, 7168, 8, 256, 8): Row(55, 1088, 3111),
    (2, 7168, 8, 256, 32): Row(322, 3362, 7452),
    (4, 2048, 6, 64, 32): Row(96, 2317, 4236),
    (4, 7168, 8, 256, 8): Row(110, 2787, 5195),
    (8, 2048, 6, 64, 32): Row(192, 5559, 13152),
    (8, 7168, 8, 256, 8): Row(220, 6894, 16680),
    (8, 7168, 8, 256, 32): Row(1288, 17866, 28617),
}


def expected(case: Case, method: str) -> float | None:
    """The table's ratio of this method to the limit, None where the table has none."""
    if (case.skew, case.quant, case.dtype) != ("uniform", "none", "bf16"):
        return None
    row = TABLE.get((case.world, case.hidden, case.topk, case.experts, case.batch))
    return row.ratio(method) if row else None


def flag(case: Case, method: str, measured: float) -> str:
    """What to say when a tuned peer is not within 25 % of the table's ratio, or ''."""
    wanted = expected(case, method)
    if wanted is None or abs(measured / wanted - 1) <= TOLERANCE:
        return ""
    how = "slower" if measured > wanted else "faster"
    return f"{how} than published: {measured:.1f} x the limit here, {wanted:.1f} x in {SOURCE}"
