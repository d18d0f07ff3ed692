"""Stands in for torch_npu where its wheel is not installed: CPU tensors under an NPU's names, no CANN, no device.

`torch_npu` is the module itself with ``install`` and ``uninstall``, `npu` and `profiler` are what it shows under those
names, `launch` starts a command whose processes have it from their first line on (``ascend-moe standin``, by
``site/sitecustomize.py``). docs/vnpu.md says when to take it and when the virtual NPU, which runs the real wheel.
"""
