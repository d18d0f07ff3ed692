"""Bad arguments of the four ops, made from tables: what is wrong, and what the error must say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bad_call import (
    BS,
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    OPS,
    ROWS_DTYPES,
    Bad,
    E,
    H,
    K,
    index_name,
    is_dispatch,
    local,
)
from bad_values import wrong_values


def table(world: int) -> list[Bad]:
    """Every set of bad arguments for a group of this size; labels are distinct."""
    found = [bad for op in OPS for part in PARTS for bad in part(op, world)]
    assert len({(bad.op, bad.label) for bad in found}) == len(found)
    return found


# ---- tensors: dtypes, dimensions, sizes, layouts


@dataclass(frozen=True)
class TensorRule:
    """A tensor argument: a legal value (with what must go along), its dtypes, its number of dimensions."""

    name: str
    dtypes: tuple[str, ...]
    dims: int  # 0: several shapes are legal
    along: Mapping[str, Any]  # arguments that make it legal, itself included when the valid call has none
    required: bool


def tensor_rules(op: str) -> list[TensorRule]:
    f32, i32, none = ("float32",), ("int32",), dict[str, Any]()
    mask = TensorRule(
        "x_active_mask", ("bool",), 0, {"x_active_mask": torch.ones(BS, dtype=torch.bool)}, False
    )
    ids = TensorRule("expert_ids", i32, 2, none, True)
    if is_dispatch(op):
        scales = {"quant_mode": 2, "scales": torch.ones(E, H)}
        return [
            TensorRule("x", ROWS_DTYPES, 2, none, True),
            ids,
            TensorRule("scales", f32, 2, scales, False),
            mask,
            TensorRule("expert_scales", f32, 2, {"expert_scales": torch.ones(BS, K)}, False),
        ]
    rules = [
        TensorRule("expand_x", ROWS_DTYPES, 2, none, True),
        ids,
        TensorRule(index_name(op), i32, 1, none, True),
        TensorRule("ep_send_counts", i32, 1, none, True),
        TensorRule("expert_scales", f32, 2, none, True),
        mask,
    ]
    if op == "combine_v2":
        shared = {"shared_expert_x": torch.ones(BS, H, dtype=torch.bfloat16)}
        rules.append(TensorRule("shared_expert_x", ("bfloat16",), 0, shared, False))
    return rules


def _with(rule: TensorRule, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The rule's tensor, changed, with everything that goes along."""

    def value(valid: Mapping[str, Any]) -> torch.Tensor:
        return change(rule.along.get(rule.name, valid.get(rule.name)))

    return {**rule.along, rule.name: value}


def wrong_dtypes(op: str, world: int) -> Iterator[Bad]:
    for rule in tensor_rules(op):
        for name, dtype in DTYPES.items():
            if name not in rule.dtypes:
                changes = _with(rule, lambda t, dtype=dtype: t.to(dtype))
                yield local(op, rule.name, name, changes, f"is {name}, it must be", *rule.dtypes)


def wrong_dimensions(op: str, world: int) -> Iterator[Bad]:
    for rule in tensor_rules(op):
        shapes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "0-D": lambda t: t.flatten()[0].clone(),
            "4-D": lambda t: t.reshape(1, 1, 1, -1),
        }
        if rule.dims != 1 and rule.name != "x_active_mask":
            shapes["flat"] = lambda t: t.flatten()
        if rule.dims != 0:
            shapes["one more"] = lambda t: t[None]
        for kind, change in shapes.items():
            words = (f"it must have {rule.dims}",) if rule.dims else ("has shape (", "it must be")
            yield local(op, rule.name, kind, _with(rule, change), *words)


