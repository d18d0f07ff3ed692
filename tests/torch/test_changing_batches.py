"""Compiled programs whose batch changes: one graph serves every batch, but 0 and 1, of which torch makes its own."""

from __future__ import annotations

import ast
import copy
import functools
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ascend_moe
from ascend_moe import MoEConfig, MoELayer
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.dispatchers.padded import PaddedDispatcher
from ascend_moe.errors import AscendMoeError
from ascend_moe.experts import grouped_mlp, quantize_weight
from ascend_moe.interop import fused_moe, vllm
from ascend_moe.interop.sglang import EPMoE
from ascend_moe.interop.vllm import int8_w8a8_moe_quant_config
from ascend_moe.layer_ops import dispatch_ffn_combine
from ascend_moe.permute import unpermute
from ascend_moe.routers import topk_routing_with_score_function, z_loss_func

E, K, H, F = 8, 2, 64, 32
MOST = 40
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


W_GATE_UP, W_DOWN = (randn(E, H, 2 * F) / 8).bfloat16(), (randn(E, F, H) / 6).bfloat16()
(CODES_GATE_UP, GATE_UP_SCALE), (CODES_DOWN, DOWN_SCALE) = quantize_weight(W_GATE_UP), quantize_weight(W_DOWN)
W13, W2 = W_GATE_UP.transpose(1, 2).contiguous(), W_DOWN.transpose(1, 2).contiguous()


def logits_of(x: torch.Tensor) -> torch.Tensor:
    return (x.float() @ torch.ones(H, E)).sin() * torch.arange(1, E + 1)


# ---- what is compiled: functions of tokens, ids and weights


def experts(sent: Any, quantized: bool, kind: int) -> torch.Tensor:
    if not quantized:
        return grouped_mlp(sent[0], W_GATE_UP, W_DOWN, sent[3], group_list_type=kind)
    scales = {"dynamic_scales": sent[1], "w_gate_up_scale": GATE_UP_SCALE, "w_down_scale": DOWN_SCALE}
    return grouped_mlp(sent[0], CODES_GATE_UP, CODES_DOWN, sent[3], group_list_type=kind, **scales)


def three_calls(version: str, quantized: bool = False, masked: bool = False, kind: int = 1) -> Callable[[str], Layer]:
    def make(group: str) -> Layer:
        place = (group, 1, 0, E)

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            mask = {"x_active_mask": ids[:, 0] != 3} if masked else {}
            mode = {"quant_mode": 2 if quantized else 0, "expert_token_nums_type": kind}
            sent = getattr(ascend_moe, f"npu_moe_distribute_dispatch{version}")(x, ids, *place, **mode, **mask)
            rows = experts(sent, quantized, kind).to(x.dtype)
            combine = getattr(ascend_moe, f"npu_moe_distribute_combine{version}")
            result: torch.Tensor = combine(rows, ids, sent[2], sent[4], weights, *place, **mask)
            return result

        return layer

    return make


def two_launches(group: str) -> Layer:
    place = (group, 1, 0, E)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        started = ascend_moe.begin_dispatch(x, ids, *place)
        between = x.sin()
        sent = started.finish()
        rows = experts(sent, False, 1)
        combined = ascend_moe.begin_combine(
            rows, ids, sent.assist_info_for_combine, sent.ep_recv_counts, weights, *place
        )
        return combined.finish() + between

    return layer


def moe_layer(
    *, quantized: bool = False, masked: bool = False, options: Any = None, **changes: Any
) -> Callable[[str], Layer]:
    def make(group: str) -> Layer:
        transport = MC2Dispatcher(group, 1, 0, E, **(options or {}))
        made = MoELayer(MoEConfig(H, F, E, K, **changes), transport, dtype=torch.bfloat16).init_weights(1)
        made = made.quantize_() if quantized else made
        return lambda x, ids, weights: made(x, ids[:, 0] != 3) if masked else made(x)

    return make


def ep_moe(group: str) -> Layer:
    made = EPMoE(E, K, H, F, torch.bfloat16, tp_size=1, tp_rank=0)
    made.w13_weight.data, made.w2_weight.data = W13, W2
    return lambda x, ids, weights: made(x, logits_of(x))


