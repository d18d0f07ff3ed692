"""torch_npu's operators of MoE layers on the virtual NPU, under an unmodified torch_npu: as on the CPU, or an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch_npu
from npu_runs import ORDER, raises, record_operators, run_checks, unexpected
from operator_cases import FLOATS, difference, placed, problem_of, values
from torch.utils import _pytree as pytree
from torch_npu_calls import CALLS, OperatorCall

from ascend_moe import experts, npu, routers
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.native.torch_npu import OLDER, refused
from ascend_moe.native.torch_npu import operators as generation

NPU = "npu:0"

MOE = ("aclnnGroupedMatmul", "aclnnSwiGlu", "aclnnDequantSwiglu", "aclnnMoe")
MLP = ["aclnnGroupedMatmulV5", "aclnnSwiGlu", "aclnnGroupedMatmulV5"]
W8A8 = ["aclnnGroupedMatmulV5", "aclnnDequantSwigluQuantV2", "aclnnGroupedMatmulV5"]
# With a limit an older torch_npu does not fuse what is between the products.
LIMITED = W8A8[::2] if refused("npu_dequant_swiglu_quant", {"swiglu_mode": 2}) else W8A8
SOFTMAX, GATE = ["aclnnMoeGatingTopKSoftmax"], ["aclnnMoeGatingTopK"]
BY_TABLE = ["aclnnMoeGatingTopKV2"]


def calls() -> Iterator[OperatorCall]:
    """Yields calls of the operators: those of the tests on the CPU, and more of the arguments."""
    yield from CALLS
    rows, experts, hidden, wide = 10, 4, 16, 16
    counts = {"group_list": torch.tensor([3, 0, 5, 1]), "group_list_type": 1}
    counts |= {"group_type": 0, "split_item": 2}
    used = {0: 9}  # the last row belongs to nobody
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        x, w = values(dtype, rows, hidden), values(dtype, experts, hidden, wide)
        matmul, quant = "npu_grouped_matmul", "npu_dynamic_quant"
        pairs = {"group_list": torch.tensor([[2, 5], [0, 3], [3, 1], [1, 0]]), "group_list_type": 2}
        yield OperatorCall(f"pairs {label}", matmul, ([x], [w]), counts | pairs, used)
        transposed = w.transpose(1, 2).contiguous().transpose(1, 2)
        yield OperatorCall(f"transposed {label}", matmul, ([x], [transposed]), counts, used)
        yield OperatorCall(f"apart {label}", matmul, ([x], list(w)), counts, used)
        none = counts | {"group_list": torch.zeros(experts, dtype=torch.int64)}
        yield OperatorCall(f"no rows {label}", matmul, ([x], [w]), none, {0: 0})
        smooth, groups = values(dtype, 2, hidden).abs(), torch.tensor([4, 10], dtype=torch.int32)
        yield OperatorCall(f"groups {label}", quant, (x,), {"smooth_scales": smooth, "group_index": groups})
        clamped = {"quant_mode": 1, "activate_left": True, "swiglu_mode": 2, "clamp_limit": 1.5}
        clamped |= {"glu_alpha": 1.25, "glu_bias": 0.5}
        yield OperatorCall(f"clamped {label}", "npu_dequant_swiglu_quant", (x,), clamped)
        grouped = {"bias": values(dtype, 8), "k_group": 2, "group_count": 4, "group_select_mode": 1}
        grouped |= {"norm_type": 1, "out_flag": True, "routed_scaling_factor": 2.5, "eps": 1e-3}
        yield OperatorCall(f"groups {label}", "npu_moe_gating_top_k", (values(dtype, rows, 8), 2), grouped)
    # The one shape that torch_npu gives to an older entry.
    ids = torch.tensor([[5, 127], [0, 5], [64, 1]], dtype=torch.int32)
    older = {"expert_num": 128, "active_expert_range": [0, 128], "expert_tokens_num_type": 1}
    older |= {"expert_tokens_num_flag": True}
    yield OperatorCall("older", "npu_moe_init_routing_v2", (values(torch.float16, 3, 2048), ids), older, {3: 0})


def to_npu(given: Any) -> Any:
    """Arguments with a copy on the NPU of every tensor in them."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: placed(tensor, NPU), given)


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def call_on_both(call: OperatorCall) -> str:
    """Our op and our function on NPU tensors, which are torch_npu's own; what an NPU defines is compared."""
    args, kwargs = to_npu((call.args, call.kwargs))
    for function in (call.overload(), getattr(npu, call.op.partition(".")[0])):
        found, expected = tensors(function(*args, **kwargs)), tensors(call.run())
        if {tensor.device.type for tensor in found} != {"npu"}:
            return "a result is not on the NPU"
        for number, row in call.undefined.items():
            for side in (expected, found):
                side[number] = side[number][:row] if row else torch.empty(0)
        problem = difference(expected, [tensor.cpu() for tensor in found], False)
        if problem:
            return problem
    return ""


def check_our_operators_are_torch_npus_and_give_what_they_give_on_the_cpu() -> None:
    found = {f"{call.op}, {call.label}": problem_of(call_on_both, call) for call in calls()}
    # The virtual NPU has no CANN operator for one of them: its call ends at the aclnn symbol.
    for name in [name for name in found if name.startswith("npu_grouped_matmul_finalize_routing")]:
        assert "aclnnGroupedMatmulFinalizeRoutingV2" in found[name] and "libopapi.so" in found.pop(name)
    assert not any(found.values()), {name: problem for name, problem in found.items() if problem}
    assert len(found) > 60


