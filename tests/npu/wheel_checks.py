"""Schemas, sizes and dtypes against those of the torch_npu wheel: its C++ and its Meta kernels.

Runs on the virtual NPU with a libopapi whose functions do nothing: torch_npu's C++ checks the arguments,
allocates the outputs and calls aclnn. Where its Meta kernels contradict its C++, ours follow the C++.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch_npu
import torch_npu.op_plugin.meta._meta_registrations as registrations
from moe_operator_checks import calls
from npu_runs import run_checks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_calls import local_addends

from ascend_moe.native.torch_npu import NEWER, OLDER, operators, refused
from ascend_moe.ops.registration import SCHEMAS, TORCH_NPU_SCHEMAS

NAMES = [*SCHEMAS, *TORCH_NPU_SCHEMAS]
BF16, FP16, FP32, INT8, INT32, INT64, BOOL = (
    "bfloat16", "float16", "float32", "int8", "int32", "int64", "bool"
)  # fmt: skip
H = 64


@dataclass(frozen=True)
class T:
    """A tensor to be."""

    shape: tuple[int, ...]
    dtype: str = FP32


@dataclass(frozen=True)
class Case:
    """One call, by operator with overload.

    ``ours``: what we say where we differ from torch_npu's C++ on purpose: outputs, or words of the error.
    """

    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    ours: list[list[Any]] | str | None = None


def product(**choices: list[Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def given(**kwargs: Any) -> dict[str, Any]:
    """Without the arguments that are None: left out of the call."""
    return {name: value for name, value in kwargs.items() if value is not None}


# ---- MC2


def dispatch(version: str = "", **over: Any) -> Case:
    sizes: dict[str, Any] = {"bs": 6, "k": 4, "world": 8, "rank": 0, "experts": 16, "dtype": BF16} | over
    take = sizes.pop
    bs, k, world, rank, experts, dtype = (take(n) for n in ("bs", "k", "world", "rank", "experts", "dtype"))
    tp = sizes.pop("tp", None)
    kwargs = given(**sizes, **({"group_tp": "tp", "tp_world_size": tp} if tp else {}))
    args = (T((bs, H), dtype), T((bs, k), INT32), "nobody", world, rank, experts)
    return Case(f"npu_moe_distribute_dispatch{version}", args, kwargs)


def _dispatches(version: str) -> Iterator[Case]:
    plain = {"bs": [0, 6], "k": [1, 4], "world": [4, 16], "dtype": [BF16, FP16], "quant_mode": [0, 2]}
    for sizes in product(**plain, global_bs=[0, 96], tp=[0, 1, 2]):
        yield dispatch(version, **sizes)
    scores = T((6, 4))
    for sizes in product(world=[4, 8, 16], global_bs=[0, 160], tp=[0, 1], expert_token_nums_type=[0, 1]):
        yield dispatch(version, expert_scales=scores, x_active_mask=T((6,), BOOL), **sizes)
    for sizes in product(rank=[0, 1, 2, 7], shared_expert_rank_num=[1, 2, 4], global_bs=[0, 80], bs=[5, 6]):
        yield dispatch(version, experts=24, **sizes)
    yield dispatch(version, quant_mode=2, scales=T((16, H)))
    if version:
        for sizes in product(rank=[0, 3, 5], shared_expert_num=[2], shared_expert_rank_num=[2, 4]):
            yield dispatch(version, experts=24, **sizes)
        for sizes in product(rank=[0, 5], shared_expert_rank_num=[0, 2], global_bs=[0, 80]):
            yield dispatch(version, experts=24, elastic_info=T((20,), INT32), **sizes)
        for y_dtype, comm_alg in itertools.product([1, 5, 15], ["", "fullmesh_v2"]):
            yield dispatch(version, y_dtype=y_dtype, comm_alg=comm_alg, quant_mode=2)
    else:
        for sizes in product(rank=[0, 4, 6, 7], shared_expert_rank_num=[1, 2]):
            yield dispatch(version, experts=24, expert_shard_type=1, **sizes)
        yield dispatch(version, scales=T((16, H)))


def combine(version: str = "", **over: Any) -> Case:
    sizes: dict[str, Any] = {"bs": 6, "k": 4, "dtype": BF16} | over
    bs, k, dtype = (sizes.pop(name) for name in ("bs", "k", "dtype"))
    tensors = (T((96, H), dtype), T((bs, k), INT32), T((96 * 128,), INT32), T((16,), INT32), T((bs, k)))
    if version == "_add_rms_norm":
        tensors = (*tensors, T((bs, 1, H), dtype), T((H,), dtype))
    args = (*tensors, "nobody", 8, 0, 16)
    # torch_npu's C++ takes no float32 rows.
    rows = [[FP32, bs, H]]
    if version == "_add_rms_norm":
        rows = [[FP32, bs, 1, H], [FP32, bs, 1, 1], [FP32, bs, 1, H]]
    return Case(f"npu_moe_distribute_combine{version}", args, given(**sizes), rows if dtype == FP32 else None)


def _combines(version: str) -> Iterator[Case]:
    for sizes in product(bs=[0, 1, 6], k=[1, 4], dtype=[BF16, FP16, FP32], global_bs=[0, 64]):
        yield combine(version, **sizes)
    for sizes in product(tp_world_size=[0, 1, 2], comm_quant_mode=[0, 2]):
        yield combine(version, tp_send_counts=T((1,), INT32), x_active_mask=T((6, 4), BOOL), **sizes)
    if version:
        for sizes in product(**local_addends([None, T((6, H), BF16)]), copy_expert_num=[0, 1]):
            yield combine(version, ori_x=T((6, H), BF16), **sizes)


def _family() -> Iterator[Case]:
    for x_ref in (T((3,)), T((2, 3), BF16), T((), INT64), T((0, 4), BOOL), T((4,), INT8)):
        for world in (2, 16):
            yield Case("_npu_distribute_barrier", (x_ref, "nobody", world))
            yield Case("_npu_distribute_barrier", (x_ref, "nobody", world), {"time_out": T((1,), INT32)})
    for sizes in product(bs=[0, 1, 7], k=[1, 8], dtype=[INT32, INT64], pruned=[False, True]):
        ids, table = T((sizes["bs"], sizes["k"]), sizes["dtype"]), T((16, 5), INT32)
        kwargs: dict[str, Any] = {"local_rank_id": 1, "world_size": 8, "balance_mode": sizes["k"] % 2}
        if sizes["pruned"]:
            kwargs |= {"expert_scales": T((sizes["bs"], sizes["k"])), "pruning_threshold": T((sizes["k"],))}
            kwargs |= {"active_mask": T((sizes["bs"],), BOOL)}
        yield Case("npu_moe_update_expert", (ids, table), kwargs)


def _all_to_all() -> Iterator[Case]:
    for sizes in product(transposed=[False, True], shared=[False, True], dtype=[BF16, FP16], rows=[0, 12]):
        counts, dtype = [sizes["rows"] // 12 * count for count in (1, 2, 4, 5)], sizes["dtype"]
        weight = T((2, 10, H) if sizes["transposed"] else (2, H, 10), dtype)
        args = (T((sum(counts), H), dtype), weight, "nobody", 2, counts, counts[::-1])
        kwargs: dict[str, Any] = {"trans_gmm_weight": sizes["transposed"]}
        if sizes["shared"]:
            kwargs |= {"mm_x": T((3, 16), dtype), "mm_weight": T((16, 6), dtype)}
        yield Case("npu_gmm_alltoallv", args, kwargs)
        yield Case("npu_alltoallv_gmm", args, kwargs | {"permute_out_flag": not sizes["shared"]})


# ---- experts, routing: the calls whose results are compared on the virtual NPU, and more sizes


def _vendors() -> Iterator[Case]:
    for call in calls():
        if call.op != "npu_moe_init_routing_v2":  # whose C++ keeps the number of experts of its first call
            yield Case(call.op, call.args, call.kwargs)
    groups = {"group_list": T((3,), INT64), "group_type": 0}
    x, w = T((9, 8), INT8), T((3, 8, 10), INT8)
    for out, split in itertools.product([3, 5, 6, 15], [2, 3]):
        scales = {"scale": [T((3, 10))], "per_token_scale": [T((9,))]} if out != 3 else {}
        kwargs = groups | {"split_item": split, "output_dtype": out} | scales
        yield Case("npu_grouped_matmul", ([x], [w]), kwargs)
    # K-grouped: the gradient of the weights.
    one, all_, each = [T((9, 10), BF16)], [T((3, 9, 10), BF16)], [T((9, 10), BF16)] * 3
    for split, weights in ((2, one), (3, one), (0, all_), (0, each), (1, all_), (1, each)):
        kwargs = groups | {"split_item": split, "group_type": 2}
        yield Case("npu_grouped_matmul", ([T((8, 9), BF16)], weights), kwargs)
    for n, k, dtype in itertools.product([0, 1, 7], [1, 4], [BF16, FP32]):
        x, ids = T((n, 16), dtype), T((n, k), INT32)
        yield Case("npu_moe_gating_top_k_softmax_v2", (x,), {"k": k, "renorm": n % 2, "output_softmax": True})
        for number in (0, 3, 99):
            yield Case("npu_moe_init_routing", (x, ids, ids, number))
            yield Case("npu_moe_token_permute", (x, ids), {"num_out_tokens": number})
    for n, active, kind, mode in itertools.product([1, 7], [0, 5, 99], [0, 1, 2], [-1, 0, 1]):
        scale = {-1: None, 0: T((1,)), 1: T((1, H))}[mode]
        for extra in ({}, {"active_expert_range": [2, 9], "row_idx_type": 1, "scale": scale}):
            kwargs = {"active_num": active, "expert_num": 16, "quant_mode": mode} | extra
            kwargs |= {"expert_tokens_num_type": kind, "expert_tokens_num_flag": active != 5}
            yield Case("npu_moe_init_routing_v2", (T((n, H), BF16), T((n, 2), INT32)), kwargs)
    kwargs = {"drop_pad_mode": 1, "expert_num": 16, "expert_capacity": 3, "expert_tokens_num_type": 1}
    for mode, flag in itertools.product([-1, 0, 1], [False, True]):
        more = {"quant_mode": mode, "expert_tokens_num_flag": flag}
        yield Case("npu_moe_init_routing_v2", (T((7, H), FP16), T((7, 2), INT32)), kwargs | more)


def _contradictions() -> Iterator[Case]:
    """More calls for which torch_npu's Meta kernels answer otherwise than its C++."""
    shared, routed = T((6, H), BF16), (T((7, 8)), T((7, 2), INT32))
    two, stacked = ([T((4, 8))], [T((8, 10))] * 2), ([T((4, 8))], [T((2, 8, 10))])
    groups = {"group_list": T((2,), INT64)}
    yield combine(**local_addends(shared))
    yield from (combine(dtype=INT32), combine(dtype=INT32, out_dtype=1), combine("_v2", dtype=INT32))
    yield dispatch("_v2", scales=T((16, H)))
    yield dispatch("_v2", experts=24, expert_shard_type=1)
    yield dispatch("_v2", expert_scales=T((6, 4)))
    yield dispatch("_v2", experts=7)  # room for no rows
    yield dispatch("_v2", world=16, rank=99)
    yield Case("npu_grouped_matmul.List", two, {"group_list": [1, 4]})
    yield Case("npu_moe_gating_top_k_softmax_v2", (T((2, 3, 16), FP16),), {"output_softmax": True})
    yield Case("npu_moe_init_routing_v2", routed, {"scale": T((7,)), "expert_num": 16})
    yield Case("npu_grouped_matmul", stacked, groups)
    # Ours differ from the C++: it takes any rank, wants a group_type even where one alone is possible, and
    # makes as many outputs as there are groups, of sizes that only the values tell.
    outside = dispatch(world=16, rank=99)
    yield Case(outside.op, outside.args, outside.kwargs, "ep_rank_id is 99, it must be in 0..15")
    yield Case("npu_grouped_matmul", ([T((4, 8))], [T((8, 10))]), {}, [[FP32, 4, 10]])
    yield Case("npu_grouped_matmul", stacked, groups | {"group_type": 0}, "sizes would depend on its values")


