"""Bad arguments of the four ops, made from tables: what is wrong, and what the error must say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import ascend_moe
from ascend_moe.errors import ArgumentError, AscendMoeError, InvalidExpertId, RoutingMismatch, RoutingOverflow

# Equal batches of 3 tokens, bfloat16, 1 or 2 ranks.
BS, K, H, E = 3, 2, 48, 12
OPS = ("dispatch", "dispatch_v2", "combine", "combine_v2")
OP = {op: getattr(ascend_moe, f"npu_moe_distribute_{op}") for op in OPS}
INT32_MIN, INT32_MAX, INT64_MIN, INT64_MAX = -(2**31), 2**31 - 1, -(2**63), 2**63 - 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
ROWS_DTYPES = ("bfloat16", "float16", "float32")
ROWS = torch.ones(BS, H, dtype=torch.bfloat16)
CONST = ("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")
#: Two const experts, and what combine takes for them.
SPECIAL = {"const_expert_num": 2, "ori_x": ROWS} | {name: torch.ones(2, H, dtype=torch.bfloat16) for name in CONST}


@dataclass(frozen=True)
class Bad:
    """One set of bad arguments.

    ``changes`` replace arguments of a valid call; a function gets the valid call's arguments and returns the
    value. ``fields`` are the error's, ``words`` stand in its message.
    ``raised_by``: "each" rank makes the mistake and sees its own; or the last rank alone makes it, and "all"
    ranks raise, or only the one it belongs to ("last"). ``setting``: arguments of all ranks, wrong on none.
    """

    op: str
    label: str
    changes: Mapping[str, Any]
    fields: Mapping[str, Any]
    words: tuple[str, ...]
    error: type[AscendMoeError] = ArgumentError
    raised_by: str = "each"
    setting: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, valid: Mapping[str, Any], last: bool) -> dict[str, Any]:
        """The arguments of one rank."""
        call = {**valid, **self.setting}
        if self.raised_by == "each" or last:
            made = {name: value(call) if callable(value) else value for name, value in self.changes.items()}
            call.update(made)
        return call


def valid_calls(
    group_ep: str, world: int, rank: int, move: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> dict[str, dict[str, Any]]:
    """Legal arguments of the four ops on one rank, made by running the dispatches: rows for every rank."""
    generator = torch.Generator().manual_seed(rank)
    place = {"group_ep": group_ep, "ep_world_size": world, "ep_rank_id": rank, "moe_expert_num": E}
    ids = move((5 * torch.arange(BS * K) % E).to(torch.int32).view(BS, K))
    x = move(torch.randn(BS, H, generator=generator).to(torch.bfloat16))
    weights = move(torch.rand(BS, K, generator=generator))
    made: dict[str, dict[str, Any]] = {}
    for op, index in [("dispatch", "expand_idx"), ("dispatch_v2", "assist_info_for_combine")]:
        made[op] = {"x": x, "expert_ids": ids, **place}
        out = OP[op](**made[op])
        back = {"expand_x": out[0], "expert_ids": ids, index: out[2], "ep_send_counts": out[4]}
        made[op.replace("dispatch", "combine")] = {**back, "expert_scales": weights, **place}
    return made


def is_dispatch(op: str) -> bool:
    return op.startswith("dispatch")


def local(op: str, argument: str, kind: str, changes: Mapping[str, Any], *words: Any) -> Bad:
    texts = tuple(str(word) for word in words)
    return Bad(op, f"{argument}: {kind}", changes, {"argument": argument}, texts)


def index_name(op: str) -> str:
    return "assist_info_for_combine" if op == "combine_v2" else "expand_idx"


def table(world: int) -> list[Bad]:
    """Every set of bad arguments for a group of this size; labels are distinct."""
    found = [bad for op in OPS for part in PARTS for bad in part(op, world)]
    assert len({(bad.op, bad.label) for bad in found}) == len(found)
    return found


# ---- tensors: dtypes, dimensions, sizes, layouts


@dataclass(frozen=True)
class TensorRule:
    """A tensor argument: its dtypes, its number of dimensions, and what goes along with an optional one."""

    name: str
    dtypes: tuple[str, ...]
    dims: int  # 0: several shapes are legal
    along: Mapping[str, Any] = field(default_factory=dict)  # itself included; empty: the valid call has it


def tensor_rules(op: str, world: int) -> list[TensorRule]:
    f32, i32 = ("float32",), ("int32",)
    times = TensorRule("performance_info", ("int64",), 1, {"performance_info": torch.zeros(world, dtype=torch.int64)})
    timed = [times] if op.endswith("_v2") else []
    ids = TensorRule("expert_ids", i32, 2)
    mask = TensorRule("x_active_mask", ("bool",), 0, {"x_active_mask": torch.ones(BS).bool()})
    if is_dispatch(op):
        scales = TensorRule("scales", f32, 2, {"quant_mode": 2, "scales": torch.ones(E, H)})
        weights = TensorRule("expert_scales", f32, 2, {"expert_scales": torch.ones(BS, K)})
        return [TensorRule("x", ROWS_DTYPES, 2), ids, scales, mask, weights, *timed]
    rules = [TensorRule("expand_x", ROWS_DTYPES, 2), ids, TensorRule(index_name(op), i32, 1)]
    rules += [TensorRule("ep_send_counts", i32, 1), TensorRule("expert_scales", f32, 2), mask, *timed]
    if op == "combine_v2":
        rules.append(TensorRule("shared_expert_x", ("bfloat16",), 0, {"shared_expert_x": ROWS}))
        dims = {"ori_x": 2, **dict.fromkeys(CONST, 0), "const_expert_v": 2}
        rules += [TensorRule(name, ("bfloat16",), dim, SPECIAL) for name, dim in dims.items()]
    return rules


def _with(rule: TensorRule, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The rule's tensor, changed, with everything that goes along."""

    def value(valid: Mapping[str, Any]) -> torch.Tensor:
        return change(rule.along.get(rule.name, valid.get(rule.name)))

    return {**rule.along, rule.name: value}


