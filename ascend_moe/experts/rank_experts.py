"""Experts of a rank under data parallelism: only ranks with the same experts may share them.

torch's wrappers take parameters of the same name and shape on all ranks for one parameter. For experts that differ
between ranks, DDP would broadcast rank 0's, and FSDP would mix shards. Both are detected when they wrap: DDP and FSDP1
register the wrapped module, FSDP2 assigns each sharded parameter to its module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ascend_moe.errors import need

_RULE = (
    "of {} must not be shared by the {} ranks of this {}: it contains {} here, {} on another; wrap it over ranks with "
    "the same experts only, or exclude it by ascend_moe.exclude_experts (docs/layers.md)"
)


class RankExperts(nn.Module):
    """Base class of modules with parameters of this rank's experts, which DDP and FSDP must not mix between ranks.

    The parameters have ``allreduce = False``, which Megatron-LM's DDP reads. ``held`` names the experts, "" if the
    module does not know them. Wrapping in DDP or FSDP raises ArgumentError on every rank of a group if ``held`` differs
    between ranks or is ""; but a DDP over ranks of which no two have the same ``held`` excludes the experts instead.
    """

    _expert_parameters: tuple[str, ...] = ()
    _expert_buffers: tuple[str, ...] = ()
    _experts_excluded = False
    held: Any = ""

    def __init__(self) -> None:
        super().__init__()
        _watch_wrappers()
        self._fitting: set[Any] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 bypasses register_parameter for modules without their own __setattr__.
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as nn.Module does. Raises ArgumentError for a DTensor over ranks with other experts."""
        super().register_parameter(name, param)
        if name in self._expert_parameters and param is not None:
            self._mark_experts()
            mesh = getattr(param, "device_mesh", None)
            if mesh is not None and mesh not in self._fitting:
                for dim in range(mesh.ndim):
                    held = _gathered(self.held, mesh.get_group(dim))
                    _need_equal(name, self, "fully_shard", held)
                self._fitting.add(mesh)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _watch_wrappers()
        self._mark_experts()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_experts()
        return self

    def _mark_experts(self) -> None:
        for name in self._expert_parameters:
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter.allreduce = False  # type: ignore[attr-defined]
                parameter.rank_experts = type(self).__name__  # type: ignore[attr-defined]


def held_text(experts: list[int], total: int) -> str:
    """Return the ids ``experts`` of ``total`` as text: "experts 0..3 of 8", or "experts 0, 2 of 8"."""
    first, last = experts[0], experts[-1]
    span = f"{first}..{last}" if experts == list(range(first, last + 1)) else ", ".join(map(str, experts))
    return f"experts {span} of {total}"


def exclude_experts(model: nn.Module) -> list[nn.Parameter]:
    """Exclude the experts of a model's layers from every DistributedDataParallel around it. Call it before wrapping.

    The caller must then reduce their gradients: each is a sum over the tokens of all ranks of the EP group. Add them up
    over the ranks with the same experts, and divide by DDP's number of ranks, as DDP does with all other gradients.

    Args:
        model: contains layers of this package at any depth.

    Returns:
        The experts' parameters, for that sum or for ``ignored_params`` of ``fully_shard``.
    """
    parameters = []
    for _, layer in _layers(model):
        layer._experts_excluded = True
        parameters += [layer._parameters.get(name) for name in layer._expert_parameters]
    return [parameter for parameter in parameters if parameter is not None]


@functools.cache
def _watch_wrappers() -> None:
    register_module_module_registration_hook(_wrapping)


def _wrapping(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel) and module is not None:
        _check_ddp(parent, module)
    elif name == "_fsdp_wrapped_module" and module is not None:
        _check_fsdp1(parent, module)


def _layers(module: nn.Module) -> Iterator[tuple[str, RankExperts]]:
    for path, layer in module.named_modules():
        if isinstance(layer, RankExperts):
            yield path, layer


