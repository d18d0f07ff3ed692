"""Keeps collective ops in the order of the program under torch.compile's default backend, inductor."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch._higher_order_ops.effects import _EffectType
from torch.utils._pytree import tree_map


def keep_order(op: Any) -> None:
    """Gives inductor a lowering of an ordered op that depends on the ordered op before it.

    Inductor's own (seen in torch 2.13, pytorch/pytorch#189209) notes that order under the name of the op's
    buffer, while its scheduler looks for the name of the operation: two ops that share no tensor may be
    swapped, and on another rank, with other sizes, not. Does nothing where inductor is not in use.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    lowerings = getattr(lowering, "lowerings", None)  # None while it is being imported
    if lowerings is not None and op not in lowerings:
        lowerings[op] = functools.partial(_lower, op)


def _lower(op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    before = graph.effectful_ops.get(_EffectType.ORDERED)
    first = len(graph.operations)
    made = ir.FallbackKernel.create(op, *args, **kwargs)
    if before is not None and hasattr(graph, "additional_star_deps"):
        name = graph.operations[first].get_operation_name()
        graph.additional_star_deps[name].add(before.get_name())
    return tree_map(lambda node: node.wrap_for_lowering() if isinstance(node, ir.IRNode) else node, made)