def wrong_dtypes(op: str, world: int) -> Iterator[Bad]:
    for rule in tensor_rules(op, world):
        for name, dtype in DTYPES.items():
            if name not in rule.dtypes:
                changes = _with(rule, lambda t, dtype=dtype: t.to(dtype))
                yield local(op, rule.name, name, changes, f"is {name}, it must be", *rule.dtypes)


def wrong_dimensions(op: str, world: int) -> Iterator[Bad]:
    for rule in tensor_rules(op, world):
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
    rules = tensor_rules(op, world)
    for rule in rules:
        sparse = _with(rule, lambda t: t.to_sparse())
        yield local(op, rule.name, "sparse", sparse, "torch.sparse_coo", "must be dense")
        meta = _with(rule, lambda t: t.to("meta"))
        # The device of the rows counts, so it is the next one that differs from it.
        first = rules[1].name if rule is rules[0] else rule.name
        where = "is on cpu" if rule is rules[0] else "is on meta"
        yield local(op, first, f"meta {rule.name}", meta, where, "on one device")
        if not rule.along:
            yield local(op, rule.name, "None", {rule.name: None}, "is None, it is required")


def wrong_sizes(op: str, world: int) -> Iterator[Bad]:
    """Beside the borders of every size, which tests/host/test_drawn_rules.py draws."""
    if is_dispatch(op):
        for n in (0, BS - 1, BS + 1):
            x = {"x": torch.ones(n, H, dtype=torch.bfloat16)}
            yield local(op, "expert_ids", f"x has {n} tokens", x, f"has {BS} tokens", f"x has {n}")
        scales = {"scales": torch.ones(E, H)}
        yield local(op, "scales", "without quantizing", scales, "quant_mode 0", "quant_mode 2")
        return
    if op == "combine":
        yield local(op, "shared_expert_x", "V1", {"shared_expert_x": ROWS}, "npu_moe_distribute_combine_v2")
    huge = {"expand_x": torch.zeros(1, 16, dtype=torch.bfloat16).expand(INT32_MAX + 1, 16)}
    yield local(op, "expand_x", "too many rows", huge, INT32_MAX + 1, INT32_MAX)


