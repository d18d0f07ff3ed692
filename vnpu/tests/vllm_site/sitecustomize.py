"""Lets PyPI's torchvision, which is built for CUDA, be imported beside a torch for CPUs.

Its operators are missing then, and it defines their shapes all the same. Python imports this file at the start of every
process whose path has this folder.
"""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Define the operators when torchvision is imported; find nothing."""
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None and not importlib.metadata.version(name).endswith("+cpu"):
            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"{name}::{operator}", schema)


sys.meta_path.insert(0, _BeforeTorchvision())
