"""MoE layers in torch's data parallelism: ranks with different experts do not share them, and the rest is averaged."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import Ranks, values
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ascend_moe import MoEConfig, MoELayer, exclude_experts
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.experts.rank_experts import held_text
from ascend_moe.interop import megatron
from ascend_moe.interop.sglang import EPMoE

WORLD, EP, H = 4, 2, 16
CONFIG = {"hidden_size": H, "moe_intermediate_size": 8, "num_experts": 4, "top_k": 2}
EXPERTS = ("w_gate_up", "w_down", "gate_up_bias", "down_bias")


class Model(nn.Module):
    def __init__(self, moe: nn.Module, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe, self.recompute = nn.Linear(H, H), moe, recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        rows = x.detach() if getattr(self.moe, "quant_mode", 0) else x  # int8 rows have no gradient
        made = self.moe(rows) if self.recompute is None else checkpoint(self.moe, rows, use_reentrant=self.recompute)
        return x + (made[0] if isinstance(made, tuple) else made)


def layer(ranks: Any, trainable: bool = True, **config: Any) -> MoELayer:
    experts = MC2Dispatcher.from_group(ranks, CONFIG["num_experts"])
    return MoELayer(MoEConfig(**CONFIG, **config), experts, dtype=torch.float32, trainable=trainable).init_weights(1)


def groups() -> dict[str, Any]:
    """This rank's groups in a mesh of replicas and EP ranks, made once a process."""
    if "all" not in _GROUPS:
        os.environ["HCCL_BUFFSIZE"] = "16"
        mesh = init_device_mesh("cpu", (WORLD // EP, EP), mesh_dim_names=("replicas", "experts"))
        flat = init_device_mesh("cpu", (WORLD,))
        _GROUPS.update({"mesh": mesh, "flat": flat, "all": flat.get_group()})
        _GROUPS.update({name: mesh[name].get_group() for name in ("replicas", "experts")})
    return _GROUPS


_GROUPS: dict[str, Any] = {}


def tokens(seed: int) -> Tensor:
    return torch.randn(5, H, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def averaged(model: nn.Module, ddp_over: Any, batches: int) -> dict[str, Tensor]:
    """The gradients of the mean of the ranks' losses, without DDP."""
    for seed in range(batches):
        model(tokens(seed)).square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = found[name] = parameter.grad / ddp_over.size()
            if name.rpartition(".")[2] not in EXPERTS or ddp_over is groups()["replicas"]:
                dist.all_reduce(grad, group=ddp_over)
    return found


def one_ddp(options: dict[str, Any], over: str, alone: bool, quantized: str, frozen: bool, batches: int) -> list[str]:
    """Wraps a layer, ``alone`` or in a model, by DDP and trains a step; returns the names of what is wrong."""
    group, plain = groups()[over], quantized == "no"
    recompute, bias = options.pop("recompute"), options.pop("bias") and plain
    moe = layer(groups()["experts"], plain and not frozen, expert_bias=bias)
    model = moe if alone and moe.w_down.requires_grad else Model(moe, recompute)
    expected_model = copy.deepcopy(model)
    if quantized == "before":
        moe.quantize_()
    if not plain:
        expected_model.moe.quantize_()
    ddp = DistributedDataParallel(model, process_group=group, **options)
    marked = {name for name, each in model.named_parameters() if getattr(each, "_ddp_ignored", False)}
    unmarked = dict(model.named_parameters()).keys() & ddp.parameters_to_ignore - marked  # as mixed precision reads it
    if quantized == "after":
        moe.quantize_()
    for seed in range(batches):
        with ddp.no_sync() if seed < batches - 1 else nullcontext():
            ddp(tokens(seed)).square().sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    expected = averaged(expected_model, group, batches)
    wrong = sorted(unmarked) + sorted(gradients.keys() ^ expected.keys())
    wrong += [name for name in gradients if not torch.allclose(gradients[name], expected[name], rtol=1e-4, atol=1e-4)]
    state, before = model.state_dict(), expected_model.state_dict()
    return wrong + [name for name, tensor in state.items() if not torch.equal(tensor, before[name])]


def drawn_ddp(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        rng = random.Random(seed)
        options = {
            "find_unused_parameters": rng.random() < 0.3,
            "static_graph": rng.random() < 0.3,
            "gradient_as_bucket_view": rng.random() < 0.5,
            "init_sync": rng.random() < 0.8,
            "broadcast_buffers": rng.choice([None, True, False]),
            "recompute": rng.choice([None, None, False, True]),
            "bias": rng.random() < 0.4,
        }
        batches = rng.choice([1, 1, 2, 3])
        if options["recompute"] is not None or options["static_graph"]:
            options["find_unused_parameters"] = False
            batches = 1  # torch's DDP takes neither reentrant checkpoints in no_sync, nor static graphs that change
        case = (
            rng.choice(["experts", "replicas"]),
            rng.random() < 0.3,
            rng.choice(["no", "no", "before", "after"]),
            rng.random() < 0.2,
            batches,
        )
        wrong = one_ddp(dict(options), *case)
        found += [f"seed {seed} {options} {case}: {wrong}"] if wrong else []
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD, timeout_s=60) as opened:
        yield opened


def called(ranks: Ranks, function: Callable[..., Any], *args: Any) -> list[Any]:
    for rank in range(WORLD):
        ranks.start(rank, function, *args)
    return values([ranks.wait(rank, 250) for rank in range(WORLD)])


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.nightly)])
def test_ddp_averages_what_its_ranks_share_and_nothing_else(ranks: Ranks, seeds: range) -> None:
    assert called(ranks, drawn_ddp, seeds) == [[]] * WORLD


