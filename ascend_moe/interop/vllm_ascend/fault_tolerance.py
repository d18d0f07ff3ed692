"""vllm-ascend's all2all manager with the hooks of vLLM's fault tolerance; its own says that nothing ever fails."""

from __future__ import annotations

from typing import Any

from ascend_moe.comm import comm_name
from ascend_moe.interop.vllm.fault_tolerance import FaultTolerance


def use_fault_tolerance(communicator: Any, mc2_group: Any) -> FaultTolerance:
    """Gives an ``NPUCommunicator`` an all2all manager that sees lost ranks, as its ``all2all_manager``.

    vLLM's runners ask this manager after each step: ``support_fault_tolerance``, ``query_fault()`` and
    ``query_active_mask()``. Call it in every worker, once MC2's group is there.

    Args:
        communicator: of the EP group: ``get_ep_group().device_communicator``.
        mc2_group: whose ``device_group`` dispatch and combine run on: ``get_mc2_group()``; or a process group.

    Returns:
        The manager.

    Raises:
        ArgumentError: mc2_group is none.

    Source: vllm-ascend ``distributed/device_communicators/npu_communicator.py``.
    """
    group = getattr(mc2_group, "device_group", mc2_group)
    manager = FaultTolerance(comm_name(group), int(group.size()))
    communicator.all2all_manager = manager
    return manager
