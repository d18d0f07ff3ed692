"""Three ways to carry MoE rows between EP ranks, with one interface and the same results bit for bit.

* ``WindowDispatcher``: our dispatch and combine ops, over communication windows.
* ``AllToAllDispatcher``: ``torch.distributed`` all-to-all; reaches any ranks a backend reaches.
* ``AllGatherDispatcher``: ``torch.distributed`` all-gather; W times the traffic, no uneven splits.
"""

from ascend_moe.dispatchers.base import Dispatched, Dispatcher
from ascend_moe.dispatchers.collective import AllGatherDispatcher, AllToAllDispatcher
from ascend_moe.dispatchers.window import WindowDispatcher

__all__ = ["AllGatherDispatcher", "AllToAllDispatcher", "Dispatched", "Dispatcher", "WindowDispatcher"]
