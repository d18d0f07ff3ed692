"""The options of a dispatch and of its combine: the one record that everything that describes a call is made of."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ascend_moe.errors import need

# Of rows: name -> torch's own.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
QUANTS = {"none": 0, "int8": 2}  # rows of dispatch -> quant_mode
ALGORITHMS = ("auto", "window", "direct", "hierarchy")  # comm_alg


class SpecialExperts(NamedTuple):
    """Numbers of experts to which no row travels; their ids follow the routed ones in this order.

    A zero expert adds nothing, a copy expert its input, a const expert a mix of its input and a row of its own.
    """

    zero_expert_num: int = 0
    copy_expert_num: int = 0
    const_expert_num: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    @property
    def given(self) -> dict[str, Any]:
        """Numbers that are not 0, as keyword arguments of the operators."""
        return {name: number for name, number in self._asdict().items() if number}

    @property
    def need_rows(self) -> bool:
        """Whether combine needs the rows that were dispatched."""
        return self.copy_expert_num + self.const_expert_num > 0

    def kind(self, expert: int, experts: int) -> tuple[str, int]:
        """Return "zero", "copy" or "const", and which of these, for an id ``expert`` of experts..experts+total-1."""
        place = expert - experts
        for name, number in zip(("zero", "copy"), self, strict=False):
            if place < number:
                return name, place
            place -= number
        return "const", place

    def check(self) -> SpecialExperts:
        """Return itself; raise ArgumentError unless all are whole numbers from 0 on."""
        for name, number in self._asdict().items():
            need(type(number) is int and number >= 0, name, "is {!r}; need a whole number of at least 0", number)
        return self


@dataclass(frozen=True, kw_only=True)
class WithSpecialExperts:
    """The fields of `SpecialExperts` in a record that has others too."""

    zero_expert_num: int = field(default=0, metadata={"help": "Experts that add nothing; K counts them too."})
    copy_expert_num: int = field(default=0, metadata={"help": "Experts that give back their input."})
    const_expert_num: int = field(default=0, metadata={"help": "Experts that mix it with a row of their own."})

    @property
    def special(self) -> SpecialExperts:
        """The experts to which no row travels."""
        return SpecialExperts(self.zero_expert_num, self.copy_expert_num, self.const_expert_num)


@dataclass(frozen=True, kw_only=True)
class CallOptions(WithSpecialExperts):
    """Options of a dispatch and its combine, by the operators' names and with their defaults.

    A record that describes calls inherits from this one; `dataclasses.replace` copies it. A field is a keyword argument
    of the operators that have it. With "help" in its metadata it is an option of ``ascend-moe plan``, too; "choices"
    are its values.

    Attributes:
        comm_alg: how rows travel; "": ASCEND_MOE_COMM_ALG, without it "auto".
        quant_mode: 2: dispatch's rows travel as int8 with one scale a row.
        comm_quant_mode: 2: combine's bfloat16 or float16 rows travel as int8, a scale for each 8 elements; without
            gradients.
        global_bs: W * the largest batch of a rank; 0: all ranks have the same.
        expert_token_nums_type: of dispatch's expert_token_nums: 0 running sums, 1 counts.
        tp_world_size: 0 or 1, without effect.
    """

    comm_alg: str = ""
    quant_mode: int = field(default=0, metadata={"choices": (0, 2)})
    comm_quant_mode: int = field(default=0, metadata={"choices": (0, 2), "help": "2: rows come back as int8."})
    global_bs: int = 0
    expert_token_nums_type: int = field(default=1, metadata={"choices": (0, 1)})
    tp_world_size: int = field(default=0, metadata={"choices": (0, 1)})

    @property
    def options(self) -> dict[str, Any]:
        """Options that differ from the operators' defaults, as their keyword arguments."""
        return {name: value for name, default in DEFAULTS.items() if (value := getattr(self, name)) != default}

    @property
    def returns_int8(self) -> bool:
        """Whether combine's rows come back as int8, out of other memory than they were written to."""
        return self.comm_quant_mode != 0

    def check_zero_copy(self, contract: str) -> None:
        """Raise ArgumentError unless combine may send from a window tensor with these options."""
        rule = "goes with contract 'v2' and comm_alg '', 'auto' or 'direct'; these are {!r} and {!r}"
        may_be_direct = contract == "v2" and self.comm_alg in ("", "auto", "direct")
        need(may_be_direct, "zero_copy", rule, contract, self.comm_alg)
        rule = "does not go with comm_quant_mode 2: rows become int8 in other memory than the window tensor"
        need(not self.returns_int8, "zero_copy", rule)

    def check(self) -> None:
        """Raise ArgumentError unless each option is one of its values, whatever the others are."""
        self.special.check()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            need(value in choices, name, "is {}; need {}", value, " or ".join(map(str, choices)))


#: By name: the operators' own.
DEFAULTS: dict[str, Any] = {option.name: option.default for option in fields(CallOptions)}
_CHOICES: dict[str, tuple[Any, ...]] = {
    option.name: option.metadata["choices"] for option in fields(CallOptions) if "choices" in option.metadata
}
