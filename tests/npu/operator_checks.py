"""The built-in operators of the virtual NPU under an unmodified torch_npu: as on the CPU, or an error."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import torch_npu
from npu_runs import ORDER, never_called, raises, record_operators, run_checks
from operator_cases import Case, calls, cases, difference, placed
from torch.utils import _pytree as pytree
from torch_npu_calls import CALLS, Call

from ascend_moe import experts, npu, routing
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.native.releases import OLDER
from ascend_moe.native.torch_npu import operators as generation
from ascend_moe.native.torch_npu import refused
from ascend_moe.vnpu import library_folder, operators

NPU = "npu:0"

MOE = ("aclnnGroupedMatmul", "aclnnSwiGlu", "aclnnDequantSwiglu", "aclnnMoe")
MLP = ["aclnnGroupedMatmulV5", "aclnnSwiGlu", "aclnnGroupedMatmulV5"]
W8A8 = ["aclnnGroupedMatmulV5", "aclnnDequantSwigluQuantV2", "aclnnGroupedMatmulV5"]
# With a limit an older torch_npu does not fuse what is between the products.
LIMITED = W8A8[::2] if refused("npu_dequant_swiglu_quant", {"swiglu_mode": 2}) else W8A8
SOFTMAX, GATE = ["aclnnMoeGatingTopKSoftmax"], ["aclnnMoeGatingTopK"]
BY_TABLE = ["aclnnMoeGatingTopKV2"]


def to_npu(given: Any) -> Any:
    """Arguments with a copy on the NPU of every tensor in them."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: placed(tensor, NPU), given)


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def on_both(case: Case) -> str:
    """Returns what differs between the CPU and the NPU."""
    expected, found = case.results("cpu"), case.results(NPU)
    if {tensor.device.type for tensor in found} != {"npu"}:
        return f"results are on {[tensor.device for tensor in found]}"
    return difference(expected, [tensor.cpu() for tensor in found], case.exact)


def call_on_both(call: Call) -> str:
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


def verdict(function: Any, case: Any) -> str:
    try:
        return str(function(case))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_the_comparison_sees_differences() -> None:
    one = [torch.ones(3, dtype=torch.bfloat16)]
    assert difference(one, [torch.ones(3, dtype=torch.bfloat16)]) == ""
    assert difference(one, [torch.tensor([1, 1, 1.0078125], dtype=torch.bfloat16)]) != ""
    for other in ([torch.ones(3)], [torch.ones(4, dtype=torch.bfloat16)], [1.05 * one[0]], []):
        assert difference(one, other, exact=False) != ""


def check_torchs_operators_give_what_they_give_on_the_cpu() -> None:
    found = {case.name: verdict(on_both, case) for case in cases()}
    assert not any(found.values()), {name: problem for name, problem in found.items() if problem}
    assert len(found) > 5000, len(found)


def check_our_operators_are_torch_npus_and_give_what_they_give_on_the_cpu() -> None:
    found = {f"{call.op}, {call.label}": verdict(call_on_both, call) for call in calls()}
    # The virtual NPU has no CANN operator for one of them: its call ends at the aclnn symbol.
    for name in [name for name in found if name.startswith("npu_grouped_matmul_finalize_routing")]:
        assert "aclnnGroupedMatmulFinalizeRoutingV2" in found[name] and "libopapi.so" in found.pop(name)
    assert not any(found.values()), {name: problem for name, problem in found.items() if problem}
    assert len(found) > 70


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
        (SOFTMAX, routing.softmax_topk, (logits, 3, True), {}),
        (GATE, routing.deepseek_v2, (logits, 3, 4, 2), {}),
        (GATE, routing.deepseek_v3, (logits, None, 3, 4, 2, False, 2.0), {}),
        (BY_TABLE if generation() is not OLDER else [], routing.deepseek_v4, (logits, 3), table),
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
                with raises(f"{argument} is given: {call.op} of this torch_npu has no such", ArgumentError):
                    function(*args, **kwargs)
            assert tensors(function(*args, **{**kwargs, argument: 1 if argument == "k" else None}))


def check_the_gradients_of_a_grouped_matmul_are_grouped_products() -> None:
    counts = torch.tensor([2, 0, 4])
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for device in ("cpu", NPU):
            torch.manual_seed(1)
            x, w = (placed(torch.randn(shape).to(dtype), device).requires_grad_() for shape in ((9, 16), (3, 16, 32)))
            args: dict[str, Any] = {"group_type": 0, "group_list_type": 1, "split_item": 3}
            for function in (npu.npu_grouped_matmul, torch.ops.ascend_moe.npu_grouped_matmul):
                x.grad = w.grad = None
                begin = len(ORDER)
                (y,) = function([x], [w], group_list=placed(counts, device), **args)
                y[:6].sum().backward()
                found.append([x.grad.cpu(), w.grad.cpu()])
            torch.npu.synchronize()
            products = [name for name in ORDER[begin:] if "GroupedMatmul" in name]
            assert len(products) == (3 if device == NPU else 0), products
        assert not any(found[0][0][6:].flatten().tolist())
        assert not any(difference(found[0], other, False) for other in found[1:])


