"""DeepEP with its own names: `Buffer`, `Config`, `EventOverlap`, `EventHandle`; `install()` is `import deep_ep`."""

from __future__ import annotations

from ascend_moe.interop.deep_ep.ascend import AscendBuffer
from ascend_moe.interop.deep_ep.buffer import Buffer
from ascend_moe.interop.deep_ep.events import EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.install import install, uninstall
from ascend_moe.interop.deep_ep.layout import Config

__all__ = ["AscendBuffer", "Buffer", "Config", "EventHandle", "EventOverlap", "install", "uninstall"]
