"""The cases of `ascend-moe validate`: every mode, named edge cases, and random ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..call import SpecialExperts
from ..reference.cases import BATCHES, DTYPES, IDS, MASKS, QUANTS, RETURNS, Case, draw, legal

_KINDS = {
    "local": range(1, 9),
    "topk": range(1, 9),
    "units": range(1, 40),
    "batch": range(1, 33),
    "quant": tuple(QUANTS),
    "mask": MASKS[:4],
    "ids": IDS[:6],
    "batches": (BATCHES[0], *BATCHES[2:4]),
}


def matrix(world: int, seed: int = 0, extra: int = 24, dtypes: Sequence[str] = tuple(DTYPES)) -> list[Case]:
    """Return cases of ``dtypes`` for ``world`` ranks: every mode, edge cases, and ``extra`` random ones by ``seed``."""
    cases = [*_modes(world, dtypes), *_edges(world)]
    cases += [
        draw(1000 * seed + number, name=(f"random {number}",), world=(world,), dtype=dtypes, **_KINDS)
        for number in range(extra)
    ]
    numbered = [replace(case, seed=seed * 1000 + number) for number, case in enumerate(cases)]
    return [legal(case) for case in numbered if case.dtype in dtypes]


def between_servers(cases: Sequence[Case], share: int) -> list[Case]:
    """Return the ``cases`` that hierarchy supports, changed to run it between servers of ``share`` ranks."""
    able = [case for case in cases if case.contract == 2 and not case.smooth and not case.plain]
    return [legal(replace(case, share=share)) for case in able]


def _modes(world: int, dtypes: Sequence[str]) -> Iterator[Case]:
    """Yield each (contract, dtype, quant) with usual values of the other options."""
    for contract in (1, 2):
        for dtype in dtypes:
            for quant in QUANTS:
                shared = 2 if contract == 2 and quant == "none" else 0
                kind: dict[str, Any] = {"contract": contract, "dtype": dtype, "shared": shared}
                base = Case("plain", world, batch=5, units=4, **kind, **QUANTS[quant])
                yield replace(base, ids="distinct", local=4, topk=4)
                name = "unequal batches, masked pairs"
                yield replace(base, name=name, batches="unequal", mask="pair", ids="minus")


def _edges(world: int) -> Iterator[Case]:
    for contract in (1, 2):
        base = Case("", world, batch=5, units=4, contract=contract)
        quant = replace(base, **QUANTS["int8"])
        yield replace(base, name="a rank without tokens", batches="zero rank")
        yield replace(quant, name="a rank without tokens", batches="zero rank")
        yield replace(base, name="tokens on one rank only", batches="one rank only")
        yield replace(base, name="no tokens at all", batches="no tokens")
        yield replace(base, name="one token per rank", batch=1)
        yield replace(base, name="hot expert", ids="hot", batch=12)
        yield replace(base, name="duplicate ids", ids="duplicates", local=4)
        yield replace(base, name="hot, duplicate and -1 ids", ids="mixed")
        yield replace(quant, name="ids -1", ids="minus")
        yield replace(base, name="mask: a prefix", mask="prefix")
        yield replace(base, name="mask: tokens", mask="token")
        yield replace(quant, name="mask: pairs", mask="pair")
        yield replace(base, name="mask: nobody is active", mask="nobody")
        yield replace(base, name="global_bs with equal batches", batches="global_bs")
        yield replace(quant, name="expert_token_nums cumulative", expert_token_nums_type=0)
        yield replace(base, name="tp_world_size 1", tp_world_size=1)
        yield replace(base, name="NaN, infinities, denormals", odd=True)
        yield replace(base, name="NaN rows behind the received ones", tail=True)
        yield replace(base, name="K 1, L 1", topk=1, local=1)
        yield replace(base, name="K 16", topk=16, local=16, batch=3)
        yield replace(base, name="K 32", topk=32, local=32, batch=3)
        yield replace(base, name="rows of 32 bytes", units=1)
        yield replace(base, name="many experts", local=max(1, min(64, 512 // world)), topk=8)
        yield replace(quant, name="rows of H 7168", units=448, topk=8, local=8, batch=3)
        yield replace(quant, name="rows of H 16384", units=1024, topk=2, local=2, batch=3)
        yield replace(base, name="many tokens", batch=150, topk=4, local=4)
        quantized = replace(base, **RETURNS["int8"], units=6, topk=4, local=4)
        yield replace(quantized, name="rows back as int8", odd=True)
        yield replace(
            quantized, name="rows back as int8, unequal batches, masked pairs", batches="unequal", mask="pair"
        )
        yield replace(quantized, name="rows back as int8, fp16", dtype="fp16", ids="mixed", **QUANTS["int8"])
        yield replace(quantized, name="rows back as int8, plain sum", plain=True, batches="zero rank", mask="token")
        yield replace(quantized, name="rows back as int8, H 16384", units=1024, topk=2, local=2, batch=3)
        yield replace(base, name="an id out of range", ids="bad")
        yield replace(base, name="plain, after an error", ids="distinct")
        if world > 1:
            yield replace(base, name="more rows than an owner may get", ids="overflow", local=1, topk=4)
        yield replace(base, name="plain, after an error", ids="distinct")
    yield Case(
        "rows back as int8, shared expert's rows", world, batch=5, units=20, contract=2, shared=2, **RETURNS["int8"]
    )
    yield Case("a shared expert's rows, three dimensions", world, batch=4, contract=2, shared=3)
    # not with alphas of (C, H): a device's exp may round differently from the reference's
    special = Case(
        "zero, copy and const experts", world, topk=4, batch=5, contract=2, shared=2, **SpecialExperts(2, 1, 2).given
    )
    yield replace(special, batches="zero rank", mask="pair", ids="mixed")