def check_operators_without_a_gradient_say_so() -> None:
    """torch_npu has none of a grouped matmul; ours is of grouped products, which a list of x has not."""
    for op, label in (("npu_grouped_matmul", "lists"), ("npu_dynamic_quant", "rows")):
        call = next(call for call in CALLS if (call.op, call.label) == (op, label))
        args, kwargs = to_npu((call.args, call.kwargs))
        (args[0][0] if isinstance(args[0], list) else args[0]).requires_grad_()
        graded = [out for out in tensors(call.overload()(*args, **kwargs)) if out.requires_grad]
        with raises(f"^{op} is not differentiable", AscendMoeError):
            graded[0].float().square().sum().backward()


def bad_index() -> torch.Tensor:
    """An error that only the data show."""
    return torch.embedding(torch.ones(3, 4).npu(), torch.tensor([1, 7]).npu())


def check_errors_in_the_data_are_raised_and_later_work_is_right() -> None:
    for _ in range(2):
        with raises(r"aclnnEmbedding: IndexError: index out of range in self|507035"):
            bad_index()
        assert (torch.ones(3).npu() + 1).tolist() == [2.0, 2.0, 2.0]


def check_every_way_of_waiting_tells_an_error_once() -> None:
    event = torch.npu.Event()
    ways: list[Callable[[torch.Tensor], object]] = [
        lambda y: y.cpu(),
        lambda y: y.sum().item(),
        lambda y: torch.npu.current_stream().synchronize(),
        lambda y: (event.record(), event.synchronize()),
        lambda y: torch.npu.synchronize(),
    ]
    for wait in ways:
        with raises("507035"):
            wait(bad_index())
        torch.npu.synchronize()


def check_an_operator_that_is_not_there_is_named() -> None:
    x, w = torch.ones(2, 4, dtype=torch.float16).npu(), torch.ones(4, 4, dtype=torch.float16).npu()
    with raises(r"aclnnFFN\w* or aclnnFFN\w*GetWorkspaceSize not in libopapi.so"):
        torch_npu.npu_ffn(x, w, w, "relu")
    with raises(r"operator Elu has no aclnn entry here"):
        torch.nn.functional.elu(torch.ones(3).npu())
    assert (torch.ones(1).npu() * 3).item() == 3


def check_threads_compute_side_by_side() -> None:
    def work(seed: int) -> None:
        torch.npu.set_device(0)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            a = torch.randint(-4, 5, (8, 8), generator=generator).float()
            assert torch.equal((a.npu() @ a.npu() + seed).cpu(), a @ a + seed)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def check_calls_leave_no_memory_behind() -> None:
    x = torch.ones(64, 64).npu()

    def resident() -> int:
        torch.npu.synchronize()
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def calls(number: int) -> None:
        for _ in range(number):
            y = x[x[:, 0] > 0]
            torch.stack([y, y + 1]).sum((0, 1))

    calls(50)
    for _ in range(10000):  # torch_npu's queue is a ring of 8192 entries: touch them all
        x + 1
    # A leak would grow in every round: 32 bytes of each of 1000 operators.
    growths = []
    for _ in range(4):
        before = resident()
        calls(150)
        growths.append(resident() - before)
    assert min(growths) < 32 << 10, growths


def check_random_numbers_follow_the_seed() -> None:
    n, threes, twos, quarters = (1000,), *(torch.full((1000,), v, device=NPU) for v in (3.0, 2.0, 0.25))
    draws: list[tuple[Callable[[], torch.Tensor], float, float]] = [  # each with its mean and deviation
        (lambda: torch.randn(n, device=NPU), 0, 1),
        (lambda: torch.rand(n, device=NPU), 0.5, 0.289),
        (lambda: torch.randint(0, 5, n, device=NPU), 2, 1.414),
        (lambda: torch.randperm(50, device=NPU), 24.5, 14.577),
        (lambda: torch.empty(n, device=NPU).normal_(3, 2), 3, 2),
        (lambda: torch.normal(threes, 2.0), 3, 2),
        (lambda: torch.normal(3.0, twos), 3, 2),
        (lambda: torch.normal(threes, twos), 3, 2),
        (lambda: torch.normal(3.0, 2.0, n, device=NPU), 3, 2),
        (lambda: torch.bernoulli(quarters), 0.25, 0.433),
        (lambda: torch.empty(n, device=NPU).bernoulli_(0.25), 0.25, 0.433),
        (lambda: torch.multinomial(torch.ones(8, device=NPU), 8), 3.5, 2.449),
        (lambda: torch.empty(n, dtype=torch.int32, device=NPU).random_(), 2**30, 2**30 / 3**0.5),
    ]
    seen: list[list[torch.Tensor]] = []
    for _ in range(2):
        torch.manual_seed(7)
        seen.append([draw().cpu() for draw, _, _ in (*draws, draws[0])])
    assert all(torch.equal(one, two) for one, two in zip(*seen, strict=True))
    for number, (found, (_, mean, deviation)) in enumerate(zip(seen[0], draws, strict=False)):
        assert abs(float(found.double().mean()) - mean) < 0.2 * deviation, number
        assert 0.9 * deviation < float(found.double().std()) < 1.1 * deviation, number
    _, uniform, integers, order, *_, chosen, _, other = seen[0]
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    assert integers.unique().tolist() == [0, 1, 2, 3, 4] and sorted(order.tolist()) == list(range(50))
    assert sorted(chosen.tolist()) == list(range(8)) and not torch.equal(seen[0][0], other)


