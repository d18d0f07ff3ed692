"""The prompts of the tests with vLLM, as token ids."""

from __future__ import annotations

# Two with two pages of tokens in common, and short ones.
_PAGES = [(7 * i) % 509 + 2 for i in range(256)]
PROMPTS = [[5, 7, 9, 11, 13], [*_PAGES, 3, 4, 5], [100, 200, 300], [*_PAGES, 450], [42] * 17]
