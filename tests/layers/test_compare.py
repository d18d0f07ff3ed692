"""`ascend_moe.compare`: a layer's steps against the reference, and planted faults that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_arguments import refused
from torch import nn

import ascend_moe
from ascend_moe import MoEConfig, MoELayer
from ascend_moe.dispatchers import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, MC2Dispatcher
from ascend_moe.errors import ArgumentError, ReferenceMismatch
from ascend_moe.routers import RouteCapture

WORLD, E, K, H, F = 2, 4, 2, 64, 32
CONFIG: dict[str, Any] = {"hidden_size": H, "moe_intermediate_size": F, "num_experts": E, "top_k": K}
Plant = Callable[[MoELayer, int], None]


def run(
    plant: Plant | None = None,
    *,
    kind: type[Dispatcher] = MC2Dispatcher,
    bits: int = 0,
    dtype: torch.dtype = torch.float32,
    reference: bool = False,
    comm_alg: str = "",
    trainable: bool = False,
    autocast: bool = False,
    first: float = 0.5,
    world: int = WORLD,
    **config: Any,
) -> list[Any]:
    """Compare one forward; return what every rank has found."""
    numbers = MoEConfig(**CONFIG | config)

    def body(rank: int, group: str) -> Any:
        special = numbers.special.given
        place: Any = (group, world, rank, E) if kind is MC2Dispatcher else ((group, world, rank), E)
        special |= {"comm_alg": comm_alg} if comm_alg else {}
        layer = MoELayer(numbers, kind(*place, **special), dtype=dtype, trainable=trainable).init_weights(1)
        parameters = {name: value.clone() for name, value in layer.state_dict().items()} if reference else None
        if bits:
            layer.quantize_(bits)
        if plant is not None:
            plant(layer, rank)
        x = torch.randn(5, H, generator=torch.Generator().manual_seed(rank)).to(dtype)
        x[0, 0] = first
        layer.capture = RouteCapture(5, numbers.top_k, steps=2)
        with ascend_moe.compare(layer, parameters, raises=False) as comparison, torch.no_grad():
            with torch.autocast("cpu", enabled=autocast):
                layer(x=x)
            assert comparison.steps == 1
            refused("layer", ascend_moe.compare, layer, says="layer is compared already")
        layer(x)
        assert comparison.steps == 1, "compared after remove()"
        assert len(layer.capture.last()) == int(layer.capture.seen) == 2
        return comparison.found

    with ascend_moe.LocalCluster(world, window_mib=4) as cluster:
        return cluster.run(body)


@pytest.mark.parametrize("kind", [MC2Dispatcher, AllToAllDispatcher, AllGatherDispatcher])
def test_a_right_layer_equals_the_reference_with_every_dispatcher(kind: type[Dispatcher]) -> None:
    assert run(kind=kind, shared_intermediate_size=F, reference=True) == [None, None]


@pytest.mark.parametrize(
    "more",
    [
        {"bits": 8, "reference": True},
        {"bits": 4},
        {"dtype": torch.bfloat16, "zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 1},
        {"latent_size": 32, "router": "llama4", "top_k": 2},
        {"router": "sparsemixer", "jitter_eps": 0.5, "trainable": True},
        {"autocast": True, "const_expert_num": 1},
        {"first": float("nan"), "reference": True},
        {"first": float("inf"), "shared_intermediate_size": F},
    ],
    ids=str,
)
def test_other_right_layers_equal_the_reference(more: dict[str, Any]) -> None:
    assert run(**more) == [None, None]


def test_hierarchy_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    assert run(comm_alg="hierarchy", world=4, dtype=torch.bfloat16) == [None] * 4


def change(tensor: torch.Tensor, *at: int) -> None:
    with torch.no_grad():
        tensor[at] += 1


def of_rank_1(step: str, fault: Callable[..., Any], part: str = "") -> Plant:
    """Pass the results of a step of rank 1's layer, or of its part, through ``fault``."""

    def plant(layer: MoELayer, rank: int) -> None:
        whose = getattr(layer, part) if part else layer
        right = getattr(whose, step)
        if rank == 1:
            setattr(whose, step, lambda *args, **more: fault(right(*args, **more)))

    return plant


def wrong_id(made: Any) -> Any:
    return made._replace(ids=made.ids.index_put((torch.tensor(3), torch.tensor(1)), made.ids[3, 0]))


def wrong_scale(made: Any) -> Any:
    return made._replace(weights=made.weights.index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(9.0)))


def wrong_order(made: Any) -> Any:
    rows = getattr(made, "expand_x", made)
    rows[:2] = rows[:2].flip(0)
    return made


def wrong_scales(made: Any) -> Any:
    change(made.dynamic_scales, 0)
    return made


def wrong_row(made: Any) -> Any:
    """In the first row of rank 1's second expert."""
    change(made.expand_x, int(made.expert_token_nums[0]), 5)
    return made