def check_a_captured_graph_computes_anew_at_each_replay() -> None:
    if os.environ.get("TASK_QUEUE_ENABLE") == "2":
        return  # torch_npu refuses to capture in this mode
    graph, x, y = torch.npu.NPUGraph(), torch.ones(4).npu(), torch.zeros(4).npu()
    with torch.npu.graph(graph):
        y.copy_(x * 2 + 1)
        noise = torch.cat([torch.rand(4, device=NPU), torch.randn(4, device=NPU)])
        dice = torch.randint(0, 1 << 20, (4,), device=NPU)
    seen = []
    for value in (5, 7):
        x.fill_(value)
        graph.replay()
        seen.append((y.tolist(), noise.cpu(), dice.cpu()))
    assert [first for first, _, _ in seen] == [[11.0] * 4, [15.0] * 4]
    assert not (seen[0][1] == seen[1][1]).any() and not torch.equal(seen[0][2], seen[1][2])


def check_a_default_device_does_not_reach_the_arithmetic() -> None:
    torch.set_default_device("npu")
    try:
        x = torch.arange(6.0).reshape(2, 3)
        assert x.device.type == "npu"
        assert torch.bincount(torch.tensor([1, 1, 3])).tolist() == [0, 2, 0, 1]
        assert torch.nn.functional.one_hot(torch.tensor([1]), 3).tolist() == [[0, 1, 0]]
        assert torch.nn.functional.layer_norm(x, (3,)).device.type == "npu"
    finally:
        torch.set_default_device("cpu")


def check_norms_and_quantization_follow_their_formulas() -> None:
    x, gamma = torch.randn(4, 8), torch.rand(8)
    want = torch.nn.functional.rms_norm(x, (8,), gamma, eps=1e-3)
    y, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), epsilon=1e-3)
    assert torch.allclose(y.cpu(), want, atol=1e-6) and rstd.shape == (4, 1)
    assert torch.allclose(rstd.cpu(), torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3), atol=1e-6)
    y, _, total = torch_npu.npu_add_rms_norm(x.npu(), x.npu(), gamma.npu(), 1e-3)
    assert torch.equal(total.cpu(), x + x)
    assert torch.allclose(y.cpu(), torch.nn.functional.rms_norm(x + x, (8,), gamma, eps=1e-3), atol=1e-6)
    scale, offset = torch.full((8,), 30.0), torch.full((8,), 2.0)
    codes = torch_npu.npu_quantize(x.npu(), scale.npu(), offset.npu(), torch.qint8, -1, False)
    assert torch.equal(codes.cpu(), (x * 30 + 2).round().clamp(-128, 127).to(torch.int8))
    zero = torch.full((8,), 3, dtype=torch.int32)
    codes = torch_npu.npu_quantize(x.npu(), (scale / 1000).npu(), zero.npu(), torch.qint8, 1, True)
    assert torch.equal(codes.cpu(), ((x / 0.03).round() + 3).clamp(-128, 127).to(torch.int8))


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


def check_operators_are_exported_registered_and_called_by_torch_npu() -> None:
    """After all other checks: only a call by torch_npu shows a wrong type in the table of entries."""
    path = library_folder() / "libopapi.so"
    exported = re.findall(rb"(?<=\0)(aclnn\w+)GetWorkspaceSize(?=\0)", path.read_bytes())
    assert {name.decode() for name in exported} == set(operators.OPERATORS)
    library = ctypes.CDLL(str(path))
    for name in operators.OPERATORS:
        assert hasattr(library, name) and hasattr(library, f"{name}GetWorkspaceSize"), name
    if not {"TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING"} & set(os.environ):  # other modes call fewer
        # It looks for V4 to learn whether there is a grouped matmul, and then calls V5.
        missing = never_called(of_models=False)
        assert missing == {"aclnnGroupedMatmulV4", *generation().uncalled}, missing


if __name__ == "__main__":
    record_operators()
    run_checks()