def wrong_layouts(op: str, world: int) -> Iterator[Bad]:
    rules = tensor_rules(op)
    for rule in rules:
        sparse = _with(rule, lambda t: t.to_sparse())
        yield local(op, rule.name, "sparse", sparse, "torch.sparse_coo", "must be dense")
        meta = _with(rule, lambda t: t.to("meta"))
        # The device of the rows counts, so it is the next one that differs from it.
        first = rules[1].name if rule is rules[0] else rule.name
        where = "is on cpu" if rule is rules[0] else "is on meta"
        yield local(op, first, f"meta {rule.name}", meta, where, "on one device")
        if rule.required:
            yield local(op, rule.name, "None", {rule.name: None}, "is None, it is required")


def wrong_sizes(op: str, world: int) -> Iterator[Bad]:
    yield from _dispatch_sizes(op) if is_dispatch(op) else _combine_sizes(op, world)
    flat = [(0,), (BS - 1,), (BS + 1,)]
    for shape in [*flat, (BS, K - 1), (BS, K + 1), (BS - 1, K), (0, K), (K, BS), (1, BS, K)]:
        given = {"x_active_mask": torch.ones(shape, dtype=torch.bool)}
        size = f"has shape ({', '.join(map(str, shape))}"
        yield local(op, "x_active_mask", str(shape), given, size, f"({BS},) or ({BS}, {K})")
    for shape in [(0, K), (BS - 1, K), (BS + 1, K), (BS, 0), (BS, K - 1), (BS, K + 1), (K, BS)]:
        given = {"expert_scales": torch.ones(shape)}
        yield local(op, "expert_scales", str(shape), given, str(shape), f"must be ({BS}, {K})")
    rows = "x" if is_dispatch(op) else "expand_x"
    hiddens = [(47, "bfloat16"), (49, "bfloat16"), (8, "float16"), (4, "float32"), (8191, "bfloat16")]
    for hidden, dtype in hiddens:
        given = {rows: torch.ones(BS, hidden, dtype=DTYPES[dtype])}
        words = (f"{hidden * DTYPES[dtype].itemsize} bytes", f"H = {hidden}", "multiple of 32")
        yield local(op, rows, f"H {hidden} {dtype}", given, *words)
    for hidden in (0, 8193, 8208, 65536):
        given = {rows: torch.ones(BS, hidden, dtype=torch.bfloat16)}
        yield local(op, rows, f"H {hidden}", given, f"H = {hidden}", "1..8192")
    for topk, experts in [(0, E), (E + 1, E), (17, 36), (64, 192)]:
        given = {"expert_ids": torch.zeros(BS, topk, dtype=torch.int32), "moe_expert_num": experts}
        limit = f"1..{min(16, experts)}"
        yield local(op, "expert_ids", f"K {topk} of {experts}", given, f"K = {topk}", limit)
    ids = torch.zeros(4097, 1, dtype=torch.int32)
    given = {rows: torch.zeros(4097, 16, dtype=torch.bfloat16), "expert_ids": ids}
    yield local(op, "expert_ids", "BS 4097", given, "BS = 4097", "at most 4096")


def _dispatch_sizes(op: str) -> Iterator[Bad]:
    for n in (0, BS - 1, BS + 1):
        x = {"x": torch.ones(n, H, dtype=torch.bfloat16)}
        yield local(op, "expert_ids", f"x has {n} tokens", x, f"has {BS} tokens", f"x has {n}")
        ids = {"expert_ids": torch.zeros(n, K, dtype=torch.int32)}
        yield local(op, "expert_ids", f"{n} tokens", ids, f"has {n} tokens", f"x has {BS}")
    for shape in [(0, H), (1, H), (E - 1, H), (E + 1, H), (E, 0), (E, H - 1), (E, H + 1), (H, E)]:
        given = {"quant_mode": 2, "scales": torch.ones(shape)}
        yield local(op, "scales", str(shape), given, str(shape), f"must be ({E}, {H})")
    yield local(
        op, "scales", "without quantising", {"scales": torch.ones(E, H)}, "quant_mode 0", "quant_mode 2"
    )


