"""`ascend_moe.compare` around vllm-ascend's own fused MoE module: ``vllm_compare.py MODEL OPTIONS``.

Writes as vllm_generate.py does to the file VNPU_TEST_RESULTS what every rank finds of each planted fault, as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from vllm_generate import report
from vllm_prompts import PROMPTS

FAULTS = ("right", "weight", "id", "scale", "order")


def chosen(layer: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, **_: Any) -> Any:
    """Return weights and ids of this rank's tokens, as vllm-ascend's operators choose them."""
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX  # type: ignore[import-not-found, unused-ignore]
    from vllm_ascend.ops.fused_moe.experts_selector import (  # type: ignore[import-not-found, unused-ignore]
        select_experts,
    )

    mine = _EXTRA_CTX.moe_comm_method.prepare(hidden_states=hidden_states, router_logits=router_logits)
    x, logits = mine.hidden_states, mine.router_logits
    weights, ids = select_experts(x, logits, layer.top_k, False, layer.renormalize)
    return weights.to(x.dtype), ids


def changed(right: Any, fault: str, *args: Any, **more: Any) -> Any:
    """Return the results of a step of vllm-ascend with a fault."""
    first, second = right(*args, **more)
    if fault == "id":
        second[0, 1] = (second[0, 1] + 1) % 16
    elif fault == "scale":
        first[0, 2] *= 2
    else:
        first[:2] = first[:2].flip(0)
    return first, second


class Worker:
    """What a worker does beside its own methods."""

    def plant(self: Any, fault: str) -> None:
        from vllm_ascend.ops.fused_moe import (  # type: ignore[import-not-found, unused-ignore]
            fused_moe,
            moe_comm_method,
        )

        import ascend_moe

        kind = getattr(fused_moe, "AscendFusedMoE", None) or fused_moe.AscendMoERunner  # in 0.26, around the experts
        layer = next(one for one in self.model_runner.model.modules() if isinstance(one, kind))
        weight, self.planted = getattr(layer, "routed_experts", layer).w2_weight.data, ExitStack()
        given = {"w2_weight": weight.clone()}
        comparison = ascend_moe.compare(layer, given, route=partial(chosen, layer), raises=False)
        self.comparison = self.planted.enter_context(comparison)
        if self.rank != 1 or fault == "right":
            return
        if fault == "weight":
            self.planted.callback(weight.copy_, given["w2_weight"])
            weight[1, 7, 9] += 1
            return
        owner, name = (
            (moe_comm_method.MoECommMethod, "_apply_mlp") if fault == "order" else (fused_moe, "select_experts")
        )
        right = getattr(owner, name)
        self.planted.enter_context(
            patch.object(owner, name, lambda *args, **more: changed(right, fault, *args, **more))
        )

    def found(self: Any) -> list[Any]:
        self.planted.close()
        found, names = self.comparison.found, ("stage", "rank", "token", "expert", "element")
        return [self.comparison.steps, found and {name: getattr(found, name) for name in names}]


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(
        sys.argv[1], skip_tokenizer_init=True, worker_extension_cls="vllm_compare.Worker", **json.loads(sys.argv[2])
    )
    for fault in FAULTS:
        llm.collective_rpc("plant", args=(fault,))
        how = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": PROMPTS[2]}], how, use_tqdm=False)
        report(fault, json.dumps(llm.collective_rpc("found")))


if __name__ == "__main__":
    main()
