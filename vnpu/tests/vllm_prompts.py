"""The prompts of the tests with vLLM, as token ids."""

from __future__ import annotations

# Two with a page of tokens in common, and short ones.
_PAGE = [(7 * i) % 509 + 2 for i in range(128)]
PROMPTS = [[5, 7, 9, 11, 13], [*_PAGE, 3, 4, 5], [100, 200, 300], [*_PAGE, 450], [42] * 17]