def megatron_layer() -> nn.Module:
    ranks = groups()["experts"]
    router = megatron.TopKRouter(megatron.RouterConfig(num_moe_experts=4, moe_router_topk=2, hidden_size=H))
    experts = megatron.GroupedMLP(2, H, 8, dtype=torch.float32)
    return megatron.MoELayer(router, megatron.TokenDispatcher("mc2", ranks, 4, 2), experts)


def epmoe() -> nn.Module:
    ranks = groups()["experts"]
    return EPMoE(4, 2, H, 8, group=ranks, params_dtype=torch.float32, tp_size=EP, tp_rank=ranks.rank())


def known_on_some_ranks() -> nn.Module:
    mlp = megatron.GroupedMLP(2, H, 8, dtype=torch.float32)
    mlp.held = f"experts of rank {dist.get_rank()}" if dist.get_rank() else ""
    return mlp


def filled(model: nn.Module) -> nn.Module:
    """With values in the memory that a new model has."""
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0 + dist.get_rank())
    return model


def fsdp1(model: nn.Module, *over: str, **options: Any) -> nn.Module:
    """Over one group, or over a group that shards and one that replicates."""
    given: Any = groups()[over[0]]
    if len(over) == 2:
        given = given, groups()[over[1]]
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(model, process_group=given, device_id=torch.device("cpu"), **options)


def forward_of(model: nn.Module) -> Tensor:
    made: Tensor = model(tokens(0))
    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: layer(groups()["experts"]),
    "model": lambda: Model(layer(groups()["experts"])),
    "frozen": lambda: Model(layer(groups()["experts"], trainable=False)),
    "quantized": lambda: Model(layer(groups()["experts"], trainable=False).quantize_()),
    "megatron": lambda: filled(Model(megatron_layer())),
    "sglang": lambda: filled(Model(epmoe())),
    "grouped_mlp": lambda: filled(Model(megatron.GroupedMLP(2, H, 8, dtype=torch.float32))),
    "known on some ranks": lambda: filled(Model(known_on_some_ranks())),
}
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": lambda model: DistributedDataParallel(model),
    "replicate": lambda model: forward_of(replicate(model)),
    "fully_shard": lambda model: fully_shard(model, mesh=groups()["flat"]),
    "fully_shard over EP": lambda model: fully_shard(model, mesh=groups()["mesh"]["experts"]),
    "fully_shard over both": lambda model: fully_shard(model, mesh=groups()["mesh"]),
    "fsdp1": lambda model: fsdp1(model, "all"),
    "fsdp1 of the layer": lambda model: fsdp1(model, "all", auto_wrap_policy=ModuleWrapPolicy({MoELayer})),
    "fsdp1, copies over EP": lambda model: fsdp1(model, "replicas", "experts"),
    "fsdp1 over EP, keeping parameters": lambda model: fsdp1(model, "experts", use_orig_params=True),
}


def refused(names: list[tuple[str, str]]) -> dict[str, str]:
    """What each wrapper says of each model, and of weights that it has changed nevertheless."""
    found = {}
    for kind, wrapper in names:
        model = MODELS[kind]()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            WRAPPERS[wrapper](model)
            found[f"{kind}, {wrapper}"] = "no error"
        except Exception as error:
            found[f"{kind}, {wrapper}"] = f"{type(error).__name__}: {error}"
        if wrapper == "ddp":
            changed = [name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])]
            found[f"{kind}, {wrapper}"] += f" changed {changed}" if changed else ""
    return found


def taken_by_torch(kind: str, wrapper: str) -> bool:
    """FSDP1 itself refuses a model with frozen parts, unless it keeps parameters, and one with several dtypes."""
    return "fsdp1" not in wrapper or (kind in ("frozen", "sglang") and "keeping" in wrapper) or kind in TRAINABLE


TRAINABLE = ("layer", "model", "megatron", "grouped_mlp")
CASES = [(kind, wrapper) for kind in MODELS for wrapper in WRAPPERS if taken_by_torch(kind, wrapper)]


def test_experts_that_differ_by_rank_are_refused_by_name(ranks: Ranks) -> None:
    for found in called(ranks, refused, CASES):
        for case, text in found.items():
            said = "is wrapped without its layer" if "replicate" in case else "must not be shared by"
            assert said in text and "changed" not in text and "\n" not in text, f"{case}: {text}"


def reduced_late(model: nn.Module) -> None:
    late = [(name, each) for name, each in model.named_parameters() if name.endswith(EXPERTS)]
    options: dict[str, Any] = {"delay_all_reduce_named_params": late, "param_to_hook_all_reduce": model.first.weight}
    DistributedDataParallel(model, process_group=groups()["experts"], **options)


