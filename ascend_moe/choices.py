"""The words that options and arguments choose from: for help and checks without what they stand for, and its torch."""

from __future__ import annotations

# Of rows: name -> torch's own.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
QUANTS = {"none": 0, "int8": 2}  # rows of dispatch -> quant_mode
ALGORITHMS = ("auto", "window", "direct", "hierarchy")  # comm_alg of an op

# Of experts: ascend_moe.experts.activations has what they compute.
ACTIVATIONS = (
    "swiglu", "clipped_swiglu", "swiglustep", "situ", "situglu", "geglu", "geglu_tanh", "sigmoid_glu", "relu2",
    "reglu2",
)  # fmt: skip
#: Other names: vLLM's and SGLang's of gated ones.
ALIASES = {"silu": "swiglu", "swigluoai": "clipped_swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}

# ascend-moe run
BACKENDS = ("threads", "processes")
DEFAULT_TEXT = "alice.txt"

# ascend-moe bench
SKEWS = ("uniform", "zipf", "hot")
SWEEPS = ("tokens", "ranks", "hidden")

# ascend-moe validate
DEVICES = ("auto", "npu", "cpu")

# ascend-moe predict
PREDICTED = ("window", "direct", "zero-copy")

# ascend-moe trace
OPS = ("dispatch", "combine", "both")
TRACED = ("auto", *PREDICTED)
PICKS = ("fastest", "p10", "p50", "p90")

# ascend-moe explore
POLICIES = ("late", "random", "lazy", "pct", "replay", "exhaustive", "mixed")
USUAL_CASE = "w2,c2,l1,k2,b2,u2,v1,s0,bf16,none,mask:none,ids:any,unequal,DCDC"