# ---- integers


def _ints(op: str, name: str, values: Mapping[int, tuple[Any, ...]], **along: Any) -> Iterator[Bad]:
    for value, words in values.items():
        said = ("no rule allows",) if value == INT64_MIN else words
        yield local(op, name, str(value), {**along, name: value}, value, *said)


def wrong_integers(op: str, world: int) -> Iterator[Bad]:
    large = (INT32_MIN, INT32_MAX + 1, INT64_MIN, INT64_MAX, *(2**32 + low for low in (0, world, E)))  # legal low bits
    rules: dict[str, tuple[tuple[int, ...], str]] = {
        "ep_world_size": ((-1, 0, 385), "1..384"),
        "ep_rank_id": ((-1, world, 64), f"0..{world - 1}"),
        "moe_expert_num": ((-1, 0, 1025), "1..1024"),
        "tp_world_size": ((-1, 2, 3), "0 and 1 are supported: CANN no longer has the TP domain"),
        "tp_rank_id": ((-1, 1, 2), "must be 0"),
        "expert_shard_type": ((-1, 1), "only 0"),
        "shared_expert_num": ((-1, 2, 4), "0..1"),
        "shared_expert_rank_num": ((-1, 1, 2), "only 0"),
    }
    zeros = ["zero_expert_num", "copy_expert_num", "const_expert_num"] if op.endswith("_v2") else []
    rules |= dict.fromkeys(zeros, ((-1, 1025), "0..1024"))
    if not is_dispatch(op):
        rules["comm_quant_mode"] = ((-1, 1, 3), "only 0 and 2 are supported: CANN has no other mode for")
    if op == "combine":
        rules["out_dtype"] = ((-1, 1, 2), "only 0 is supported: it is for int32 rows")
    if is_dispatch(op):
        rules |= {"quant_mode": ((-1, 1, 3, 4), "0 and 2"), "expert_token_nums_type": ((-1, 2), "0..1")}
    if op == "combine":
        rules["group_list_type"] = ((-1, 3), "0..2")
    if op == "dispatch_v2":
        rules |= dict.fromkeys(("y_dtype", "x_dtype", "scales_dtype"), ((-1, 0, 1, 27), "Ascend 950's alone"))
    for name, (values, words) in rules.items():
        yield from _ints(op, name, dict.fromkeys((*values, *large), (words,)))
    worlds = [ranks for ranks in (3, 4, 6, 12) if ranks > world]
    yield from _ints(op, "ep_world_size", dict.fromkeys(worlds, (f"{world} ranks",)))
    if world > 1:
        other = {"ep_rank_id": lambda valid: (valid["ep_rank_id"] + 1) % world}
        yield local(op, "ep_rank_id", "the peer's", other, "but this is rank")
        yield from _ints(op, "moe_expert_num", dict.fromkeys((E + 1, 2 * E - 1), (f"ep_world_size {world}",)))
    yield from _global_bs(op, world)


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
        algorithms = ["Hierarchy", "0", "Direct", "Window", "FULLMESH", "window ", " ", "fullmesh_v3", "best"]
        for name in [*algorithms, "\0window", "window\0", "a\nb", "%s%n%d", "窗口", "w" * 5000]:
            said = (f"comm_alg is {name[:64]!r}", "'fullmesh_v1', 'fullmesh_v2', 'hierarchy', 'direct', 'auto'")
            yield local(op, "comm_alg", repr(name[:20]), {"comm_alg": name}, *said)