def matrix() -> list[Case]:
    """Every call on which torch_npu and we are compared."""
    versions = ("", "_v2")
    parts = [_family(), _all_to_all(), _vendors(), _contradictions()]
    parts += [_dispatches(version) for version in versions]
    parts += [_combines(version) for version in (*versions, "_add_rms_norm")]
    return [case for part in parts for case in part]


# ---- answers


def made(value: Any, device: str) -> Any:
    if isinstance(value, T):
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=device)
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, (list, tuple)):
        return type(value)(made(part, device) for part in value)
    return value


def overload(namespace: str, op: str) -> Any:
    name, _, variant = op.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant or "default")


Answer = tuple[list[list[Any]], str]


def answer(namespace: str, case: Case, device: str) -> Answer:
    """Dtype and shape of every output, which are on this device, and "", or nothing and what was raised."""
    kwargs = {name: made(value, device) for name, value in case.kwargs.items()}
    for name in ("output_dtype", "dtype"):
        if isinstance(kwargs.get(name), str):
            kwargs[name] = getattr(torch, kwargs[name])
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some Meta kernels print
            outputs = overload(namespace, case.op)(*made(case.args, device), **kwargs)
    except Exception as error:  # what a Meta kernel raises is its answer
        return [], f"{type(error).__name__}: {error}".splitlines()[0]
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    assert {str(output.device) for output in outputs if output is not None} <= {device}, (namespace, case)
    return [
        [] if output is None else [str(output.dtype).removeprefix("torch."), *output.shape] for output in outputs
    ], ""


