"""Generate with vLLM: ``vllm_generate.py MODEL OPTIONS``, the options of `LLM` as JSON.

Writes to the file VNPU_TEST_RESULTS each round's tokens with the largest log-probabilities as JSON, and how many tokens
of prompts were cached.
VNPU_TEST_SERIES=A3 makes vllm-ascend's Python that of a build for that series: the two differ in one generated file.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import vllm_ascend._build_info as build  # type: ignore[import-not-found, unused-ignore]
from vllm_prompts import PROMPTS

build.__device_type__ = os.environ["VNPU_TEST_SERIES"]  # also where a worker imports this file


def steps_of(output: Any) -> list[Any]:
    part = output.outputs[0]
    logs = [{token: log.logprob for token, log in step.items()} for step in part.logprobs]
    return list(zip(part.token_ids, logs, strict=True))


def report(*words: object) -> None:
    """Print into the file of results, because processes mix their lines in stdout."""
    with open(os.environ.get("VNPU_TEST_RESULTS", os.devnull), "a") as file:
        print(*words, file=file)


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    options = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, disable_log_stats=False, **options)
    how = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=5)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for step in (5, 5, 1):  # the second time with the first's pages in the prefix cache
        if step == 1:
            llm.reset_prefix_cache()
        batches = [prompts[i : i + step] for i in range(0, len(prompts), step)]
        outputs = [output for batch in batches for output in llm.generate(batch, how, use_tqdm=False)]
        report("ROUND", json.dumps([steps_of(output) for output in outputs]))
        report("CACHED", [output.num_cached_tokens for output in outputs])
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            print("METRIC", metric.name, getattr(metric, "value", getattr(metric, "values", None)), flush=True)


if __name__ == "__main__":
    main()
