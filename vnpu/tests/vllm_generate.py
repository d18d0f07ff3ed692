"""Generate with vLLM: ``vllm_generate.py MODEL OPTIONS``, the options of `LLM` as JSON; prints the tokens as JSON.

VNPU_TEST_SERIES=A3 makes vllm-ascend's Python that of a build for that series: the two differ in one generated file.
"""

from __future__ import annotations

import json
import os
import sys

import vllm_ascend._build_info as build  # type: ignore[import-not-found, unused-ignore]
from vllm_prompts import PROMPTS

build.__device_type__ = os.environ["VNPU_TEST_SERIES"]  # also where a worker imports this file


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(sys.argv[1], skip_tokenizer_init=True, **json.loads(sys.argv[2]))
    how = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for step in (5, 5, 1):  # the second time with the first's pages in the prefix cache
        if step == 1:
            llm.reset_prefix_cache()
        batches = [prompts[i : i + step] for i in range(0, len(prompts), step)]
        outputs = [output for batch in batches for output in llm.generate(batch, how, use_tqdm=False)]
        print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
