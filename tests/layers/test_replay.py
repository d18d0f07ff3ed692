"""Routing that is given and routing that is handed out, in every router and in MoELayer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_arguments import refused
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.interop.fused_moe import select_experts
from ascend_moe.interop.vllm_ascend import moe_gating_top_k, moe_gating_top_k_hash
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.moe_config import ROUTERS
from ascend_moe.routers import RouteCapture, RouterReplay, RouterReplayAction, topk_routing_with_score_function

E, K, T, H = 8, 2, 6, 32
RECORD, FORWARD, BACKWARD = RouterReplayAction
CONFIGS = [
    *({"router": name, "routed_scaling_factor": 1.5} for name in ROUTERS),
    {"router": "softmax", "n_group": 4, "topk_group": 2, "renormalize": False},
    {"router": "deepseek_v3", "n_group": 4, "topk_group": 2, "renormalize": False, "routed_scaling_factor": 2.5},
]


def layer_of(numbers: dict[str, Any], dispatcher: Any, **given: Any) -> MoELayer:
    chooses = ROUTERS[numbers["router"]].chooses or K
    more: dict[str, Any] = {"vocab_size": 10} if numbers["router"] == "hash" else {}
    return MoELayer(MoEConfig(H, 16, E, chooses, **numbers, **more), dispatcher, **given).init_weights(3)


@pytest.mark.parametrize("numbers", CONFIGS, ids=lambda numbers: "-".join(map(str, numbers.values())))
def test_every_router_takes_ids_and_hands_them_out(numbers: dict[str, Any], group_ep: str) -> None:
    """Its own ids give the same bits; others the weights of these experts, with gradients; -1 has weight 0."""
    layer = layer_of(numbers, MC2Dispatcher(group_ep, 1, 0, E), dtype=torch.float32, trainable=True)
    layer.eval()  # the sparse mixer draws no experts
    topk, x, input_ids = layer.config.top_k, torch.randn(T, H, generator=torch.manual_seed(1)), torch.arange(T)
    own_weights, own_ids = layer.route(x, input_ids)
    layer.replay, layer.capture = RouterReplay(register=False), RouteCapture(T + 2, topk, steps=2)
    layer.replay.set_router_replay_action(RECORD)
    assert torch.equal(layer.route(x, input_ids)[1], own_ids)
    recorded = layer.replay.get_recorded_indices()
    assert recorded is not None and torch.equal(recorded, own_ids) and torch.equal(layer.capture.last()[0], own_ids)
    layer.replay.set_router_replay_action(FORWARD)
    layer.replay.set_target_indices(recorded.short())
    weights, ids = layer.route(x)
    assert torch.equal(weights, own_weights) and torch.equal(ids, own_ids)
    turned = recorded.flip(1)
    layer.replay.set_target_indices(turned)
    if numbers["router"] != "sparsemixer":  # its second weight depends on the first choice
        torch.testing.assert_close(layer.route(x)[0], own_weights.flip(1))
    others = (recorded + 3) % E
    others[0] = -1
    others[1, -1] = -1
    layer.replay.set_target_indices(others)
    weights, ids = layer.route(x)
    assert torch.equal(ids, others.int()) and torch.equal(layer.capture.last()[-1], others.short())
    assert torch.equal(weights == 0, others < 0)
    if layer.config.renormalize and numbers["router"] not in ("sparsemixer", "llama4"):
        torch.testing.assert_close(weights[2:].sum(1), torch.full((T - 2,), layer.config.routed_scaling_factor))
    weights[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    assert layer.gate_weight.grad is not None and bool(layer.gate_weight.grad.isfinite().all())
    assert bool(layer.gate_weight.grad.any()) or layer.config.renormalize
    out = layer(x, input_ids=input_ids)
    assert bool((out[0] == 0).all()) and bool(out[2].any())


def test_wrong_ids_and_numbers_are_refused() -> None:
    logits, replay = torch.randn(3, 5), RouterReplay(register=False)
    replay.set_router_replay_action(FORWARD)
    for ids, text in (
        (None, "replay has no ids to replay; call set_target_indices"),
        (torch.zeros(3, 1, dtype=torch.int64), r"ids is \(3, 1\).*must be \(3, 2\)"),
        (torch.full((3, 2), 5), r"ids are 5\.\.5; they must be -1\.\.4"),
        (torch.full((3, 2), -2), r"ids are -2\.\.-2; they must be -1\.\.4"),
    ):
        if ids is not None:
            replay.set_target_indices(ids)
        refused(text.split()[0], topk_routing_with_score_function, logits, 2, router_replay=replay, says=text)
    replay.clear_indices()
    replay.set_router_replay_action(BACKWARD)
    with pytest.raises(ArgumentError, match="has no ids left for a backward"):
        topk_routing_with_score_function(logits, 2, router_replay=replay)
    capture = RouteCapture(4, 2)
    for tokens, topk in ((5, 2), (4, 1)):
        ids = torch.zeros(tokens, topk, dtype=torch.int32)
        refused("ids", capture, ids, says=rf"are \({tokens}, {topk}\); the capture takes up to 4 tokens of 2")
    refused("topk_indices", replay.set_target_indices, torch.zeros(3, 2), says=r"topk_indices is torch\.float32")
    refused("steps", capture.last, 2, says="steps is 2; the ring stores 1")
    refused("dtype", RouteCapture, 4, 2, dtype=torch.int64, says=r"dtype is torch\.int64; need torch\.int16 or")
    refused("steps", RouteCapture, 4, 2, steps=0, says="steps is 0")


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_captures_and_static_buffers_keep_every_id_or_refuse_it(dtype: torch.dtype) -> None:
    """200 steps of drawn sizes in rings and shared static buffers; an id that the dtype does not hold is named.

    Behind a step's tokens the ring has -1, also where a longer step was. Each of three routers records into its own
    part of one buffer, which is longer than the batch, and leaves the rows behind it as they were.
    """
    generator, most = torch.Generator().manual_seed(8), torch.iinfo(dtype).max
    capture = RouteCapture(T, K, steps=3, dtype=dtype)
    RouterReplay.clear_global_router_replay_instances()
    routers, shared = [RouterReplay() for _ in range(3)], torch.full((T, 3, K), -7, dtype=dtype)
    RouterReplay.set_global_static_buffers(shared)
    RouterReplay.set_global_router_replay_action(RECORD)
    assert capture.last() == [] and "3 steps of 6 x 2" in repr(capture) and not capture.state_dict()
    steps: list[Tensor] = []
    for step in range(200):
        size, kind = (int(torch.randint(0, end, (), generator=generator)) for end in (T + 1, 3))
        kind = (torch.int16, torch.int32, torch.int64)[kind]
        highest = min(most, torch.iinfo(kind).max)
        all_ids = [torch.randint(-1, highest, (size, K), generator=generator).to(kind) for _ in routers]
        all_ids[step % 3].masked_fill_(torch.rand(size, K, generator=generator) < 0.2, highest)
        before = shared.clone()
        for number, ids in enumerate(all_ids):
            routers[number].chose(ids)
            before[:size, number] = ids
        assert torch.equal(shared, before)
        capture(all_ids[0])
        for kept, ids in zip(RouterReplay.get_recorded_data(), all_ids, strict=True):
            assert kept is not None and kept.dtype == dtype and torch.equal(kept.long(), ids.long())
        steps = [*steps[-2:], all_ids[0].to(dtype)]
        assert all(map(torch.equal, capture.last(), steps)) and torch.equal(capture.last(1)[0], steps[-1])
        assert bool((capture.ring[step % 3, size:] == -1).all()) and capture.ring.dtype == dtype
    kept, seen = capture.ring.clone(), int(capture.seen)
    assert seen == 200 and capture.last(0) == [] and len(capture.last()) == 3
    for wrong in (most + 1, 2**40):
        ids, rule = (
            torch.tensor([[0, 1], [wrong, 2]]),
            f"contains id {wrong}; {dtype} holds ids up to {most}: use a wider",
        )
        refused("ids", capture, ids, says=rule)
        refused("topk_indices", routers[1].record_indices, ids, says=rule)
    with pytest.raises(ArgumentError, match=rf"topk_indices is \(2, 1\).*must be \(2, {K}\)"):
        routers[1].record_indices(torch.zeros(2, 1, dtype=torch.int64))
    assert torch.equal(capture.ring, kept) and int(capture.seen) == seen and torch.equal(shared, before)
    newest = capture.last(1)[0]
    capture.clear()
    assert capture.last() == [] and torch.equal(newest, steps[-1])
    RouterReplay.clear_global_router_replay_instances()


@pytest.mark.parametrize(
    ("router", "backend"),
    [
        ("hash", "eager"),
        *(pytest.param("hash", name, marks=pytest.mark.nightly) for name in ("aot_eager", "inductor")),
        *(pytest.param(name, "eager", marks=pytest.mark.nightly) for name in ROUTERS if name != "hash"),
    ],
)
def test_a_layers_router_with_its_capture_is_one_graph(router: str, backend: str) -> None:
    """The ring's place is counted on the device: a compiled graph that runs again writes the next step."""
    layer = layer_of({"router": router}, MC2Dispatcher("of nobody", 1, 0, E), dtype=torch.float32)
    layer.capture, expected = RouteCapture(T, layer.config.top_k, steps=4), []
    torch._dynamo.reset()
    compiled = torch.compile(layer.route, fullgraph=True, backend=backend, dynamic=False)
    for seed in range(3):
        x, input_ids = torch.randn(T, H, generator=torch.Generator().manual_seed(seed)), torch.arange(T)
        weights, ids = compiled(x, input_ids)
        wanted = layer.route(x, input_ids)
        torch.testing.assert_close(weights, wanted[0])
        assert torch.equal(ids, wanted[1])
        expected += [ids.short()] * 2
    assert all(map(torch.equal, layer.capture.last(), expected[-4:]))