def unsupported_tensors(op: str, world: int) -> Iterator[Bad]:
    always = {"elastic_info": "CANN no longer has it; ascend_moe.agree and ascend_moe.shrink survive a lost rank"}
    names = {
        "dispatch_v2": always,
        "combine": dict.fromkeys(("activation_scale", "weight_scale", "group_list"), "CANN takes no other"),
        "combine_v2": always,
    }
    for name, why in names.get(op, {}).items():
        for dtype in ("int32", "int64", "float32"):
            given = {name: torch.ones(4, dtype=DTYPES[dtype])}
            yield local(op, name, f"given as {dtype}", given, "is given", "only None is supported", why)


def wrong_special_tensors(op: str, world: int) -> Iterator[Bad]:
    """Of copy and const experts."""
    if op != "combine_v2":
        return
    yield local(op, "ori_x", "none for a copy", {"copy_expert_num": 1}, "ori_x is None", "copy_expert_num 1")
    for name in ("ori_x", *CONST):
        yield local(op, name, "none for a const", SPECIAL | {name: None}, f"{name} is None", "const_expert_num 2")
    for name in CONST:
        yield local(op, name, "without experts", {name: SPECIAL[name]}, f"{name} has shape", "(0")
    other = SPECIAL | {CONST[0]: torch.ones(2, dtype=torch.bfloat16)}
    yield local(op, CONST[1], "another shape", other, "they must be equal")


# ---- bad values in good tensors: ids, counts, positions and source indices, which the kernels find


def _changed(name: str, at: Any, value: int) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    def change(valid: Mapping[str, Any]) -> torch.Tensor:
        tensor = valid[name].clone()
        tensor[at] = value
        return tensor

    return change


def wrong_values(op: str, world: int) -> Iterator[Bad]:
    def collective(label: str, changes: Mapping[str, Any], fields: Mapping[str, Any], *words: Any, **rest: Any) -> Bad:
        texts = tuple(str(word) for word in words)
        return Bad(op, label, changes, {"rank": world - 1, **fields}, texts, **{"raised_by": "all", **rest})

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
        yield collective(f"count {value} at {at}", changes, counts, "ep_send_counts", "must not fall")
    # All rows from one source: more than it may send.
    flood = {"ep_send_counts": torch.full((E,), BS * K + 1, dtype=torch.int32)}
    flood["expand_x"] = torch.zeros(BS * K + 1, H, dtype=torch.bfloat16)
    index = index_name(op)
    if op == "combine_v2":
        flood[index] = torch.zeros(3 * BS * K + 3, dtype=torch.int32)
    yield collective("one source beyond its capacity", flood, counts, f"= {BS * K}")
    if op == "combine_v2":
        for word, (name, limit) in enumerate({"source rank": world, "token": BS, "k": K}.items()):
            for value, row in itertools.product((-1, limit, 1 << 20, INT32_MAX, INT32_MIN), (0, 2)):
                label, changes = (f"{name} {value} in row {row}", {index: _changed(index, 3 * row + word, value)})
                said = (label, f"W {world}, maxBS {BS}, K {K}")
                yield collective(f"source_index {label}", changes, {"argument": index}, *said)
        return
    # Seen by the rank that reads its window: it alone raises.
    kind = {"error": RoutingMismatch, "raised_by": "last"}
    for value, at in itertools.product((-1, BS * K, 1 << 20, INT32_MAX, INT32_MIN), (0, BS * K - 1)):
        said = (index, str(value), "give combine dispatch's own expand_idx")
        yield collective(f"{index} {value} at {at}", {index: _changed(index, at, value)}, {}, *said, **kind)


PARTS: tuple[Callable[[str, int], Iterator[Bad]], ...] = (
    *(wrong_dtypes, wrong_dimensions, wrong_layouts, wrong_sizes, wrong_integers),
    *(wrong_names, unsupported_tensors, wrong_special_tensors, wrong_values),
)


def refused(argument: str, call: Callable[..., Any], *args: Any, says: str = "", **kwargs: Any) -> None:
    """Assert that a call raises an ArgumentError of this argument, in one line that matches ``says``."""
    with pytest.raises(ArgumentError, match=says or None) as caught:
        call(*args, **kwargs)
    assert caught.value.argument == argument and "\n" not in str(caught.value)