def agrees(case: Case) -> bool:
    outputs, raised = answer("ascend_moe", case, "meta")
    with FakeTensorMode():
        fake = answer("ascend_moe", case, "npu:0")
    if fake[0] != outputs or bool(fake[1]) != bool(raised):
        return False
    if raised and not raised.startswith(f"ArgumentError: {case.op.partition('.')[0]}: "):
        return False
    cpp, refused_by = answer("npu", case, "npu:0")
    name = case.op.partition(".")[0]
    if refused(name, case.kwargs):  # torch's own operators compute it
        return bool(refused_by) and answer("ascend_moe", case, "npu:0")[0] == outputs
    others = operators().shapes.get(name)
    if others and all(case.kwargs.get(argument) in values for argument, values in others.items()):
        return outputs != cpp
    if case.ours is not None:
        same = bool(refused_by) == bool(raised) and outputs == cpp
        return not same and (case.ours in raised if isinstance(case.ours, str) else outputs == case.ours)
    # The C++ leaves many checks to aclnn: the Meta kernel refuses in its stead.
    return bool(refused_by or answer("npu", case, "meta")[1]) if raised else outputs == cpp and not refused_by


def as_installed(name: str, schema: str) -> str:
    """Our schema with what the installed generation of operators has otherwise."""
    for argument in operators().lacks.get(name, ()):
        schema, found = re.subn(rf", [\w?]+ {argument}=\w+", "", schema)
        assert found == 1, (name, argument)
    for argument, default in operators().defaults.get(name, {}).items():
        schema, found = re.subn(rf"(?<= {argument}=)\w+", str(default), schema)
        assert found == 1, (name, argument)
    return schema


