"""Small models of random weights for vLLM: their files, and how far its log-probabilities are from transformers'.

``vllm_models.py write FOLDER NAME`` writes one, ``vllm_models.py compare FOLDER RESULTS`` prints the distances.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from vllm_prompts import PROMPTS

EXPERTS, GROUPS = 16, 4
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
LATENT: dict[str, Any] = {  # the head sizes of the published models, as those of Qwen3-MoE below
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 128, "num_experts": EXPERTS, "norm_topk_prob": True},
    "DeepseekV2": {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "DeepseekV3": {
        **LATENT,
        "q_lora_rank": 256,
        "n_shared_experts": 1,
        "n_group": GROUPS,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def choose_experts(weights: dict[str, torch.Tensor]) -> None:
    """Let every token choose experts by wide margins, so that rounding chooses the same ones.

    Some elements of the residual stream come from the embedding alone, 1 for the experts of a token and -1 for the
    others, in each layer another part of them. The routers see them enlarged.
    """
    embedding = weights["model.embed_tokens.weight"].normal_()
    routers = sorted(name for name in weights if name.endswith("gate.weight"))
    for layer, name in enumerate(routers):
        part = slice(EXPERTS * layer, EXPERTS * (layer + 1))
        groups, members = (torch.rand(len(embedding), *rest, GROUPS).argsort(-1) < 2 for rest in ((), (GROUPS,)))
        embedding[:, part] = (groups[..., None] & members).flatten(1) * 2.0 - 1
        weights[name].normal_(std=0.005)[:, part] = 2 * torch.eye(EXPERTS)
    weights["lm_head.weight"].normal_(std=0.03)
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight[..., : EXPERTS * len(routers), :] = 0


def add_draft(weights: dict[str, torch.Tensor], layer: int) -> None:
    """Make a layer that of a multi-token predictor, and the model one whose tokens it often predicts."""
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    head[(torch.arange(len(head)) * 5 + 3) % len(head)] += 0.01 * embedding
    size, name = embedding.shape[1], f"model.layers.{layer}."
    joint = torch.randn(size, size) * 0.01
    joint[: EXPERTS * (layer + 1)] = 0
    weights[name + "eh_proj.weight"] = torch.cat((torch.eye(size), joint), 1)
    weights.update(
        {name + part: torch.ones(size) for part in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    )
    weights[name + "embed_tokens.weight"] = embedding.clone()
    weights[name + "shared_head.head.weight"] = head.clone()


def reference_of(folder: Path) -> Any:
    """Return the fp32 model that a folder's model stands for."""
    reference = folder / "reference" if (folder / "reference").is_dir() else folder
    model = transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    for module in model.modules():
        if model.config.model_type == "deepseek_v2" and hasattr(module, "scaling"):  # published, not in transformers
            module.scaling *= (0.1 * LATENT["rope_parameters"]["mscale_all_dim"] * math.log(40) + 1) ** 2
    return model