def modular_kernel(kind: str, quantized: bool = False) -> Callable[[str], Layer]:
    def make(group: str) -> Layer:
        config = int8_w8a8_moe_quant_config(GATE_UP_SCALE, DOWN_SCALE) if quantized else None
        kernel = vllm.select(vllm.MoEKernelConfig(group, 0, 1, E, MOST, kind, quant_config=config))
        w1, w2 = (CODES_GATE_UP.transpose(1, 2), CODES_DOWN.transpose(1, 2)) if quantized else (W13, W2)
        return lambda x, ids, weights: kernel(x, w1, w2, weights, ids, global_num_experts=E)

    return make


def one_call(group: str) -> Layer:
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out, rows = torch.empty_like(x), torch.empty(E, dtype=torch.int32)
        dispatch_ffn_combine(x, [W_GATE_UP], [W_DOWN], ids, None, None, None, None, weights, group, 0, out, rows)
        return out

    return layer


EVERY: dict[str, Callable[[str], Layer]] = {
    "three calls, V2, int8, mask": three_calls("_v2", quantized=True, masked=True),
    "three calls, V1, int8, sums": three_calls("", quantized=True, kind=0),
    "two launches": two_launches,
    "MoELayer, int8, mask": moe_layer(quantized=True, masked=True),
    "MoELayer, DeepSeek": moe_layer(router="deepseek_v3", n_group=2, topk_group=1, shared_intermediate_size=F),
    "MoELayer, zero copy": moe_layer(options={"comm_alg": "direct", "zero_copy": True}),
    "SGLang": ep_moe,
    "vLLM": modular_kernel("mc2"),
    "vLLM, int8, batched": modular_kernel("batched", quantized=True),
    "aligned blocks": lambda group: lambda x, ids, weights: fused_moe.fused_experts(x, W13, W2, weights, ids),
    "dispatch_ffn_combine": one_call,
}
QUICK = ["three calls, V2, int8, mask", "MoELayer, DeepSeek", "two launches", "vLLM", "SGLang", "dispatch_ffn_combine"]


# ---- how many graphs


