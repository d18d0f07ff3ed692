"""Template tiling keys: the instances of a template kernel, and the key of each."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .entries import Entry, Instance
from .errors import TwinBuildError

SCAN = "TWIN_TPL_SCAN"  # the define under which template_argument.h leaves calls of the names below

_DECLARED, _SELECTED, _COMBINATION, _PARAMETER = (
    f"twin_tpl{suffix}" for suffix in ("_declared", "_selected", "_combination", "")
)
_TYPES = {0: "float", 1: "half", 2: "int8_t", 3: "int32_t", 4: "uint8_t", 6: "int16_t", 7: "uint16_t"}
_TYPES |= {8: "uint32_t", 9: "int64_t", 10: "uint64_t", 11: "double", 12: "bool", 27: "bfloat16_t"}
_FOLLOWS = 100_000_000  # ASCENDC_TPL_INPUT(0): from here on a value stands for an input or output of the op
_RANGE, _LIST, _MIX = 0, 1, 2
_VECTOR_CORES = (0, 4)  # AIV_ONLY, MIX_AIV_1_0
_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class _Values:
    """One parameter of a declaration or of a combination, with its values."""

    kind: str
    name: str
    bits: int
    values: tuple[int, ...]


@dataclass
class Declaration:
    """An ASCENDC_TPL_ARGS_DECL: an op's template parameters, in order, and the combinations of its ASCENDC_TPL_SEL."""

    op: str
    parameters: list[_Values]
    combinations: list[list[_Values]] = field(default_factory=list)


def find_declarations(text: str) -> list[Declaration]:
    """Return the declarations in a source preprocessed with -D`SCAN`; ASCENDC_TPL_SEL belongs to the one before it."""
    found: list[Declaration] = []
    flat = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    for match in re.finditer(rf"\b({_DECLARED}|{_SELECTED})\s*\(", flat):
        pieces = _pieces(flat, match.end())
        if match[1] == _DECLARED:
            op, *listed = pieces
            found.append(Declaration(op.strip('" '), [_values(piece) for piece in listed]))
        elif not found:
            raise TwinBuildError("ASCENDC_TPL_SEL stands before the ASCENDC_TPL_ARGS_DECL of its parameters: move it")
        else:
            inner = (_pieces(piece, piece.index("(") + 1) for piece in pieces)
            found[-1].combinations += [[_values(piece) for piece in combination] for combination in inner]
    return found


def bound(entry: Entry, declarations: Sequence[Declaration], wanted: Collection[int] | None = None) -> Entry:
    """Return a template entry with all its instances. ``wanted``: tiling keys; others are marked refused; None: all.

    Raises:
        TwinBuildError: no declaration fits the template's parameters, or nothing, or an undeclared value, is selected.
    """
    declaration = _declaration_of(entry, declarations)
    declared = declaration.parameters
    if len(declared) != len(entry.template):
        raise TwinBuildError(
            f"the template {entry.name} has {len(entry.template)} parameters, its ASCENDC_TPL_ARGS_DECL"
            f" {len(declared)}: {', '.join(parameter.name for parameter in declared)}; they must match"
        )
    if sum(parameter.bits for parameter in declared) > 64:
        raise TwinBuildError(f"the parameters of template {entry.name} need over 64 bits: declare fewer bits")
    instances: dict[int, Instance] = {}
    # Of two that have the same key, the one that need not be deterministic.
    for combination in sorted(declaration.combinations, key=_deterministic):
        for instance in _instances(entry, declared, combination):
            left_out = wanted is not None and instance.key not in wanted and not instance.refused
            instances.setdefault(instance.key, replace(instance, refused="was not built") if left_out else instance)
    if not instances:
        raise TwinBuildError(f"the template {entry.name} has no ASCENDC_TPL_SEL: add one that lists its arguments")
    return replace(entry, symbol=f"twin_instances_{entry.name}", instances=tuple(instances.values()))


def dispatcher(entry: Entry) -> str:
    """Return the C++ function that calls the instance of a launch's tiling key, to append to the kernel's source."""
    words = ", ".join(f"uint64_t a{i}" for i in range(len(entry.parameters)))
    passed = "".join(f", a{i}" for i in range(len(entry.parameters)))
    cases = "\n".join(
        f"        case {made.key}ull: return twin::CallInstance(&{entry.name}<{_arguments(entry, made)}>{passed});"
        for made in entry.instances
        if not made.refused
    )
    return f"""
extern "C" __attribute__((visibility("default"))) void {entry.symbol}({words}) {{
    switch (twin::TilingKey()) {{
{cases}
        default: twin::Raise(twin::Finding::kBadArgument, twin::Loc::Here(), "{entry.name}: no such tiling key");
    }}
}}
"""


def _arguments(entry: Entry, instance: Instance) -> str:
    return ", ".join(
        value if kind == "typename" or kind == "auto" else f"static_cast<{kind}>({value})"
        for kind, (_, value) in zip(entry.template, instance.arguments, strict=True)
    )


def _declaration_of(entry: Entry, declarations: Sequence[Declaration]) -> Declaration:
    if len(declarations) == 1:
        return declarations[0]
    plain = entry.name.replace("_", "").lower()
    for declaration in declarations:
        if declaration.op.replace("_", "").lower() == plain:
            return declaration
    ops = ", ".join(declaration.op for declaration in declarations) or "none"
    raise TwinBuildError(f"no ASCENDC_TPL_ARGS_DECL for the template {entry.name}; there is {ops}: add it")