def check_mlps_and_routers_are_torch_npus_operators_and_wait_for_nothing() -> None:
    x, logits, ends = torch.randn(6, 8), torch.randn(5, 16), torch.tensor([2, 6])
    weights = torch.randn(2, 8, 12), torch.randn(2, 6, 8)
    (up, up_scale), (down, down_scale) = (experts.quantize_weight(weight) for weight in weights)
    codes, dynamic_scales = experts.npu_dynamic_quant(x)
    scales = {"dynamic_scales": dynamic_scales, "w_gate_up_scale": up_scale, "w_down_scale": down_scale}
    quantized = codes, up, down
    table = {"input_ids": torch.tensor([3, 0, 1, 1, 2]), "tid2eid": torch.arange(12, dtype=torch.int32).reshape(4, 3)}
    calls: list[tuple[list[str], Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (MLP, experts.grouped_mlp, (x, *weights, ends), {"group_list_type": 0}),
        (W8A8, experts.grouped_mlp, (*quantized, ends), {"group_list_type": 0, **scales}),
        (W8A8, experts.grouped_mlp, (*quantized, ends - 1), {"group_list_type": 1, **scales}),
        (LIMITED, experts.grouped_mlp, (*quantized, ends - 1), {"group_list_type": 1, "swiglu_limit": 1.0, **scales}),
        (SOFTMAX, routers.softmax_topk, (logits, 3, True), {}),
        (GATE, routers.deepseek_v2, (logits, 3, 4, 2), {}),
        (GATE, routers.deepseek_v3, (logits, None, 3, 4, 2, False, 2.0), {}),
        (BY_TABLE if generation() is not OLDER else [], routers.deepseek_v4, (logits, 3), table),
    ]
    no_waiting = "default" if "ASCEND_LAUNCH_BLOCKING" in os.environ else "error"
    for operator_names, function, args, kwargs in calls:
        there = to_npu((args, kwargs))
        torch.npu.synchronize()
        begin = len(ORDER)
        torch.npu.set_sync_debug_mode(no_waiting)
        found = tensors(function(*there[0], **there[1]))
        torch.npu.set_sync_debug_mode("default")
        torch.npu.synchronize()
        known = [name for name in ORDER[begin:] if name.startswith(MOE)]
        assert known == operator_names, (function.__name__, ORDER[begin:])
        expected = tensors(function(*args, **kwargs))
        assert difference(expected, [tensor.cpu() for tensor in found], False) == ""
    torch.npu.set_sync_debug_mode(no_waiting)
    with nullcontext() if no_waiting == "default" else raises(""):
        found[0].sum().item()
    torch.npu.set_sync_debug_mode("default")


def check_arguments_that_this_torch_npu_lacks_are_named() -> None:
    cases = {(call.op, call.label): call for call in CALLS}
    finalize, gate = cases["npu_moe_finalize_routing", "columns"], cases["npu_moe_gating_top_k", "sigmoid"]
    given = {"k": (finalize, 2), "input_ids": (gate, torch.zeros(6, dtype=torch.int64))}
    given["tid2eid"] = (gate, torch.zeros(4, 2, dtype=torch.int32))
    assert set(given) == {argument for arguments in OLDER.lacks.values() for argument in arguments}
    for argument, (call, value) in given.items():
        args, kwargs = to_npu((call.args, {**call.kwargs, argument: value}))
        for function in (call.overload(), getattr(npu, call.op)):
            if argument in generation().lacks.get(call.op, {}):
                with raises(f"{argument} is not supported by {call.op} of the installed torch_npu", ArgumentError):
                    function(*args, **kwargs)
            assert tensors(function(*args, **{**kwargs, argument: 1 if argument == "k" else None}))


def check_operators_without_a_gradient_say_so() -> None:
    """torch_npu has none of a grouped matmul; ours is of grouped products, which a list of x has not."""
    for op, label in (("npu_grouped_matmul", "lists"), ("npu_dynamic_quant", "rows")):
        call = next(call for call in CALLS if (call.op, call.label) == (op, label))
        args, kwargs = to_npu((call.args, call.kwargs))
        (args[0][0] if isinstance(args[0], list) else args[0]).requires_grad_()
        graded = [out for out in tensors(call.overload()(*args, **kwargs)) if out.requires_grad]
        with raises(f"^{op} is not differentiable", AscendMoeError):
            graded[0].float().square().sum().backward()


def check_gradients_of_moe_operators_are_those_of_plain_torch() -> None:
    x, weights = torch.randn(5, 8, device=NPU), torch.rand(5, 2, device=NPU)
    ids = torch.tensor([[0, 1], [2, 1], [1, 0], [0, 2], [2, 0]], dtype=torch.int32, device=NPU)
    x.requires_grad_()
    weights.requires_grad_()
    rows, places = torch_npu.npu_moe_token_permute(x, ids)
    y = torch_npu.npu_moe_token_unpermute(torch_npu.npu_swiglu(rows), places, weights)
    slope = torch.randn(5, 4)
    y.backward(slope.npu())
    left, right = (part.cpu().detach().requires_grad_() for part in x.chunk(2, -1))
    factors = weights.cpu().detach().requires_grad_()
    hidden = torch.nn.functional.silu(left) * right
    (factors.sum(1, keepdim=True) * hidden).backward(slope)
    assert torch.allclose(x.grad.cpu(), torch.cat([left.grad, right.grad], -1), atol=1e-5)
    assert torch.allclose(weights.grad.cpu(), factors.grad, atol=1e-5)


def check_torch_npu_has_called_them_all() -> None:
    """After all other checks: only a call by torch_npu shows a wrong type in the table of entries."""
    if not {"TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING"} & set(os.environ):  # other modes call fewer
        assert not unexpected("moe"), unexpected("moe")


if __name__ == "__main__":
    record_operators()
    run_checks()