@pytest.mark.parametrize(
    ("plant", "more", "stage", "where"),
    [
        (of_rank_1("prepared", wrong_id), {}, "ids", {"token": 3, "element": 1}),
        (of_rank_1("prepared", wrong_scale), {}, "scales", {"token": 2, "element": 0, "got": 9.0}),
        (lambda layer, rank: rank and change(layer.w_down, 1, 7, 9), {"reference": True}, "parameters", {"expert": 3}),
        (of_rank_1("_dispatch", wrong_order, "dispatcher"), {}, "dispatch", {"element": 0}),
        (of_rank_1("_dispatch", wrong_row, "dispatcher"), {}, "dispatch", {"expert": 3, "element": 5}),
        (of_rank_1("_dispatch", wrong_scales, "dispatcher"), {"bits": 8}, "dispatch", {}),
        (of_rank_1("run_experts", wrong_order), {}, "experts", {"element": 0}),
        (of_rank_1("_combine", wrong_order, "dispatcher"), {}, "combine", {"element": 0}),
    ],
    ids=["id", "scale", "weight", "order of rows", "row", "scales of rows", "order of experts' rows", "order of sums"],
)
def test_a_planted_fault_is_named_on_every_rank(
    plant: Plant, more: dict[str, Any], stage: str, where: dict[str, Any]
) -> None:
    for found in run(plant, **more):
        assert isinstance(found, ReferenceMismatch) and (found.stage, found.rank) == (stage, 1), found
        assert found.details | where == found.details and f"{stage} on rank 1" in str(found)
        token = f"token {found.token} of rank {found.source}, expert {found.expert}"
        assert None in (found.token, found.expert) or token in str(found)


class FusedMoE(nn.Module):
    """A module with the names of vllm-ascend's, after loading, that calls MC2's operators; or its experts have them."""

    def __init__(self, place: tuple[str, int, int], within: bool = False) -> None:
        super().__init__()
        experts: Any = nn.Module() if within else self
        generator = torch.Generator().manual_seed(place[2])
        made = [torch.randn(size, generator=generator) / 8 for size in ((E // WORLD, H, 2 * F), (E // WORLD, F, H))]
        experts.w13_weight, experts.w2_weight = (nn.Parameter(weight.bfloat16(), False) for weight in made)
        self.named, self.place, self.fault = {"experts": experts}, place, False
        self.parts = nn.ModuleList([experts] * within)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return torch.ops.vllm.fused_moe_of_test(hidden_states, router_logits, self.place[2])

    def step(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        weights, ids = topk(hidden_states, router_logits)
        experts = self.named["experts"]
        sent = ascend_moe.npu_moe_distribute_dispatch_v2(hidden_states, ids, *self.place, E)
        rows = ascend_moe.experts.grouped_mlp(sent[0], experts.w13_weight, experts.w2_weight, sent[3])
        if self.fault:
            rows[0, 5] += 1
        return ascend_moe.npu_moe_distribute_combine_v2(rows, ids, sent[2], sent[4], weights, *self.place, E)


def topk(hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = router_logits.float().softmax(-1).topk(K)
    return weights, ids.int()


def test_a_fused_moe_module_is_compared_by_its_operators() -> None:
    """Within an operator of vLLM, which knows its module by a name."""
    modules: dict[int, FusedMoE] = {}
    library = torch.library.Library("vllm", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("fused_moe_of_test(Tensor x, Tensor logits, int name) -> Tensor")
    library.impl("fused_moe_of_test", lambda x, logits, name: modules[name].step(x, logits), "CPU")

    def body(rank: int, group: str) -> Any:
        module = modules[rank] = FusedMoE((group, WORLD, rank), within=rank == 0)
        x, logits = torch.randn(4, H).bfloat16(), torch.randn(4, E)
        comparison = ascend_moe.compare(module, module.named["experts"].state_dict(), route=topk)
        module(x, logits)
        assert comparison.found is None
        module.fault = rank == 1
        with pytest.raises(ReferenceMismatch) as caught:
            module(x, logits)
        return caught.value.stage, caught.value.rank, caught.value.element

    with ascend_moe.LocalCluster(WORLD, window_mib=4) as cluster:
        assert cluster.run(body) == [("experts", 1, 5)] * 2


def test_modules_that_cannot_be_compared_are_refused() -> None:
    refused("layer", ascend_moe.compare, nn.Linear(2, 2), says="layer is a Linear without w13_weight")
    module = FusedMoE(("g", WORLD, 0))
    with pytest.raises(ArgumentError, match=r"parameters has w9 .*, which the layer lacks"):
        ascend_moe.compare(module, {"w9": torch.ones(2)})
    module.forward = lambda x: x  # type: ignore[method-assign]
    with ascend_moe.compare(module), pytest.raises(ArgumentError, match="has called no npu_moe_distribute_dispatch"):
        module(torch.ones(2))
