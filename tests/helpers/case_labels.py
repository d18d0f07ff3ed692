"""What a case covers, in words that a test can count."""

from __future__ import annotations

from collections import Counter

import torch

from ascend_moe.reference.cases import Case


def labels(case: Case) -> set[str]:
    """What a case covers, read off its tensors. A call that raises counts for its error alone."""
    fault = case.fault()
    if fault is not None:
        return {fault.kind}
    flags = {
        "smooth scales": case.quant == "smooth",
        "zero-batch rank": 0 in case.batch_sizes,
        "unequal batches": len(set(case.batch_sizes)) > 1,
        "int8, H not a multiple of 32": case.quant_mode and case.hidden % 32,
        "shared_expert_x": case.shared,
        "NaN rows behind expand_x": case.tail,
        "special values": case.odd,
    }
    return {case.dtype, *(name for name, given in flags.items() if given), *_routing_labels(case)}


def _routing_labels(case: Case) -> set[str]:
    found: set[str] = set()
    total: Counter[int] = Counter()
    for one in case.inputs:
        mask = one.x_active_mask
        live = torch.ones_like(one.expert_ids, dtype=torch.bool)
        if mask is not None:
            live &= mask if mask.dim() == 2 else mask[:, None]
            if mask.numel() and not mask.any():
                found.add("rank without an active token")
            elif not mask.all():
                prefix = "a prefix" if bool((mask[:-1] >= mask[1:]).all()) else "no prefix"
                found.add("mask 2-D" if mask.dim() == 2 else f"mask 1-D, {prefix}")
        found |= {"id -1"} if bool((live & (one.expert_ids == -1)).any()) else set()
        for ids, alive in zip(one.expert_ids, live, strict=True):
            routed = [expert for expert in ids[alive].tolist() if expert != -1]
            found |= {"duplicates within capacity"} if len(set(routed)) < len(routed) else set()
            total.update(routed)
    rows = sum(total.values())
    if case.experts > 1 and rows >= 4 and 2 * max(total.values()) >= rows:
        found.add("hot expert")
    return found
