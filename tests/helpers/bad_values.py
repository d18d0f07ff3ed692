"""Bad values in good tensors: ids, counts, positions and triples, which the kernels find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from bad_call import BS, INT32_MAX, INT32_MIN, Bad, E, H, K, is_dispatch

from ascend_moe.errors import ArgumentError, AscendMoeError, InvalidExpertId, RoutingMismatch, RoutingOverflow


def _changed(name: str, at: Any, value: int) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    def change(valid: Mapping[str, Any]) -> torch.Tensor:
        tensor = valid[name].clone()
        tensor[at] = value
        return tensor

    return change


def wrong_values(op: str, world: int) -> Iterator[Bad]:
    def collective(
        label: str,
        changes: Mapping[str, Any],
        fields: Mapping[str, Any],
        *words: Any,
        error: type[AscendMoeError] = ArgumentError,
        **rest: Any,
    ) -> Bad:
        texts = tuple(str(word) for word in words)
        return Bad(
            op, label, changes, {"rank": world - 1, **fields}, texts, error, **{"raised_by": "all", **rest}
        )

    for value in (-2, -3, -1000, E, E + 1, 1 << 16, INT32_MAX, INT32_MIN):
        for token, k in [(0, 0), (1, 1), (BS - 1, K - 1)]:
            changes = {"expert_ids": _changed("expert_ids", (token, k), value)}
            fields = {"token": token, "k": k, "expert_id": value}
            words = (f"rank {world - 1}, token {token}, k {k}", f"expert id {value}", f"0..{E - 1}")
            yield collective(f"id {value} at {token}, {k}", changes, fields, *words, error=InvalidExpertId)
    # One expert, three tokens, twice each: 6 rows, where a rank with a single expert takes 3.
    if is_dispatch(op) and world > 1:
        few = {"moe_expert_num": world, "expert_ids": torch.arange(K, dtype=torch.int32).repeat(BS, 1)}
        for owner in range(world):
            changes = {"expert_ids": torch.full((BS, K), owner, dtype=torch.int32)}
            fields = {"owner": owner, "rows": BS * K, "capacity": BS}
            said = (f"{BS * K} rows to rank {owner}", f"= {BS} rows")
            label = f"ids repeated to rank {owner}"
            yield collective(label, changes, fields, *said, error=RoutingOverflow, setting=few)
    if is_dispatch(op):
        return
    counts = {"argument": "ep_send_counts"}
    places = [(0, -1), (0, INT32_MIN), (0, INT32_MAX), (3, -5), (E - 1, -1), (E - 1, 10**6), (E - 1, 0)]
    for at, value in places:
        changes = {"ep_send_counts": _changed("ep_send_counts", at, value)}
        label = f"count {value} at {at}"
        yield collective(label, changes, counts, "ep_send_counts", "must not fall")
    # All rows from one source: more than it may send.
    flood = {"ep_send_counts": lambda valid: torch.full((E,), BS * K + 1, dtype=torch.int32)}
    flood["expand_x"] = lambda valid: torch.zeros(BS * K + 1, H, dtype=torch.bfloat16)
    if op == "combine_v2":
        flood["assist_info_for_combine"] = lambda valid: torch.zeros(3 * BS * K + 3, dtype=torch.int32)
    yield collective("one source beyond its capacity", flood, counts, f"= {BS * K}")
    if op == "combine_v2":
        yield from _wrong_triples(collective, world)
    else:
        yield from _wrong_index(collective)


def _wrong_triples(collective: Callable[..., Bad], world: int) -> Iterator[Bad]:
    words = ("source rank", "token", "k")
    limits = (world, BS, K)
    fields = {"argument": "assist_info_for_combine"}
    for word, (name, limit) in enumerate(zip(words, limits, strict=True)):
        for value in (-1, limit, 1 << 20, INT32_MAX, INT32_MIN):
            for row in (0, 2):
                changed = _changed("assist_info_for_combine", 3 * row + word, value)
                said = (f"{name} {value} in row {row}", f"W {world}, maxBS {BS}, K {K}")
                changes = {"assist_info_for_combine": changed}
                label = f"triple {name} {value} in row {row}"
                yield collective(label, changes, fields, *said)


def _wrong_index(collective: Callable[..., Bad]) -> Iterator[Bad]:
    # Seen by the rank that reads its window: it alone raises.
    for value in (-1, BS * K, 1 << 20, INT32_MAX, INT32_MIN):
        for at in (0, BS * K - 1):
            changes = {"expand_idx": _changed("expand_idx", at, value)}
            said = ("expand_idx", str(value), "give combine dispatch's own expand_idx")
            yield collective(
                f"expand_idx {value} at {at}", changes, {}, *said, error=RoutingMismatch, raised_by="last"
            )
