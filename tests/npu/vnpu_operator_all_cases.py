"""Every case of a torch operator, by unique name."""

from __future__ import annotations

import functools

from vnpu_operator_cases import Case
from vnpu_operator_elementwise_cases import binary_cases, unary_cases
from vnpu_operator_rare_cases import rare_cases
from vnpu_operator_shape_cases import integer_cases, made_cases, shape_cases


@functools.cache
def cases() -> list[Case]:
    parts = (unary_cases, binary_cases, shape_cases, made_cases, integer_cases, rare_cases)
    found = [case for part in parts for case in part()]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return found
