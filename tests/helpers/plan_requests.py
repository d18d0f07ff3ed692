"""Draws requests of plans, for tests of what op_host's rules, plan and doctor say of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ascend_moe.plan import Request

A2, A3 = "Ascend910B3", "Ascend910_9391"
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def drawn_requests(seed: int, count: int) -> Iterator[Request]:
    """Calls that break no rule: of a server, between servers, in two levels, with experts to which no row travels."""
    rng = random.Random(seed)
    for _ in range(count):
        soc, ranks = rng.choice([A2, A2, A3]), rng.choice([1, 2, 3, 4, 6, 8, 16, 32, 64, 72, 384])
        shares = [share for share in range(1, ranks + 1) if ranks % share == 0] if soc == A2 else [ranks]
        share, local = rng.choice(shares), rng.choice([1, 2, 3, 8, 14] if ranks < 100 else [1, 2])
        levels = 1 < share < ranks and rng.random() < 0.6
        quant, contract = rng.choice([0, 2]), "v2" if levels else rng.choice(["v1", "v2"])
        algorithms = ["window", "auto"] + ["direct"] * (share == ranks)
        given = rng.random() < 0.3 and contract == "v2"
        topk = rng.randint(1, min(9, ranks * local))
        yield Request(
            ranks=ranks,
            experts=ranks * local,
            topk=topk,
            hidden=16 * rng.choice([2, 3, 64, 65, 448]),
            batch=rng.choice([0, 1, 2, 31, 128, 300]),
            equal_batches=rng.random() < 0.5,
            dtype=rng.choice([*SIZES]),
            quant_mode=quant,
            smooth=quant == 2 and not levels and rng.random() < 0.5,
            contract=contract,
            soc=soc,
            ranks_per_server=share,
            comm_alg="hierarchy" if levels else rng.choice(algorithms),
            weights=levels or rng.random() < 0.4,
            rdma_flags=share < ranks and not levels and rng.random() < 0.5,
            **dict.fromkeys(("zero_expert_num", "copy_expert_num", "const_expert_num"), rng.randint(1, 3) * given),
        )