def _check_ddp(ddp: Any, module: nn.Module) -> None:
    """Exclude experts from a DDP under construction, before it sends anything, if they differ on all ranks."""
    known: set[int] = set()
    delayed, shared = set(map(id, ddp._delay_all_reduce_params)), []
    for path, layer in _layers(module):
        dot = f"{path}." if path else ""
        parameters = {dot + name: layer._parameters.get(name) for name in layer._expert_parameters}
        there = {name: parameter for name, parameter in parameters.items() if parameter is not None}
        buffers = [dot + name for name in layer._expert_buffers]
        known.update(map(id, there.values()))
        for name, parameter in there.items():
            rule = "is in delay_all_reduce_named_params, but differs by rank: remove it from there"
            need(id(parameter) not in delayed, name, rule)
        if layer._experts_excluded or ddp.parameters_to_ignore.issuperset(there):
            _ignore(ddp, there, buffers)
        else:
            shared.append((layer, there, buffers))
    for name, parameter in module.named_parameters():
        owner = getattr(parameter, "rank_experts", None)
        rule = "of a {} is wrapped without its layer, as by replicate(): wrap the model in DistributedDataParallel"
        need(owner is None or id(parameter) in known, name, rule, owner)
    everyone = _gathered([layer.held for layer, _, _ in shared], ddp.process_group) if shared else []
    for (layer, there, buffers), held in zip(shared, zip(*everyone, strict=True), strict=True):
        if len(set(held)) == len(held) > 1 and "" not in held:
            _ignore(ddp, there, buffers)
            for parameter in there.values():
                if parameter.requires_grad:
                    parameter.register_hook(functools.partial(_averaged, len(held)))  # type: ignore[no-untyped-call]
        else:
            _need_equal(next(iter(there)), layer, type(ddp).__name__, held)


def _averaged(ranks: int, grad: Tensor) -> Tensor:
    """Return the gradient of the mean of the ranks' losses, as DDP computes for other parameters."""
    return grad / ranks


def _ignore(ddp: Any, parameters: dict[str, nn.Parameter], buffers: list[str]) -> None:
    for name in (*parameters, *buffers):
        # Where DDP lists gradients, a parameter of the wrapped module itself is ".name".
        ddp.parameters_to_ignore.update((name, f".{name}"))
    for parameter in parameters.values():
        parameter._ddp_ignored = True  # type: ignore[attr-defined]  # read by DDP's mixed precision
    out = set(map(id, parameters.values()))
    ddp._module_parameters = [each for each in ddp._module_parameters if id(each) not in out]


def _check_fsdp1(fsdp: Any, module: nn.Module) -> None:
    """Raise ArgumentError if FullyShardedDataParallel has flattened experts that its ranks do not share."""
    if "_fsdp_wrapped_module" in module._modules:
        return  # already checked
    if isinstance(module, RankExperts):
        ignored = {id(parameter) for parameter in fsdp._ignored_params}
        parameters = [getattr(module, name, None) for name in module._expert_parameters]  # views if flattened
        if any(each is not None and id(each) not in ignored for each in parameters):
            for group in (fsdp.process_group, fsdp.__dict__.get("_inter_node_pg")):
                if group is not None:
                    name = module._expert_parameters[0]
                    _need_equal(name, module, "FullyShardedDataParallel", _gathered(module.held, group))
    for child in module.children():
        _check_fsdp1(fsdp, child)


def _gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    if group.size() == 1:
        return [mine]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group)
    return everyone


def _need_equal(name: str, layer: RankExperts, wrapper: str, held: Sequence[str]) -> None:
    others = [each for each in held if each != layer.held] or [layer.held]
    shown = [each or "unknown experts" for each in (layer.held, others[0])]
    fits = len(held) == 1 or ("" not in held and len(set(held)) == 1)
    need(fits, name, _RULE, type(layer).__name__, len(held), wrapper, *shown)
