"""The kernel entries of a preprocessed source: names and parameters of `__global__` functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import TwinBuildError

MARK = "__twin_entry__"  # replaces the qualifier __global__ when a source is scanned

# C++ type -> its letter in a mangled name.
_INTEGERS = {"bool": "b", "char": "c", "int8_t": "a", "uint8_t": "h", "int16_t": "s", "uint16_t": "t"}
_INTEGERS |= {"int": "i", "int32_t": "i", "unsigned": "j", "unsigned int": "j", "uint32_t": "j"}
_INTEGERS |= {"int64_t": "l", "uint64_t": "m", "size_t": "m"}


@dataclass(frozen=True)
class Parameter:
    """One parameter. ``kind``: "pointer", "integer" or, unsupported, "other"; ``mangled``: its part of a C++ symbol."""

    name: str
    kind: str
    mangled: str = ""


@dataclass(frozen=True)
class Instance:
    """An instance of a template kernel: its tiling key, and each template argument with its name.

    ``refused``: the reason why the emulator does not run it, or empty.
    """

    key: int
    arguments: tuple[tuple[str, str], ...]
    refused: str = ""

    def __str__(self) -> str:
        listed = ", ".join(f"{name}={value}" for name, value in self.arguments)
        return f"{self.key} ({listed}){' ' + self.refused if self.refused else ''}"


@dataclass(frozen=True)
class Entry:
    """A kernel: its name, the symbol to look up in the library ("" or "?": none), its parameters, tiling included.

    ``template``: kinds of a template's parameters, "typename" or the type of a value; ``instances``: one for
    each tiling key. Both are empty for a plain function.
    """

    name: str
    symbol: str
    parameters: tuple[Parameter, ...]
    template: tuple[str, ...] = ()
    instances: tuple[Instance, ...] = ()


def find_entries(preprocessed: str) -> list[Entry]:
    """Return the kernels, templates included, defined in a source preprocessed with `__global__` replaced by `MARK`."""
    text = _without_attributes(re.sub(r"^#.*$", "", preprocessed, flags=re.MULTILINE))
    entries: dict[str, Entry] = {}
    for match in re.finditer(rf"\b{MARK}\b", text):
        head, close = _signature(text, match.end())
        if not text[close:].lstrip().startswith("{"):
            continue  # a declaration
        name_match = re.search(r"([A-Za-z_]\w*)\s*$", head.partition("(")[0])
        if name_match is None:
            raise TwinBuildError(f"__global__ without a function name: {head.strip()[:80]!r}; name it")
        name = name_match.group(1)
        if name == MARK:
            continue
        parameters = tuple(_parameters(head.partition("(")[2]))
        template = _template_parameters(text, match.start())
        symbol = "" if template else name if _is_c(text, match.start()) else _mangle(name, parameters)
        entries[name] = Entry(name, symbol, parameters, template)
    return list(entries.values())


def _behind(text: str, start: int, brackets: str = "()") -> int:
    """The position behind the bracket that closes the first one from ``start`` on; 0: none does."""
    depth = 0
    for bracket in re.compile(rf"[{re.escape(brackets)}]").finditer(text, start):
        depth += 1 if bracket[0] == brackets[0] else -1
        if depth <= 0:
            return bracket.end()
    return 0


def _without_attributes(text: str) -> str:
    """Remove `__attribute__((...))`."""
    kept, at = [], 0
    for match in re.finditer(r"\b__attribute__\s*(?=\()", text):
        if match.start() >= at:
            kept.append(text[at : match.start()])
            at = _behind(text, match.end()) or len(text)
    return " ".join([*kept, text[at:]])


def _signature(text: str, start: int) -> tuple[str, int]:
    """Text up to the parameter list's closing parenthesis, and the position behind it."""
    opening = re.compile(r"[(;{]").search(text, start)
    close = _behind(text, start)
    if opening is None or opening[0] != "(" or not close:
        fix = f"remove it: {text[start : start + 60]!r}"
        raise TwinBuildError(f"__global__ before something that is no function, {fix}")
    return text[start : close - 1], close


def _template_parameters(text: str, mark: int) -> tuple[str, ...]:
    """The kinds of the parameters of the template whose function is marked; empty where it is no template."""
    tail = re.split(r"[;{}]", text[max(0, mark - 4000) : mark])[-1]
    head = re.search(r"\btemplate\s*<(.*)>", tail, flags=re.DOTALL)
    if head is None:
        return ()
    kinds, rounds, angles, begin = [], 0, 0, 0
    listed = head[1] + ","
    for at, char in enumerate(listed):
        rounds += (char == "(") - (char == ")")
        if rounds == 0:  # within parentheses they are operators
            angles += (char == "<") - (char == ">")
        if char == "," and rounds == angles == 0:
            words = listed[begin:at].partition("=")[0].split()
            begin = at + 1
            if words:
                value = " ".join(words[:-1]) if len(words) > 1 else words[0]
                kinds.append("typename" if words[0] in ("typename", "class") else value)
    return tuple(kinds)


