"""Small models of random weights for vLLM: their files, and how far generated tokens are from the best ones.

``vllm_models.py write FOLDER NAME`` writes one, ``vllm_models.py gaps FOLDER TOKENS`` prints the distances.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from vllm_prompts import PROMPTS

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# The head sizes of the published models.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 128, "num_experts": 16, "norm_topk_prob": True},
    "DeepseekV2": {
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def write_model(folder: Path, name: str) -> None:
    """Write a model with bf16 weights in the layout of transformers, and a tokenizer of bytes."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def gaps(folder: Path, generated: list[list[int]]) -> list[tuple[float, float]]:
    """Return of each generated token, given those before it, how far its fp32 logit is below the largest, and how far
    the last chosen expert's router logit is above the next one's, at least."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[tuple[float, float]] = []
    for prompt, tokens in zip(PROMPTS, generated, strict=True):
        with torch.no_grad():
            result = model(torch.tensor([prompt + tokens]), output_router_logits=True)
        logits = result.logits[0, len(prompt) - 1 : -1]
        below = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        routed = torch.stack(result.router_logits)[:, len(prompt) - 1 : -1].sort(-1, descending=True).values
        chosen = SIZES["num_experts_per_tok"]
        margins = (routed[..., chosen - 1] - routed[..., chosen]).amin(0)
        found += zip(below.tolist(), margins.tolist(), strict=True)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_model(Path(sys.argv[2]), sys.argv[3])
        print("written")
    else:
        print(json.dumps(gaps(Path(sys.argv[2]), json.loads(sys.argv[3]))))