def graphs_of(layer: Layer, batches: Sequence[int], dynamic: bool | None, backend: str = "eager") -> int:
    """Compiles the layer and runs it; every result must be the eager one's bits."""
    inner = torch._dynamo.lookup_backend(backend)
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return inner(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: layer(*args), backend=counting, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        for batch in batches:
            scores = randn(batch, E, seed=batch)
            args = (randn(batch, H, seed=batch).bfloat16(), scores.topk(K).indices.int(), scores[:, :K].abs())
            assert torch.equal(compiled(*args), layer(*args)), batch
    return len(graphs)


@pytest.mark.parametrize("name", QUICK)
def test_one_graph_serves_the_batches(name: str, group_ep: str) -> None:
    assert graphs_of(EVERY[name](group_ep), (5, 9, MOST), None) == 2  # that of the first batch, and that of all


def test_dynamic_from_the_start_and_without_tokens(group_ep: str) -> None:
    """torch makes a graph of its own of 0 and of 1."""
    assert graphs_of(EVERY["MoELayer, DeepSeek"](group_ep), (7, 0, 1, 12), True) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", EVERY)
def test_forty_batches_in_a_drawn_order(name: str, dynamic: bool | None, group_ep: str) -> None:
    for seed in range(2):
        batches = random.Random(seed).sample(range(1, MOST + 1), MOST)
        assert graphs_of(EVERY[name](group_ep), batches, dynamic) <= 3


def exported_parts(group: str) -> dict[str, tuple[Any, Any]]:
    """Functions of tensors, and their arguments for n, whose first sizes are multiples of n."""
    transport = MC2Dispatcher(group, 1, 0, E)
    hashed = MoELayer(MoEConfig(H, F, E, K, router="hash", vocab_size=64), transport).init_weights()
    padded = PaddedDispatcher(transport)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        ids = (torch.arange(x.shape[0]) // (x.shape[0] // E)).int().unsqueeze(1)
        sent = padded.dispatch(x, ids, expert_scales=x[:, :1].float())
        return padded.combine(sent.expand_x, sent)

    def home(rows: torch.Tensor, probs: torch.Tensor, *, pad: bool = False) -> torch.Tensor:
        tokens, every = torch.arange(rows.shape[0]) % probs.shape[0], torch.ones_like(probs, dtype=torch.bool)
        return unpermute(rows, tokens, probs.shape, probs, every, drop_and_pad=pad)

    def layer(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hashed(x, ids > 3, input_ids=ids)
        return result

    groups = functools.partial(topk_routing_with_score_function, topk=K, num_groups=2, group_topk=1)
    return {
        "layer": (layer, lambda n: (randn(n, 3, H).bfloat16(), torch.arange(3 * n).view(n, 3))),
        "padded": (there_and_back, lambda n: (randn(E * n, H).bfloat16(),)),
        "unpermute": (home, lambda n: (randn(E * n, E), randn(n, E))),
        "unpermute, padded": (functools.partial(home, pad=True), lambda n: (randn(E * n, E), randn(n, E))),
        "loss": (lambda logits: z_loss_func(logits, 1.0), lambda n: (randn(n, E),)),
        "groups": (lambda logits: groups(logits)[0], lambda n: (randn(n, E),)),
    }


@pytest.mark.parametrize("name", ["layer", "padded", "unpermute", "unpermute, padded", "loss", "groups"])
def test_exported_programs_serve_the_batches(name: str, group_ep: str) -> None:
    """Without strict the code runs as it is, and len() of a tensor would be one number."""
    module = torch.nn.Module()
    module.forward, args = exported_parts(group_ep)[name]
    sizes = [{0: torch.export.Dim.AUTO} for _ in args(3)]
    with torch.no_grad():
        exported = torch.export.export(module, args(3), dynamic_shapes=tuple(sizes), strict=False)
        assert torch.equal(exported.module()(*args(5)), module.forward(*args(5)))


# ---- what a graph holds


def test_two_launches_stay_in_order_and_live(group_ep: str) -> None:
    """Through AOTAutograd: the begins, their finishes, and no gradient."""
    layer = two_launches(group_ep)
    assert graphs_of(layer, (5, 9), None, "aot_eager") == 2
    x = randn(4, H).bfloat16().requires_grad_()
    ids = torch.arange(4 * K).view(4, K).int() % E
    torch._dynamo.reset()
    with pytest.raises(Exception, match="begin_combine is not differentiable") as failed:
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, ids, torch.ones(4, K)).float().sum().backward()
    assert isinstance(failed.value, AscendMoeError) or "AscendMoeError" in repr(failed.value)


def test_a_copied_layer_runs_its_own_weights() -> None:
    """A graph knows a layer by a number, which no copy shares."""
    layer = EPMoE(E, K, H, F, torch.bfloat16, tp_size=1, tp_rank=0)
    layer.w13_weight.data, layer.w2_weight.data = W13, W2
    x = randn(5, H).bfloat16()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        twin.w2_weight.data = 2 * W2
        torch._dynamo.reset()
        compiled = torch.compile(twin, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x, logits_of(x)), 2 * layer(x, logits_of(x)))


# ---- the cause: a text made on every call makes a number of each size in it


def texts_made_on_every_call(source: str) -> list[int]:
    """Lines of the calls of ``need`` whose rule is an f-string, also by way of a name."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        made: dict[str, bool] = {}
        for node in sorted((n for n in ast.walk(function) if hasattr(n, "lineno")), key=lambda n: n.lineno):
            if isinstance(node, ast.Assign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                formatted = any(isinstance(part, ast.JoinedStr) for part in ast.walk(node.value))
                made |= {target.id: formatted for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "need":
                never = isinstance(node.args[0], ast.Constant)  # need(False, ...): the case is known
                parts = [] if never or len(node.args) < 3 else list(ast.walk(node.args[2]))
                named = any(isinstance(part, ast.Name) and made.get(part.id) for part in parts)
                if named or any(isinstance(part, ast.JoinedStr) for part in parts):
                    found.append(node.lineno)
    return found


def test_no_rule_is_formatted_before_it_is_broken() -> None:
    sources = sorted(Path(ascend_moe.__file__).parent.rglob("*.py"))
    found = {str(path): lines for path in sources if (lines := texts_made_on_every_call(path.read_text()))}
    assert len(sources) > 100 and not found
    assert texts_made_on_every_call("def f(x):\n rule = f'is {x}'\n need(x, 'x', rule)\n need(x, 'x', f'{x}')") == [
        3,
        4,
    ]
