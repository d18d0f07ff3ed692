"""What the ranks of a timed world dispatched, as the reference takes it."""

from __future__ import annotations

from ascend_moe import reference as ref
from ascend_moe.timed.world import TimedWorld


def reference_inputs(world: TimedWorld) -> list[ref.RankInput]:
    """A world that was run with ``payload=True``."""
    return [
        ref.RankInput(
            x=world.inputs["dispatch"][rank]["x"],
            expert_ids=world.routing.ids[rank],
            scales=None,
            x_active_mask=None,
            expert_scales=world.routing.weights[rank],
        )
        for rank in range(world.request.ranks)
    ]
