"""What hierarchy writes for other servers: a row once a token and server."""

from __future__ import annotations

from dataclasses import replace

import op_runs
import pytest

import ascend_moe.reference as ref
from ascend_moe import LocalCluster
from ascend_moe.reference.cases import Case, legal
from ascend_moe.reference.exchange import quantized_row_bytes
from ascend_moe.reference.records import routed_pairs

# H 128: codes and scales of a sum fill blocks of 32 bytes. H 80: the rest of the last blocks crosses unwritten.
CASE = Case(local=2, topk=6, batch=6, units=8, cores=3, contract=2, weights=True, batches="unequal", seed=4)


def run(cluster: LocalCluster, case: Case) -> list[op_runs.RankRun]:
    """The ranks' runs, compared with the reference."""
    runs = op_runs.run(cluster, case)
    op_runs.check(case, runs)
    return [one for one in runs if isinstance(one, op_runs.RankRun)]


def unwritten(case: Case) -> int:
    """Bytes of a coded sum that an item carries and nobody writes, behind its codes and behind its scales."""
    return quantized_row_bytes(case.hidden)[0] - (case.hidden + case.hidden // 8 * 2) if case.returns_int8 else 0


def within_servers(case: Case, share: int) -> list[tuple[int, int]]:
    """Bytes that each rank writes into windows of its own server, in dispatch and combine.

    Dispatch: a row for each pair of a rank of the server, by its forwarder: of its own tokens, and of those of its
    number on the other servers. Combine: every row that it has got; and a sum for each token of its own that has a
    pair on its own server.
    """
    row = -(-case.hidden * (1 if case.quant_mode else 2) // 32) * 32 + 32 * (case.quant_mode != 0) + 64
    back = -(-case.hidden * 2 // 32) * 32
    total = quantized_row_bytes(case.hidden)[0] - unwritten(case) if case.returns_int8 else back
    pairs = [
        (source, token, expert // case.local)
        for source, given in enumerate(case.inputs)
        for token, _, expert in routed_pairs(given, case.experts)
    ]
    found = []
    for rank in range(case.world):
        server, local_rank = rank // share, rank % share
        forwarded = sum(source % share == local_rank and owner // share == server for source, _, owner in pairs)
        received = sum(owner == rank for _, _, owner in pairs)
        own = len({token for source, token, owner in pairs if source == rank and owner // share == server})
        found.append((forwarded * row, received * back + own * total))
    return found


@pytest.mark.parametrize(("world", "share"), [(8, 4), (8, 2)])
@pytest.mark.parametrize(("mode", "units"), [(0, 8), (2, 8), (2, 5)])
def test_a_row_crosses_once_a_token_and_server(
    world: int, share: int, mode: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what a call writes that routes nothing: its messages, and the blocks that count rows."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    case = legal(replace(CASE, world=world, share=share, quant_mode=mode, comm_quant_mode=mode, units=units))
    sizes = {"hidden": case.hidden, "dtype": case.torch_dtype, "ranks_per_server": share}
    modes = {"quant_mode": case.quant_mode, "comm_quant_mode": case.comm_quant_mode}
    with LocalCluster(world, window_mib=8) as cluster:
        empty = run(cluster, replace(case, ids="none"))
        for ids in ("any", "hot", "duplicates", "minus"):
            one = replace(case, ids=ids)
            crossing = ref.predict_crossings(one.inputs, moe_expert_num=one.experts, **sizes, **modes)
            in_server = within_servers(one, share)
            assert sum(sent for sent, _ in crossing) > 0
            for rank, (found, nothing) in enumerate(zip(run(cluster, one), empty, strict=True)):
                for op in (0, 1):
                    wrote = found.traffic[op]["written_window_data"] - nothing.traffic[op]["written_window_data"]
                    sums = crossing[rank][1] // quantized_row_bytes(case.hidden)[0] if op == 1 and mode else 0
                    written = crossing[rank][op] - sums * unwritten(case)
                    assert wrote == written + in_server[rank][op], f"{ids}, rank {rank}, op {op}"