def _combine_sizes(op: str, world: int) -> Iterator[Bad]:
    pairs, rows = BS * K, world * BS * min(K, E // world)
    if op == "combine":
        for n in (0, 1, pairs - 1, pairs + 1, 2 * pairs):
            given = {"expand_idx": torch.zeros(n, dtype=torch.int32)}
            yield local(op, "expand_idx", f"{n} elements", given, f"has {n} elements", f"BS*K = {pairs}")
        given = {"shared_expert_x": torch.ones(BS, H, dtype=torch.bfloat16)}
        yield local(op, "shared_expert_x", "V1", given, "npu_moe_distribute_combine_v2")
    else:
        for n in (0, rows, 3 * rows - 1):
            given = {"assist_info_for_combine": torch.zeros(n, dtype=torch.int32)}
            words = (f"has {n} elements", f"{rows} rows need at least {3 * rows}")
            yield local(op, "assist_info_for_combine", f"{n} elements", given, *words)
        wrong = [(0, H), (BS - 1, H), (BS + 1, H), (BS, H - 1), (BS, H + 1), (H, BS), (2, 2, H), (1, BS, K)]
        for shape in wrong:
            given = {"shared_expert_x": torch.ones(shape, dtype=torch.bfloat16)}
            words = (f"has shape {shape}", f"({BS}, {H}) or (a, b, {H}) with a*b = {BS}")
            yield local(op, "shared_expert_x", str(shape), given, *words)
    for n in (0, 1, E - 1):
        given = {"ep_send_counts": torch.zeros(n, dtype=torch.int32)}
        yield local(op, "ep_send_counts", f"{n} elements", given, f"has {n} elements", f"W*L = {E}")
    huge = {"expand_x": torch.zeros(1, 16, dtype=torch.bfloat16).expand(INT32_MAX + 1, 16)}
    yield local(op, "expand_x", "too many rows", huge, INT32_MAX + 1, INT32_MAX)


# ---- integers


def _ints(op: str, name: str, values: Mapping[int, tuple[Any, ...]], **along: Any) -> Iterator[Bad]:
    for value, words in values.items():
        said = ("no rule allows",) if value == INT64_MIN else words
        yield local(op, name, str(value), {**along, name: value}, value, *said)


def wrong_integers(op: str, world: int) -> Iterator[Bad]:
    far = (INT32_MIN, INT32_MAX + 1, INT64_MIN, INT64_MAX)
    worlds = dict.fromkeys((-1, 0, 65, *far), ("1..64",))
    worlds |= dict.fromkeys([w for w in (3, 4, 6, 12) if w > world], (f"{world} ranks",))
    yield from _ints(op, "ep_world_size", worlds)
    yield from _ints(op, "ep_rank_id", dict.fromkeys((-1, world, 64, *far), (f"0..{world - 1}",)))
    if world > 1:
        other = {"ep_rank_id": lambda valid: (valid["ep_rank_id"] + 1) % world}
        yield local(op, "ep_rank_id", "the peer's", other, "but this is rank")
    yield from _ints(op, "moe_expert_num", dict.fromkeys((-1, 0, 1025, *far), ("1..1024",)))
    if world > 1:
        yield from _ints(op, "moe_expert_num", dict.fromkeys((E + 1, 2 * E - 1), (f"ep_world_size {world}",)))
    yield from _ints(op, "tp_world_size", dict.fromkeys((-1, 2, 3, *far), ("0 and 1",)))
    yield from _ints(op, "tp_rank_id", dict.fromkeys((-1, 1, 2, *far), ("must be 0",)))
    yield from _ints(op, "expert_shard_type", dict.fromkeys((-1, 1, *far), ("only 0",)))
    yield from _ints(op, "shared_expert_num", dict.fromkeys((-1, 2, 4, *far), ("0..1",)))
    yield from _ints(op, "shared_expert_rank_num", dict.fromkeys((-1, 1, 2, *far), ("only 0",)))
    yield from _global_bs(op, world)
    zeros = ["zero_expert_num", "copy_expert_num", "const_expert_num"] if op.endswith("_v2") else []
    zeros += [] if is_dispatch(op) else ["comm_quant_mode"]
    zeros += ["out_dtype"] if op == "combine" else []
    for name in zeros:
        yield from _ints(op, name, dict.fromkeys((-1, 1, 2, *far), ("only 0",)))
    if is_dispatch(op):
        yield from _ints(op, "quant_mode", dict.fromkeys((-1, 1, 3, 4, *far), ("0 and 2",)))
        yield from _ints(op, "expert_token_nums_type", dict.fromkeys((-1, 2, *far), ("0..1",)))
    if op == "combine":
        yield from _ints(op, "group_list_type", dict.fromkeys((-1, 3, *far), ("0..2",)))
    if op == "dispatch_v2":
        for name in ("y_dtype", "x_dtype", "scales_dtype"):
            yield from _ints(op, name, dict.fromkeys((-1, 0, 1, 27, *far), ("only None",)))


def _global_bs(op: str, world: int) -> Iterator[Bad]:
    multiple = (f"0 or a multiple of ep_world_size {world}",)
    yield from _ints(op, "global_bs", dict.fromkeys((-1, -world * BS, INT32_MIN, INT64_MIN), multiple))
    if world > 1:
        yield from _ints(op, "global_bs", dict.fromkeys((1, world * BS + 1, INT64_MAX), multiple))
    for each in (4097, 2**40):
        yield from _ints(op, "global_bs", {world * each: (f"{each} tokens a rank", "at most 4096")})
    for each in range(1, BS):
        words = (f"BS is {BS}", f"at most {each}", "ep_world_size * the largest BS")
        yield from _ints(op, "global_bs", {world * each: words})


# ---- names and what is not supported


def wrong_names(op: str, world: int) -> Iterator[Bad]:
    lengths = {"empty": "", "128": "g" * 128, "1000": "g" * 1000}
    for kind, name in lengths.items():
        yield local(op, "group_ep", kind, {"group_ep": name}, f"has {len(name)} characters", "1..127")
    unknown: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "unknown": lambda valid: "no such group",
        "127": lambda valid: "g" * 127,
        "blank behind": lambda valid: valid["group_ep"] + " ",
        "NUL behind": lambda valid: valid["group_ep"] + "\0",
        "newline": lambda valid: "a\nb",
        "quotes": lambda valid: "';%s%n\"",
        "not ASCII": lambda valid: "专家并行",
    }
    for kind, make in unknown.items():
        yield local(op, "group_ep", kind, {"group_ep": make}, "names no live communicator", "known are")
    if op.endswith("_v2"):
        algorithms = ["hierarchy", "0", "Direct", "Window", "FULLMESH", "window ", " ", "fullmesh_v3", "best"]
        for name in [*algorithms, "\0window", "window\0", "a\nb", "%s%n%d", "窗口", "w" * 5000]:
            said = (f"comm_alg is {name[:64]!r}", "'fullmesh_v1', 'fullmesh_v2', 'direct', 'auto'")
            yield local(op, "comm_alg", repr(name[:20]), {"comm_alg": name}, *said)


def unsupported_tensors(op: str, world: int) -> Iterator[Bad]:
    names = {
        "dispatch_v2": ["elastic_info", "performance_info"],
        "combine": ["activation_scale", "weight_scale", "group_list"],
        "combine_v2": ["elastic_info", "performance_info", "ori_x", "const_expert_v"],
    }
    names["combine_v2"] += ["const_expert_alpha_1", "const_expert_alpha_2"]
    for name in names.get(op, []):
        for dtype in ("int32", "int64", "float32"):
            given = {name: torch.ones(4, dtype=DTYPES[dtype])}
            yield local(op, name, f"given as {dtype}", given, "is given", "only None is supported")


PARTS: tuple[Callable[[str, int], Iterator[Bad]], ...] = (
    *(wrong_dtypes, wrong_dimensions, wrong_layouts, wrong_sizes, wrong_integers),
    *(wrong_names, unsupported_tensors, wrong_values),
)
