"""CANN's Python module `acl`, as far as vllm-ascend imports it: only on the path of the virtual NPU's commands."""

from . import rt as rt