# ---- checks


def check_schemas_and_overloads_are_the_wheels() -> None:
    everything = {schema.name.partition("::")[::2] for schema in torch._C._jit_get_all_schemas()}
    theirs, ours = ({name for space, name in everything if space == owner} for owner in ("npu", "ascend_moe"))
    family = {name for name in theirs if name.startswith(("npu_moe_distribute", "_npu_distribute"))}
    more = set(operators().more)
    assert len(family) == 6 + len(more) and more <= family <= ours | more
    assert {name.partition(".")[0] for name in NAMES} == {name.partition(".")[0] for name in ours} <= theirs
    assert not ours & set(OLDER.more) and theirs & set(OLDER.more) == more
    assert operators() is (OLDER if torch_npu.__version__ == "2.10.0.post4" else NEWER), torch_npu.__version__
    for name in NAMES:
        schemas = [str(overload(space, name)._schema) for space in ("npu", "ascend_moe")]
        assert schemas[0] == as_installed(name, schemas[1].replace("ascend_moe::", "npu::")), schemas
        name = name.partition(".")[0]
        overloads = [getattr(getattr(torch.ops, space), name).overloads() for space in ("npu", "ascend_moe")]
        assert sorted(overloads[0]) == sorted(overloads[1]) and "default" in overloads[0], name
        assert {f"{name}.{overload}" if overload != "default" else name for overload in overloads[0]} <= set(NAMES)


def check_outputs_are_the_wheels() -> None:
    logging.disable(logging.CRITICAL)  # torch logs every error of a Meta kernel, and errors are answers here
    cases = matrix()
    with mock.patch.object(registrations, "get_soc_version", lambda: 220):  # which a Meta kernel asks
        wrong = [case for case in cases if not agrees(case)]
        assert not wrong, f"{len(wrong)} of {len(cases)}, {Counter(case.op for case in wrong)}: " + "\n".join(
            f"{case} {[answer(*question) for question in (('npu', case, 'npu:0'), ('ascend_moe', case, 'meta'))]}"
            for case in wrong[:9]
        )
        counted = Counter(case.op for case in cases)
        assert set(counted) == set(NAMES) and len(cases) > 600
        inferred = {case.op for case in cases if answer("ascend_moe", case, "meta")[0]}
        assert inferred == set(NAMES)


if __name__ == "__main__":
    run_checks()