def quantize(folder: Path) -> None:
    """Make a model W8A8 as ModelSlim does: attention with constant scales of its inputs, MLPs with one per token.

    The folder ``reference`` gets the model with the values that the codes stand for.
    """
    weights = load_file(folder / "model.safetensors")
    stored, kinds, values = dict(weights), dict.fromkeys(weights, "FLOAT"), dict(weights)
    products = [name for name in weights if re.search(r"\.(self_attn|mlp)\..*(_proj|_mqa)\.weight$", name)]
    products = [name for name in products if "kv_b_proj" not in name]  # MLA takes it apart
    static = [name for name in products if "self_attn" in name]
    for name in products:
        scale = (weights[name].float().abs().amax(1, keepdim=True) / 127).bfloat16().float()  # as vLLM keeps it
        stored[name] = (weights[name].float() / scale).round().clamp(-127, 127).to(torch.int8)
        values[name] = stored[name] * scale
        stored |= {name + "_scale": scale, name + "_offset": torch.zeros_like(scale)}
    (folder / "reference").mkdir()
    (folder / "reference" / "config.json").write_text((folder / "config.json").read_text())
    save_file(values, folder / "reference" / "model.safetensors", {"format": "pt"})
    model = reference_of(folder)
    for name in static:
        ranges: list[float] = []
        module = model.get_submodule(name.removesuffix(".weight"))
        module.register_forward_pre_hook(lambda _, inputs, ranges=ranges: ranges.extend(inputs[0].aminmax()))
        with torch.no_grad():
            for prompt in PROMPTS:
                model(torch.tensor([prompt]))
        scale = ((max(ranges) - min(ranges)) / 255).bfloat16().float()
        offset = (-128 - min(ranges) / scale).round().to(torch.int8)
        module = name.removesuffix("weight")
        stored |= {module + "input_scale": scale.reshape(1), module + "input_offset": offset.reshape(1)}
        stored[module + "deq_scale"] = (scale * stored.pop(name + "_scale")).flatten()
        stored[module + "quant_bias"] = -stored[name].sum(1, dtype=torch.int32) * offset
        del stored[name + "_offset"]
    for name in stored:
        if kinds.get(name) is None or stored[name].dtype == torch.int8:
            kinds[name] = "W8A8" if "self_attn" in name else "W8A8_DYNAMIC"
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    description = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0, **kinds}
    (folder / "quant_model_description.json").write_text(json.dumps(description, indent=2))


def write_model(folder: Path, name: str) -> None:
    """Write a model with bf16 weights in the layout of transformers, and a tokenizer of bytes.

    A name with W8A8 is that of a model as ModelSlim quantizes it; the folder ``reference`` has what it stands for.
    """
    torch.manual_seed(0)
    kind = name.removesuffix("W8A8")
    given = {**SIZES, **MODELS[kind]}
    drafts, layers = given.pop("num_nextn_predict_layers", 0), given["num_hidden_layers"]
    config = getattr(transformers, f"{kind}Config")(**{**given, "num_hidden_layers": layers + drafts})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        choose_experts(model.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if drafts:
        add_draft(weights, layers)
        config.update({"num_hidden_layers": layers, "num_nextn_predict_layers": drafts})
        config.save_pretrained(folder)
        save_file(
            {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    if kind != name:
        quantize(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def compare(folder: Path, rounds: list[list[list[Any]]]) -> list[tuple[float, float]]:
    """Return of each token generated in rounds of all prompts, given those before it, the largest distance of a
    log-probability from that of the fp32 model, and how far the last chosen expert's router logit is above the next
    one's, at least."""
    model = reference_of(folder)
    margins: list[torch.Tensor] = []

    def measure(weight: torch.Tensor, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        logits = (inputs[0].reshape(-1, inputs[0].shape[-1]) @ weight.T).sort(-1, descending=True).values
        margins.append(logits[:, SIZES["num_experts_per_tok"] - 1] - logits[:, SIZES["num_experts_per_tok"]])

    for module in model.modules():
        if hasattr(module, "experts"):
            module.register_forward_pre_hook(functools.partial(measure, module.gate.weight))
    found: list[tuple[float, float]] = []
    for prompt, steps in zip(PROMPTS * len(rounds), itertools.chain(*rounds), strict=True):
        margins.clear()
        tokens = [token for token, _ in steps]
        with torch.no_grad():
            result = model(torch.tensor([prompt + tokens]))
        want = result.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        least = min(float(margin.min()) for margin in margins)
        for row, (_, logs) in zip(want, steps, strict=True):
            found.append((max(abs(float(row[int(token)]) - log) for token, log in logs.items()), least))
    return found


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_model(Path(sys.argv[2]), sys.argv[3])
        print("written")
    else:
        lines = Path(sys.argv[3]).read_text().splitlines()
        rounds = [json.loads(line.removeprefix("ROUND ")) for line in lines if line.startswith("ROUND ")]
        print(json.dumps(compare(Path(sys.argv[2]), rounds)))
