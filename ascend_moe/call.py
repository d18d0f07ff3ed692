"""The options of a dispatch and its combine: the record that every description of a call inherits from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ascend_moe.errors import need, unknown_name

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # of rows: short name -> torch's name
QUANTS = {"none": 0, "int8": 2}  # quant_mode of dispatch's rows
ALGORITHMS = ("auto", "window", "direct", "hierarchy")  # comm_alg

MOST_SPECIAL = 1024  # experts of each special kind


class SpecialExperts(NamedTuple):
    """Numbers of experts that receive no rows. Their ids follow the routed experts' in this order.

    A zero expert adds nothing, a copy expert adds its input, a const expert a mix of its input and a constant row.
    """

    zero_expert_num: int = 0
    copy_expert_num: int = 0
    const_expert_num: int = 0

    @property
    def total(self) -> int:
        """The number of special experts."""
        return sum(self)

    @property
    def given(self) -> dict[str, Any]:
        """The numbers that are not 0, as keyword arguments of the operators."""
        return {name: number for name, number in self._asdict().items() if number}

    @property
    def need_rows(self) -> bool:
        """Whether combine needs the rows passed to dispatch (ori_x): for copy and const experts."""
        return self.copy_expert_num + self.const_expert_num > 0

    def kind(self, expert: int, experts: int) -> tuple[str, int]:
        """Return the kind ("zero", "copy" or "const") of a special expert, and its index among those of that kind.

        ``expert``: its id, E or more. ``experts``: E, the number of routed experts.
        """
        place = expert - experts
        for name, number in zip(("zero", "copy"), self, strict=False):
            if place < number:
                return name, place
            place -= number
        return "const", place

    def check(self) -> SpecialExperts:
        """Raise ArgumentError unless all numbers are integers of 0 to 1024; return self."""
        for name, number in self._asdict().items():
            fits = type(number) is int and 0 <= number <= MOST_SPECIAL
            need(fits, name, "is {!r}; need a whole number of 0 to {}", number, MOST_SPECIAL)
        return self


@dataclass(frozen=True, kw_only=True)
class WithSpecialExperts:
    """The fields of `SpecialExperts`, for records that have other fields too."""

    zero_expert_num: int = field(default=0, metadata={"help": "Experts that add nothing; K counts them too."})
    copy_expert_num: int = field(default=0, metadata={"help": "Experts that return their input."})
    const_expert_num: int = field(default=0, metadata={"help": "Experts that mix their input with a constant row."})

    @property
    def special(self) -> SpecialExperts:
        """The numbers of special experts as `SpecialExperts`."""
        return SpecialExperts(self.zero_expert_num, self.copy_expert_num, self.const_expert_num)


@dataclass(frozen=True, kw_only=True)
class CallOptions(WithSpecialExperts):
    """Options of a dispatch and its combine, with the operators' names and defaults.

    Records of calls inherit from this class and are copied with `dataclasses.replace`. A field is a keyword argument of
    the operators. Metadata: "help" makes it an option of ``ascend-moe plan``; "choices" are its values.

    Attributes:
        comm_alg: the algorithm; "": the value of ASCEND_MOE_COMM_ALG, or "auto" if it is not set.
        quant_mode: 2: dispatch sends int8 rows with one scale per row.
        comm_quant_mode: 2: combine sends bfloat16 or float16 rows as int8 with a scale per 8 elements; no gradients.
        global_bs: W * the largest batch of a rank; 0: all ranks have the same batch size.
        expert_token_nums_type: of dispatch's expert_token_nums: 0 running sums, 1 counts.
        tp_world_size: 0 or 1, the size of dispatch's tp_recv_counts; no other effect.
    """

    comm_alg: str = ""
    quant_mode: int = field(default=0, metadata={"choices": (0, 2)})
    comm_quant_mode: int = field(default=0, metadata={"choices": (0, 2), "help": "2: rows come back as int8."})
    global_bs: int = 0
    expert_token_nums_type: int = field(default=1, metadata={"choices": (0, 1)})
    tp_world_size: int = field(default=0, metadata={"choices": (0, 1)})

    @classmethod
    def given_to(cls, taker: type, given: Mapping[str, Any]) -> CallOptions:
        """Return the options ``given`` to the constructor of ``taker``; TypeError with the nearest name for others."""
        if unknown := unknown_name(taker.__name__, [*inspect.signature(taker).parameters, *DEFAULTS], given):
            raise unknown
        return cls(**given)

    @property
    def options(self) -> dict[str, Any]:
        """Options that differ from the operators' defaults, as keyword arguments."""
        return {name: value for name, default in DEFAULTS.items() if (value := getattr(self, name)) != default}

    @property
    def returns_int8(self) -> bool:
        """Whether combine sends int8 rows, which it stores in a separate buffer."""
        return self.comm_quant_mode != 0

    def check_zero_copy(self, contract: str) -> None:
        """Raise ArgumentError unless combine of ``contract`` "v1" or "v2" can send from tensors of ``window_empty``."""
        rule = "needs contract 'v2' and comm_alg '', 'auto' or 'direct'; these are {!r} and {!r}"
        may_be_direct = contract == "v2" and self.comm_alg in ("", "auto", "direct")
        need(may_be_direct, "zero_copy", rule, contract, self.comm_alg)
        rule = "does not work with comm_quant_mode 2, which sends from a buffer of int8 rows; use comm_quant_mode 0"
        need(not self.returns_int8, "zero_copy", rule)

    def check(self) -> None:
        """Raise ArgumentError unless each option, taken alone, has a valid value."""
        self.special.check()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            need(value in choices, name, "is {}; need {}", value, " or ".join(map(str, choices)))


def need_exact_rows(given: Mapping[str, Any]) -> None:
    """Raise ArgumentError if ``given``, combine's arguments, have comm_quant_mode 2, which excludes gradients."""
    rule = "is 2, whose rounded rows and weights have no gradient: use 0, or torch.no_grad()"
    need(given["comm_quant_mode"] != 2, "comm_quant_mode", rule)


#: The operators' defaults by name.
DEFAULTS: dict[str, Any] = {option.name: option.default for option in fields(CallOptions)}
_CHOICES: dict[str, tuple[Any, ...]] = {
    option.name: option.metadata["choices"] for option in fields(CallOptions) if "choices" in option.metadata
}