def _deterministic(combination: Sequence[_Values]) -> bool:
    return any(parameter.kind == "DETERMINISTIC" and 1 in parameter.values for parameter in combination)


def _instances(entry: Entry, declared: Sequence[_Values], combination: Sequence[_Values]) -> Iterator[Instance]:
    """Every instance of a combination."""
    chosen = {parameter.name: parameter for parameter in combination}
    cores = [parameter.values for parameter in combination if parameter.kind in ("CORES", "KERNEL_TYPE")]
    cube = any(not set(values) & set(_VECTOR_CORES) for values in cores)
    choices = [_chosen(entry, parameter, chosen.get(parameter.name, parameter)) for parameter in declared]
    for values in itertools.product(*choices):
        key, begin = 0, 0
        refused = "needs cube cores" if cube else ""
        for one, value in zip(declared, values, strict=True):
            key |= (one.values.index(value) if one.kind == "UINT" else value) << begin
            begin += one.bits
            if one.kind == "KERNEL_TYPE" and value not in _VECTOR_CORES:
                refused = "needs cube cores"
        texts = [_text(entry, kind, value) for kind, value in zip(entry.template, values, strict=True)]
        arguments = tuple((one.name, text) for one, text in zip(declared, texts, strict=True))
        yield Instance(key, arguments, refused)


def _chosen(entry: Entry, declared: _Values, selected: _Values) -> list[int]:
    """The values of one parameter in a combination."""
    values = [value for value in selected.values if value < _FOLLOWS]
    known = [value for value in declared.values if value < _FOLLOWS]
    where = f"{entry.name}: template parameter {declared.name}"
    if not values:
        raise TwinBuildError(f"{where} has the type of an input or output (ASCENDC_TPL_INPUT): select types by name")
    for value in values:
        if known and value not in known:
            raise TwinBuildError(f"{where}: {value} is selected; need a declared one: {', '.join(map(str, known))}")
        if declared.kind != "UINT" and value >> declared.bits:
            raise TwinBuildError(f"{where}: {value} does not fit its {declared.bits} bits: select a smaller one")
    if declared.kind == "UINT" and len(known) > 1 << declared.bits:
        raise TwinBuildError(f"{where}: {len(known)} values do not fit its {declared.bits} bits: declare more bits")
    return values


def _text(entry: Entry, kind: str, value: int) -> str:
    """Return a template argument in C++."""
    if kind != "typename":
        return str(value)
    if value not in _TYPES:
        raise TwinBuildError(f"{entry.name}: data type {value} is not supported; use {', '.join(_TYPES.values())}")
    return _TYPES[value]


# ---- what the macros leave ----


def _pieces(text: str, start: int) -> list[str]:
    """Return the non-empty arguments of a call, given the text after its opening parenthesis."""
    depth, begin = 0, start
    pieces: list[str] = []
    for at in range(start, len(text)):
        char = text[at]
        if depth == 0 and char in ",)":
            pieces.append(text[begin:at].strip())
            begin = at + 1
            if char == ")":
                return [piece for piece in pieces if piece]
        depth += (char == "(") - (char == ")")
    raise TwinBuildError(f"an ASCENDC_TPL_ macro has no closing parenthesis, add it: {text[start : start + 60]!r}")


def _values(piece: str) -> _Values:
    """One parameter: `twin_tpl(kind, "name", bits, values...)`."""
    match = re.match(rf"{_PARAMETER}\s*\(", piece)
    if match is None:
        raise TwinBuildError(f"{piece[:60]!r} is no template parameter: declare it with an ASCENDC_TPL_*_DECL")
    kind, name, bits, *written = _pieces(piece, match.end())
    values = [_number(word, name) for word in written]
    if kind == "UINT":
        values = _uint_values(values, name)
    if len(set(values)) != len(values) or not values:
        raise TwinBuildError(f"template parameter {name}: list at least one value, each once, not {', '.join(written)}")
    return _Values(kind, name.strip('" '), _number(bits, name), tuple(values))


def _uint_values(written: Sequence[int], name: str) -> list[int]:
    """The values of a UINT: a way to write them, then ranges and a list."""
    if not written or written[0] not in (_RANGE, _LIST, _MIX):
        raise TwinBuildError(f"template parameter {name}: a UINT begins with ASCENDC_TPL_UI_RANGE, _LIST or _MIX")
    way, rest = written[0], list(written[1:])
    if way == _LIST:
        return rest
    ranges = rest[0] if rest else 0
    ends, listed = rest[1 : 1 + 2 * ranges], rest[1 + 2 * ranges :]
    if len(ends) != 2 * ranges or (way == _RANGE and listed):
        raise TwinBuildError(f"template parameter {name}: {ranges} ranges have {2 * ranges} ends, not {len(rest) - 1}")
    values = [value for i in range(ranges) for value in range(ends[2 * i], ends[2 * i + 1] + 1)]
    return values + listed


def _number(text: str, name: str) -> int:
    """An integer as C++ writes it: literals, operators, true and false."""
    plain = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]+\b", r"\1", text)
    plain = re.sub(r"\btrue\b", "1", re.sub(r"\bfalse\b", "0", plain))
    try:
        return _evaluated(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        raise TwinBuildError(
            f"template parameter {name}: {text!r} is no number to the preprocessor: write digits, or a #define of them"
        ) from None


def _evaluated(node: Any) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluated(node.operand))
    raise ValueError
