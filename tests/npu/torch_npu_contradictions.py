"""Where torch_npu 2.13.0 contradicts itself: its Meta kernels, its C++ and its documents.

Letters as in the project's notes on torch_npu; letters from p on were found by the matrix of these tests.
Both its Meta kernels and its C++ are run.
"""

from __future__ import annotations

from torch_npu_cases import BF16, FP16, INT32, INT64, Case, T, combine, dispatch

CONTRADICTIONS = {
    "a": "dispatch, v1 and v2: Meta gives expand_scales (0,) without expert_scales, C++ (A,)",
    "b": "combine v1: the Meta kernel lacks shared_expert_x, which the schema has",
    "c": "combine, v1 and v2: Meta keeps int32, C++ returns bfloat16 (v1 with out_dtype: float16)",
    "d": "dispatch v2 with scales and quant_mode 0: Meta gives dynamic_scales (A, H), C++ (A,)",
    "e": "dispatch v2 with expert_shard_type 1: Meta gives no rows and one expert, C++ the usual",
    "f": "dispatch v2 with expert_scales: Meta asks the device for its SoC",
    "g": "dispatch v1: Meta takes a rank outside of the group",
    "h": "the split operators (setup, teardown) are in op-plugin and its documents, not in the wheel",
    "i": "dispatch: documents say dynamic_scales and expand_scales may be None, code returns tensors",
    "j": "dispatch v1 on a shared rank: documents A = BS*shared/ranks, code BS*W // ranks",
    "k": "dispatch v2: documents assist_info A*128, code max(BS*K, A*128)",
    "l": "ep_recv_counts: documents lengthen it on A2 always, code with expert_scales, from 8 ranks",
    "m": "dispatch v2: documents lack y_dtype, x_dtype, scales_dtype",
    "n": "npu_grouped_matmul: the default group_type None is refused by the Meta kernel",
    "o": "op-plugin's yaml says dequant_dtype=0 and npu_swiglu(self), the wheel 6 and input",
    "p": "npu_grouped_matmul, split_item 0, one x, a group list: one output an x by Meta, one a group by C++",
    "q": "npu_moe_gating_top_k_softmax_v2 of 3-D x: Meta gives a 2-D softmax, C++ one of x's shape",
    "r": "npu_moe_init_routing_v2 with scale and quant_mode -1: the Meta kernel prints x_dtype",
    "s": "npu_grouped_matmul.List: the schema's ScalarType output_dtype is refused by the Meta kernel",
    "t": "npu_moe_init_routing_v2 without expert_tokens_num_flag: expert tokens are () by Meta, (E,) by C++",
    "u": "npu_moe_init_routing_v2 with quant_mode 0: Meta gives expanded_scale (), C++ one a row",
    "v": "npu_moe_init_routing_v2 without active_expert_range: C++ keeps expert_num of its first call",
    "w": "npu_dequant_swiglu_quant: Meta halves activate_dim, C++ the last dimension",
}

_SHARED = T((6, 64), BF16)

# Calls that show them.
PROBES: dict[str, Case] = {
    "a": dispatch(),
    "a_v2": dispatch("_v2"),
    "b": combine(shared_expert_x=_SHARED),
    "b_v2": combine("_v2", shared_expert_x=_SHARED),
    "c": combine(dtype=INT32),
    "c_fp16": combine(dtype=INT32, out_dtype=1),
    "c_v2": combine("_v2", dtype=INT32),
    "d": dispatch("_v2", scales=T((16, 64))),
    "e": dispatch("_v2", experts=24, expert_shard_type=1),
    "f": dispatch("_v2", expert_scales=T((6, 4))),
    "g": dispatch(world=16, rank=99),
    "g_v2": dispatch("_v2", world=16, rank=99),
    "j": dispatch(experts=24, shared_expert_rank_num=2),
    "k": dispatch("_v2", experts=7),
    "l": dispatch(world=8),
    "l_scales": dispatch(world=8, expert_scales=T((6, 4))),
    "l_four": dispatch(world=4, expert_scales=T((6, 4))),
    "n": Case("npu_grouped_matmul", ([T((4, 8))], [T((8, 10))])),
    "n_tensor": Case("npu_grouped_matmul", ([T((4, 8))], [T((2, 8, 10))]), {"group_list": T((2,), INT64)}),
    "n_list": Case(
        "npu_grouped_matmul.List", ([T((4, 8))], [T((8, 10))] * 2), {"group_list": [1, 4], "split_item": 3}
    ),
    "p": Case("npu_grouped_matmul.List", ([T((4, 8))], [T((8, 10))] * 2), {"group_list": [1, 4]}),
    "p_tensor": Case(
        "npu_grouped_matmul", ([T((4, 8))], [T((2, 8, 10))]), {"group_list": T((2,), INT64), "group_type": 0}
    ),
    "q": Case("npu_moe_gating_top_k_softmax_v2", (T((2, 3, 16), FP16),), {"output_softmax": True}),
    "r": Case("npu_moe_init_routing_v2", (T((7, 8)), T((7, 2), INT32)), {"scale": T((7,)), "expert_num": 4}),
    "t": Case("npu_moe_init_routing_v2", (T((7, 8)), T((7, 2), INT32)), {"expert_num": 4}),
    "u": Case(
        "npu_moe_init_routing_v2",
        (T((7, 8)), T((7, 2), INT32)),
        {"active_expert_range": [0, 4], "quant_mode": 0, "scale": T((1,)), "offset": T((1,))},
    ),
    "w": Case("npu_dequant_swiglu_quant", (T((4, 6)),), {"activate_dim": 0}),
    "s": Case(
        "npu_grouped_matmul.List",
        ([T((4, 8), FP16)], [T((8, 10), FP16)] * 2),
        {"group_list": [1, 4], "split_item": 3, "output_dtype": "bfloat16"},
    ),
}