def sharded_and_quantized(model: nn.Module) -> None:
    fully_shard(model.moe, mesh=groups()["mesh"]["replicas"])
    model.moe.quantize_()


#: And what is said.
WRONG: dict[Callable[[nn.Module], None], str] = {
    reduced_late: "moe.w_gate_up is in delay_all_reduce_named_params, but differs by rank: remove it from there",
    sharded_and_quantized: "w_down is sharded by fully_shard: call quantize_() before fully_shard",
}


def said_of(wrong: Callable[[nn.Module], None]) -> str:
    try:
        wrong(MODELS["frozen"]())
    except ArgumentError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_order_of_wrappers_is_refused(ranks: Ranks, wrong: Callable[[nn.Module], None]) -> None:
    assert called(ranks, said_of, wrong) == [WRONG[wrong]] * WORLD


def test_experts_are_named_by_their_span_or_one_by_one() -> None:
    """Other experts between the same ends are others."""
    assert held_text([2, 3, 4], 8) == "experts 2..4 of 8" and held_text([2, 4], 8) == "experts 2, 4 of 8"


def fsdp2_of_replicas(model: nn.Module) -> nn.Module:
    experts = set(exclude_experts(model))
    fully_shard(model, mesh=groups()["flat"], ignored_params=experts)
    fully_shard(model.moe, mesh=groups()["mesh"]["replicas"], ignored_params=set(model.moe.parameters()) - experts)
    return model


def ddp_without_experts(model: nn.Module) -> nn.Module:
    exclude_experts(model)
    return DistributedDataParallel(model)


def ddp_that_ignores_experts(model: nn.Module) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [f"moe.{name}" for name in EXPERTS])
    return DistributedDataParallel(model)


LEGAL: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp over replicas": lambda model: DistributedDataParallel(model, process_group=groups()["replicas"]),
    "ddp without experts": ddp_without_experts,
    "ddp that ignores experts": ddp_that_ignores_experts,
    "fully_shard over replicas": fsdp2_of_replicas,
    "fsdp1 over replicas": lambda model: fsdp1(model, "replicas"),
    "fsdp1 without experts": lambda model: fsdp1(model, "all", ignored_states=exclude_experts(model)),
    "fsdp1 keeping parameters": lambda model: fsdp1(model, "replicas", use_orig_params=True),
}


def outputs(kind: str) -> list[str]:
    """The legal wrappers by which a model's output is not as before."""
    wrong = []
    for name, wrapper in LEGAL.items():
        if not taken_by_torch(kind, name):
            continue
        model = MODELS[kind]()
        with torch.no_grad():
            expected, wrapped = forward_of(model), wrapper(model)
            wrong += [] if torch.allclose(forward_of(wrapped), expected, atol=1e-5) else [name]
        forward_of(wrapped).sum().backward()
    return wrong


@pytest.mark.parametrize("kind", ["model", "frozen", "quantized"])
def test_ranks_with_the_same_experts_share_them(ranks: Ranks, kind: str) -> None:
    assert called(ranks, outputs, kind) == [[]] * WORLD


def restored(directory: str) -> bool:
    """Whether a distributed checkpoint with the state under the EP rank restores this rank's layer."""
    made = layer(groups()["experts"])
    expected, key = copy.deepcopy(made.state_dict()), f"rank{made.dispatcher.rank}"
    dcp.save({key: made.state_dict()}, checkpoint_id=directory)
    for parameter in made.parameters():
        parameter.detach().zero_()
    state = {key: made.state_dict()}
    dcp.load(state, checkpoint_id=directory)
    made.load_state_dict(state[key])
    return all(torch.equal(tensor, expected[name]) for name, tensor in made.state_dict().items())


def test_distributed_checkpoints_keep_the_experts_of_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert called(ranks, restored, str(tmp_path)) == [True] * WORLD


def marks() -> list[str]:
    """After which change of a layer a parameter's mark is not as Megatron-LM's DDP wants it."""
    ranks = groups()["experts"]
    made = {"new": layer(ranks, trainable=False, expert_bias=True)}
    made["copied"] = copy.deepcopy(made["new"])
    made["cast"] = copy.deepcopy(made["new"]).to(torch.bfloat16)
    made["assigned"] = copy.deepcopy(made["new"])
    made["assigned"].load_state_dict(
        {name: each.clone() for name, each in made["new"].state_dict().items()}, assign=True
    )
    made["from meta"] = copy.deepcopy(made["new"]).to("meta").to_empty(device="cpu")
    made["quantized"] = layer(ranks, trainable=False).quantize_()
    made["quantized, copied"] = copy.deepcopy(made["quantized"])
    wrong = []
    for change, each in made.items():
        for name, parameter in each.named_parameters():
            if getattr(parameter, "allreduce", True) == (name in EXPERTS):
                wrong.append(f"{name}, {change}")
    return wrong


def test_expert_parameters_keep_the_mark_of_megatron(ranks: Ranks) -> None:
    assert called(ranks, marks) == [[]] * WORLD
