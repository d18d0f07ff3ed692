"""Results are those without torch's state: autocast, default dtype and device, inference mode, filled memory."""

from __future__ import annotations

import ast
import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import layer_op_ranks
import pytest
import torch
import torch_npu_calls
import vllm_parts
from deep_ep_buffers import Case
from megatron_layers import shared_expert
from op_runs import Clusters
from torch import Tensor

import ascend_moe
from ascend_moe import MoEConfig, MoELayer, npu, placement, routers
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import KINDS, make_dispatcher
from ascend_moe.experts.products import int8_matmul_by_float32
from ascend_moe.interop import fused_moe, megatron, sglang, vllm
from ascend_moe.interop.deep_ep import Buffer
from ascend_moe.routers import RouteCapture, RouterReplay, RouterReplayAction

W, E, K, H, T = 2, 8, 3, 32, 6
Run = Callable[[], Any]  # the call; what makes it makes the tensors and the layer
Make = Callable[[int, str], Run]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


def outcome(outputs: Any, leaves: Any) -> list[Tensor]:
    """Outputs, and the gradients of leaves where there are any; a backward is outside of autocast, as torch asks."""
    flat = [each for each in (outputs if isinstance(outputs, (list, tuple)) else [outputs]) if each is not None]
    made = [each.detach().clone() for each in flat]
    followed = [each for each in flat if each.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if not followed:
        return made
    with torch.autocast("cpu", enabled=False):
        grads = torch.autograd.grad(followed, leaves, [torch.ones_like(each) for each in followed], allow_unused=True)
    return made + [grad for grad in grads if grad is not None]


ROUTED: dict[str, dict[str, Any]] = {
    "softmax": {"shared_intermediate_size": 16, "shared_expert_gate": True, "latent_size": 16, "router_bias": True},
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "copy_expert_num": 0},
    "softmax_bias": {"zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 2},
    "hash": {"vocab_size": 11, "expert_bias": True},
    "sparsemixer": {"top_k": 2},
    "llama4": {"shared_intermediate_size": 16},
    "deepseek_v4": {},
}


def a_layer(
    rank: int, group: str, *, router: str = "softmax", kind: str = "mc2", bits: int = 0, placed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Run:  # fmt: skip
    config = MoEConfig(**{"hidden_size": H, "moe_intermediate_size": 24, "num_experts": E, "top_k": K} | ROUTED[router],
                       router=router)  # fmt: skip
    balance = placement.balance(torch.arange(E)[None].float(), E + 2 * W, W) if placed else None
    experts = E + 2 * W if placed else E
    way = make_dispatcher(kind, Place(group, W, rank), experts, **config.special.given)
    layer = MoELayer(config, way, dtype=dtype, trainable=not bits, placement=balance).init_weights(1)
    layer = (layer.quantize_(bits) if bits else layer).eval()  # the sparse mixer draws no experts
    layer.capture, layer.replay = RouteCapture(T, config.top_k), RouterReplay(register=False)
    layer.replay.set_router_replay_action(RouterReplayAction.RECORD)
    x = drawn(T, H, dtype=dtype).requires_grad_(not bits)
    mask, ids = torch.arange(T) % 4 != 2, torch.arange(T)

    def run() -> list[Tensor]:
        y = layer(x, mask, input_ids=ids)
        return [*outcome(y, [x, *layer.parameters()]), *layer.capture.last(1), layer.replay.recorded_topk_idx]

    return run


def rows_there_and_back(rank: int, group: str, *, kind: str, quant_mode: int) -> Run:
    way = make_dispatcher(kind, Place(group, W, rank), E)
    x, weights, ids = drawn(T, H).requires_grad_(not quant_mode), drawn(T, K).sigmoid(), drawn(T, E).topk(K)[1].int()
    smooth, loads = drawn(E, H).abs() if quant_mode else None, placement.LoadCounter(1, E // W)

    def run() -> list[Tensor]:
        options = {"expert_scales": weights, "quant_mode": quant_mode, "scales": smooth}
        with torch.no_grad():
            started = way.begin_dispatch(x, ids, **options).finish()
            rows = started.expand_x.float() * started.dynamic_scales[:, None] if quant_mode else started.expand_x
            first = way.begin_combine(rows, started, weights).finish()
        sent = way.dispatch(x, ids, **options)
        loads.reset()
        loads.add(0, sent.expert_token_nums)
        count = int(sent.ep_recv_counts[E - 1])
        rows = sent.expand_x.float() * sent.dynamic_scales[:, None] if quant_mode else sent.expand_x * 2
        y = way.combine(rows, sent, weights)
        return [first, *outcome(y, [x]), sent.expand_x[:count].detach(), loads.counts.clone()]

    return run


def megatrons_layer(rank: int, group: str, *, kind: str = "mc2", pad: bool = False, dtype: str | None = "fp32") -> Run:
    config = megatron.RouterConfig(
        E, H, K, ["aux_loss", "global_aux_loss"], [0.1, 0.2], moe_z_loss_coeff=0.1, moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid", moe_expert_capacity_factor=1.5, moe_router_dtype=dtype,
        moe_pad_expert_input_to_capacity=pad,
    )  # fmt: skip
    router = megatron.TopKRouter(config)
    place = {"world_size": W, "rank": rank} if kind == "mc2" else {}
    limit = {"capacity_factor": 1.5, "pad_to_capacity": pad}
    transport = megatron.TokenDispatcher(kind, group, E, K, **place, **limit)
    experts = megatron.GroupedMLP(E // W, H, 16, dtype=torch.float32)
    layer = megatron.MoELayer(router, transport, experts, shared_expert(None, 0, 1, True, False))
    for weight in layer.parameters():
        weight.data.copy_(drawn(*weight.shape) / 5)
    x, mask = drawn(T, 1, H).requires_grad_(), torch.arange(T)[:, None] % 4 != 2

    def run() -> list[Tensor]:
        router.reset_global_aux_loss_tracker()
        router.local_tokens_per_expert.zero_()
        found = outcome(layer(x, mask)[0], [x, *layer.parameters()])
        return [*found, router.local_tokens_per_expert.clone(), *router.losses.values()]

    return run


def sglangs_layer(rank: int, group: str) -> Run:
    layer = sglang.EPMoE(E, K, H, 16, torch.float32, tp_size=W, tp_rank=rank)
    for weight in layer.parameters():
        weight.data.copy_(drawn(*weight.shape) / 5)
    layer.process_weights_after_loading()
    x, logits = drawn(T, H), drawn(T, E)
    return lambda: [layer(x, logits).detach()]


def vllms_kernel(rank: int, group: str, *, kind: str, w8a8: bool) -> Run:
    part = vllm_parts.part_of(rank, W, T, w8a8=w8a8)
    way, experts = vllm_parts.pair(kind, rank, W, group, part.config)
    kernel = vllm.FusedMoEModularKernel(way, experts)
    return lambda: [kernel(*part.inputs(), global_num_experts=vllm_parts.E)]


def vllms_blocks(rank: int, group: str) -> Run:
    part = vllm_parts.part_of(0, 1, T, dtype=torch.float32)
    logits = drawn(T, vllm_parts.E)

    def run() -> list[Tensor]:
        weights, ids = fused_moe.select_experts(part.x, logits, K, False, True, scoring_func="sigmoid")
        return [fused_moe.fused_experts(part.x, part.w1, part.w2, weights, ids)]

    return run


def one_call(rank: int, group: str, *, int8: bool, int4: int = 0) -> Run:
    mine = layer_op_ranks.Rank(rank, W, int8=int8, int4=int4)
    buffer = mine.buffer(group)
    out, nums = torch.full_like(mine.x, 0), torch.zeros(layer_op_ranks.L, dtype=torch.int32)

    def run() -> list[Tensor]:
        given = (*mine.weights("stacked"), mine.ids, *mine.scales("stacked"), *mine.biases("stacked"), mine.probs)
        made = layer_op_ranks.dispatch_ffn_combine(mine.x, *given, group, 0, out, nums, mine.mask)
        shared = {} if int8 else {"shared_l1_weights": mine.w1[:1], "shared_l2_weights": mine.w2[:1]}
        return [*(each.clone() for each in made), *mine.mega(buffer, **shared)]

    return run


def deep_eps_buffer(rank: int, group: str) -> Run:
    case, buffer = Case(world=W), Buffer((group, W, rank))
    given = case.x(rank), case.ids(rank), case.weights(rank)

    def run() -> list[Tensor]:
        x, ids, weights = given
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, case.experts)
        rows, local_ids, own, counts, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, ids, weights
        )
        home = buffer.combine(rows, handle, own)[:2]
        many, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, case.most, case.experts, use_fp8=False)
        back, _, _ = buffer.low_latency_combine(many, ids, weights, handle)
        codes = buffer.low_latency_dispatch(x, ids, case.most, case.experts, use_fp8=True)
        return [*home, local_ids, torch.as_tensor(counts, device="cpu"), count, back, codes[1]]

    return run


def operators(rank: int, group: str) -> Run:
    """Every operator of torch_npu's beside dispatch and combine, in each mode."""

    codes = torch.arange(-128, 128, dtype=torch.int8).view(16, 16)

    def run() -> list[Tensor]:
        made = [int8_matmul_by_float32(codes, codes.t())]  # of machines without int8 instructions
        for call in torch_npu_calls.CALLS:
            function = getattr(npu, call.op, None)  # as a caller has it; of an overload the operator
            outputs = call.run() if function is None else function(*call.args, **call.kwargs)
            for number, output in enumerate(outputs if isinstance(outputs, (list, tuple)) else [outputs]):
                made.append(output[: call.undefined[number]] if output.dim() and number in call.undefined else output)
        return made

    return run


def router_functions(rank: int, group: str) -> Run:
    logits, bias, ids = drawn(T, E).requires_grad_(), drawn(E), drawn(T, E).topk(2)[1].int()

    def run() -> list[Tensor]:
        chosen, scores = routers.compute_routing_scores_for_aux_loss(logits, K, "sigmoid")
        counted = routers.get_tokens_per_expert_and_token_count(chosen, None, K, with_padding_mask=True)
        loss = routers.switch_load_balancing_loss_func(scores, counted[0], counted[2], K, E, 0.1)
        weights = [
            routers.softmax_topk(logits, 2, True, bias), routers.deepseek_v2(logits, 2, 2, 1),
            routers.deepseek_v3(logits, bias, 2, 2, 1), routers.deepseek_v4(logits, 2, bias),
            routers.sigmoid_of_topk(logits, 2), routers.sparsemixer(logits),
            routers.softmax_topk(logits, 2, True, ids=ids),
            routers.topk_routing_with_score_function(logits, 2, num_groups=2, group_topk=1, expert_bias=bias),
            routers.apply_router_token_dropping(logits.sigmoid(), chosen, K, 1.0),
        ]  # fmt: skip
        moved = routers.get_updated_expert_bias(counted[0], bias, 0.1)
        every = [each for pair in weights for each in pair]
        return outcome([*every, loss, routers.z_loss_func(logits, 0.1), moved, *counted], [logits])

    return run


MAKERS: dict[str, Make] = {
    **{f"MoELayer, {router}": functools.partial(a_layer, router=router) for router in ROUTED},
    **{f"MoELayer, {kind}": functools.partial(a_layer, kind=kind) for kind in KINDS[1:]},
    **{f"MoELayer, int{bits}": functools.partial(a_layer, router="llama4", bits=bits) for bits in (8, 4)},
    "MoELayer, copies of experts, bf16": functools.partial(
        a_layer, router="deepseek_v3", placed=True, dtype=torch.bfloat16
    ),
    **{f"{kind}, quant_mode {mode}": functools.partial(rows_there_and_back, kind=kind, quant_mode=mode)
       for kind in KINDS for mode in (0, 2)},
    "Megatron-LM's layer": megatrons_layer,
    "Megatron-LM's layer, fp64, padded": functools.partial(megatrons_layer, pad=True, dtype="fp64"),
    "SGLang's layer": sglangs_layer,
    **{f"vLLM's kernel, {kind}{' int8' * w8a8}": functools.partial(vllms_kernel, kind=kind, w8a8=w8a8)
       for kind in vllm_parts.KINDS for w8a8 in (False, True) if not w8a8 or kind in ("mc2", "batched")},
    "vLLM's blocks": vllms_blocks,
    "one call": functools.partial(one_call, int8=False),
    "one call, int8": functools.partial(one_call, int8=True),
    "one call, int4": functools.partial(one_call, int8=True, int4=2),
    "DeepEP's buffer": deep_eps_buffer,
    "operators": operators,
    "routers": router_functions,
}  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


Context = Callable[[], Any]
#: Of the process, and of a rank's thread.
STATES: dict[str, tuple[Context, Context]] = {
    "autocast": (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)),
    "bfloat16 by default": (lambda: default_dtype(torch.bfloat16), contextlib.nullcontext),
    "float64 by default": (lambda: default_dtype(torch.float64), contextlib.nullcontext),
    "inference": (contextlib.nullcontext, torch.inference_mode),
    "filled memory": (filled_memory, contextlib.nullcontext),
    "device meta by default": (contextlib.nullcontext, lambda: torch.device("meta")),
}