def test_select_experts_and_vllm_ascends_operator_take_the_same_ids() -> None:
    logits, bias = torch.randn(T, E, generator=torch.manual_seed(2)), torch.randn(E)
    for scoring, kind in (("softmax", 0), ("sigmoid", 1), ("sqrtsoftplus", 2)):
        own = select_experts(logits, logits, K, False, True, scoring_func=scoring, e_score_correction_bias=bias)
        again = select_experts(logits, logits, K, False, True, scoring_func=scoring, ids=own[1])
        assert torch.equal(own[0], again[0]) and torch.equal(own[1], again[1])
        want = moe_gating_top_k(logits, K, 1, 1, 0, int(kind == 0), kind, False, 1.0, 1e-20, bias)
        assert torch.equal(own[0], want[0]) and torch.equal(own[1], want[1])
        # vllm-ascend's operator of hash layers is a replay where each token is an id of its own.
        ids = torch.randint(0, E, (T, K), generator=torch.manual_seed(kind))
        hashed = moe_gating_top_k_hash(logits, K, input_ids=torch.arange(T), tid2eid=ids, norm_type=kind)
        given = select_experts(logits, logits, K, False, kind != 0, scoring_func=scoring, ids=ids)
        assert torch.equal(hashed[0], given[0]) and torch.equal(hashed[1], given[1])
    scores = torch.sigmoid(logits)
    plain = select_experts(logits, logits, K, False, False, scoring_func="sigmoid", routed_scaling_factor=2.0, ids=ids)
    assert torch.equal(plain[0], scores.gather(1, ids) * 2.0)
    grouped = select_experts(logits, logits, K, True, True, 1, 4, indices_type=torch.int64)
    assert grouped[1].dtype == torch.int64 and bool((grouped[1] // 2 == grouped[1][:, :1] // 2).all())
    with pytest.raises(ArgumentError, match="scoring_func is 'tanh'"):
        select_experts(logits, logits, K, False, True, scoring_func="tanh")


def test_a_backward_that_computes_forwards_anew_takes_each_forwards_ids() -> None:
    """Two micro-batches, both forwards before both backwards, as a pipeline runs them."""
    weight = torch.randn(E, H, generator=torch.manual_seed(4), requires_grad=True)
    batches = [torch.randn(T, H, generator=torch.manual_seed(seed)) for seed in (5, 6)]
    given = [torch.randint(0, E - 1, (T, 1)) + torch.tensor([[0, 1]]) for _ in batches]

    def run(x: Tensor) -> Tensor:
        return topk_routing_with_score_function(x @ weight.t(), K, router_replay=replay, dense_output=True)[0]

    def gradient(again: bool) -> Tensor:
        weight.grad = torch.zeros_like(weight)
        outs = []
        replay.clear_indices()
        replay.set_router_replay_action(FORWARD)
        for x, ids in zip(batches, given, strict=True):
            replay.set_target_indices(ids)
            out = checkpoint(run, x, use_reentrant=False) if again else run(x)
            outs.append((out * torch.tensor([1.0, 3.0])).sum())
        replay.set_router_replay_action(BACKWARD)
        for out in outs:
            out.backward()  # type: ignore[no-untyped-call]
        return weight.grad.clone()

    replay = RouterReplay(register=False)
    plain, again = gradient(False), gradient(True)
    assert torch.equal(plain, again) and bool(plain.any()) and replay.replay_backward_list == []
