"""DeepEP with its own names: `Buffer`, `Config`, `EventOverlap`, `EventHandle`; `install()` is `import deep_ep`."""

from __future__ import annotations

from ascend_moe.interop.deep_ep.buffer import Buffer
from ascend_moe.interop.deep_ep.events import EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.layout import Config

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