def same_in(states: Sequence[str], name: str, clusters: Clusters) -> None:
    """Compares a call in these states with one without; with all that it needs made in them, or before.

    Parameters go to the default device, as torch's do: with one they are made before.
    """
    plain = torch.no_grad if "inference" in states else contextlib.nullcontext
    inside = "device meta by default" not in states

    def body(rank: int, group: str) -> None:
        with plain():
            before = MAKERS[name](rank, group)
            wanted = before()
        with contextlib.ExitStack() as entered:
            for state in states:
                entered.enter_context(STATES[state][1]())
            found = (MAKERS[name](rank, group) if inside else before)()
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert (one.dtype, one.device) == (other.dtype, other.device), number
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), number

    with contextlib.ExitStack() as entered:
        for state in states:
            entered.enter_context(STATES[state][0]())
        clusters[W].run(body)


@pytest.mark.parametrize("name", MAKERS)
def test_results_do_not_depend_on_torchs_state(name: str, clusters: Clusters) -> None:
    number = [*MAKERS].index(name)
    states = ["autocast", "filled memory", ("bfloat16 by default", "float64 by default")[number % 2]]
    same_in([*states, "device meta by default"] if number % 5 else [*states, "inference"], name, clusters)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_layer_keeps_its_dtypes_under_autocast(compiled: bool, clusters: Clusters) -> None:
    def body(rank: int, group: str) -> None:
        layer = MoELayer(MoEConfig(H, 24, E, K), make_dispatcher("mc2", Place(group, W, rank), E), dtype=torch.float32)
        layer.init_weights()
        x = drawn(T, H)
        wanted = layer(x)
        run = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(run(x), wanted)
            half = run(x.bfloat16())
        assert half.dtype == torch.bfloat16 and torch.equal(half, layer(x.bfloat16().float()).bfloat16())

    clusters[W].run(body)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1000))