def _is_c(text: str, mark: int) -> bool:
    """Whether `extern "C"` is in force at the mark: just before it, or around it."""
    tail = re.split(r"[;{}]", text[:mark])[-1]
    blocks = re.finditer(r'extern\s+"C"\s*\{', text[:mark])
    return bool(re.search(r'extern\s+"C"', tail)) or any(
        not _behind(text[:mark], each.start(), "{}") for each in blocks
    )


def _parameters(text: str) -> list[Parameter]:
    parts = [part.strip() for part in text.split(",") if part.strip() and part.strip() != "void"]
    return [_parameter(part, index) for index, part in enumerate(parts)]


def _parameter(text: str, index: int) -> Parameter:
    text = text.partition("=")[0].strip()
    if "*" in text:
        kind, name = text.rpartition("*")[::2]
        base = re.sub(r"\b(restrict|__restrict|__restrict__|struct)\b", " ", kind)
        const = "K" if re.search(r"\bconst\b", base) else ""
        base = " ".join(re.sub(r"\b(const|volatile)\b", " ", base).split())
        code = "v" if base == "void" else _INTEGERS.get(base, "f" if base == "float" else "")
        name = re.sub(r"\b(const|__restrict|__restrict__|restrict)\b", " ", name).strip()
        return Parameter(name or f"arg{index}", "pointer", f"P{const}{code}" if code else "")
    words = re.sub(r"\bconst\b", " ", text).split()
    for cut in (len(words) - 1, len(words)):
        base = " ".join(words[:cut])
        if base in _INTEGERS:
            name = words[cut] if cut < len(words) else f"arg{index}"
            return Parameter(name, "integer", _INTEGERS[base])
    return Parameter(words[-1] if words else f"arg{index}", "other")


def _mangle(name: str, parameters: tuple[Parameter, ...]) -> str:
    """The symbol of a C++ function of pointers and integers (Itanium ABI); empty where it is not known."""
    seen: list[str] = []  # pointers and const pointees, in the order in which they end

    def code_of(mangled: str) -> str:
        if mangled in seen:
            at = seen.index(mangled)
            return "S_" if at == 0 else f"S{at - 1:X}_"
        code = "P" + code_of(mangled[1:]) if mangled.startswith("P") else mangled
        if mangled.startswith(("P", "K")):
            seen.append(mangled)
        return code

    if not all(parameter.mangled for parameter in parameters):
        return ""
    return f"_Z{len(name)}{name}{''.join(code_of(parameter.mangled) for parameter in parameters) or 'v'}"


# ---- the list of entries that a library carries ----


def line_of(entry: Entry) -> str:
    """Return `name symbol kind:parameter,... key:name=value,...:refused;...`; a plain function lacks the last field.

    The kind of an integer is followed by its letter: `integer/j`.
    """
    kinds = [f"{each.kind}/{each.mangled}" if each.kind == "integer" else each.kind for each in entry.parameters]
    listed = ",".join(f"{kind}:{parameter.name}" for kind, parameter in zip(kinds, entry.parameters, strict=True))
    line = f"{entry.name} {entry.symbol or '?'} {listed}"
    keys = (
        f"{instance.key}:{','.join(f'{name}={value}' for name, value in instance.arguments)}:{instance.refused}"
        for instance in entry.instances
    )
    return f"{line} {';'.join(keys)}" if entry.instances else line


def entry_of(line: str) -> Entry:
    """Return the entry of a line of `line_of`, without ``template`` and pointers' ``mangled``: lines lack both."""
    name, symbol, listed, *keys = line.split(" ", 3)
    fields = [field.partition(":") for field in listed.split(",") if field]
    parameters = tuple(Parameter(parameter, *kind.split("/")) for kind, _, parameter in fields)
    instances = [_instance(text) for text in keys[0].split(";")] if keys else []
    return Entry(name, symbol, parameters, instances=tuple(instances))


def _instance(text: str) -> Instance:
    key, listed, refused = text.split(":")
    pairs = (pair.partition("=")[::2] for pair in listed.split(","))
    return Instance(int(key), tuple((name, value) for name, value in pairs), refused)