def test_results_depend_on_no_states_of_torch_together(seed: int, clusters: Clusters) -> None:
    generator = random.Random(seed)
    states = [state for state in STATES if generator.random() < 0.4] or [generator.choice([*STATES])]
    same_in(states, generator.choice([*MAKERS]), clusters)


# What makes parameters on the default device, measures it, or runs in `on_the_host`.
BY_DEFAULT = {"interop/sglang/weights.py", "interop/deep_ep/utils.py", "placement.py"}
TOOLS = {"bench", "cli", "doctor", "explore", "plan", "predict", "reference", "run", "shim"}
TOOLS |= {"validate", "vnpu"}
FLOATS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
MADE = FLOATS | {"arange", "as_tensor", "full", "randint", "randperm", "tensor"}


def test_new_tensors_have_a_device_and_floats_a_dtype() -> None:
    package = Path(ascend_moe.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name in BY_DEFAULT or name.split("/")[0] in TOOLS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in MADE and ast.unparse(called.value) == "torch":
                given = {keyword.arg for keyword in node.keywords}
                wanted = {"device"} | ({"dtype"} if called.attr in FLOATS else set())
                if None not in given and not wanted <= given:  # None: of a dictionary
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)} without {sorted(wanted - given)}")
    assert not found, "\n".join(found)
