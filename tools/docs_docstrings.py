"""Docstrings of the package for the site, and a check of their completeness.

`Docstrings` is an extension of griffe, by which mkdocstrings reads them. Run as a program, this file checks the public
names: each has a docstring that describes every argument, a tensor's shape, and that it raises where it does; so have
the public methods of a public class. An argument counts as described too where the docstring refers to another one,
by "The arguments are those of `ascend_moe.NAME`.", and that one describes it.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ascend_moe"
# What users import beside ascend_moe itself.
MODULES = (
    *("errors", "settings", "dispatchers", "experts", "experts.activations", "routers", "permute", "placement"),
    *("checkpoint", "layer_ops", "npu", "torch_npu_ops", "reference", "plan"),
    *("interop.deep_ep", "interop.fused_moe", "interop.megatron", "interop.sglang", "interop.vllm"),
    *("interop.vllm_ascend", "interop.vllm_plugin", "interop.sglang_plugin", "interop.cann_ops_transformer"),
    "shim.torch_npu",
)

SIZE = r"(?:\.\.\.|[\w*/+>= -]{1,16})"
SHAPE = re.compile(rf"\({SIZE},(?: {SIZE}(?:, {SIZE})*)?\)")  # (T,), (BS, H), (..., 2I)
ELSEWHERE_DESCRIBED = re.compile(r"\bas (?:there|of|for)\b|\bany shape\b|\bwhose arguments these are\b", re.IGNORECASE)

REFERENCE = re.compile(r"The arguments are those of `([\w.]+)`\.")
ARGUMENTS = re.compile(r"(?ms)^Args:\n.*?(?=\n\n|\Z)")


class Docstrings(griffe.Extension):
    """Griffe extension that converts this package's docstrings for griffe's parser and Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        # A list of arguments may go on in the next lines, deeper: "x, y,\n    z: as there".
        while True:
            joined = re.sub(r"(?m)^( *(?:\w+, )*\w+,)\n +(?=(?:\w+, )*\w+[,:])", r"\1 ", text)
            if joined == text:
                break
            text = joined
        names = {each.name.lstrip("*") for each in getattr(obj, "parameters", [])}
        text = ARGUMENTS.sub(lambda section: _a_line_each(section[0], names), text)
        obj.docstring.value = text.replace("][", "]\\[")  # "sums over [expert][rank]" is no link

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Put the list of arguments that a docstring refers to in the place of the reference."""
        for obj in _documented(pkg):
            if (found := REFERENCE.search(obj.docstring.value)) and (listed := _arguments(pkg, found[1])):
                obj.docstring.value = obj.docstring.value.replace(found[0], listed)


def _documented(obj: Any) -> list[Any]:
    """Yield the object and its members with docstrings."""
    inside = [each for each in obj.members.values() if not each.is_alias]
    return [obj] * obj.has_docstring + [found for each in inside for found in _documented(each)]


def _arguments(package: griffe.Module, name: str) -> str:
    """The section Args of a function's docstring; empty without such a function or section."""
    try:
        found = ARGUMENTS.search(package[name.removeprefix(f"{package.name}.")].docstring.value)
    except (KeyError, AttributeError):
        return ""
    return found[0] if found else ""


def _a_line_each(section: str, names: set[str]) -> str:
    """Start a new line for each argument described in the line of another: "x: (T, H). ids: (T, K)"."""

    def started(match: re.Match[str]) -> str:
        return f".\n    {match[1]}: " if names.issuperset(match[1].split(", ")) else match[0]

    return re.sub(r"\.\s+((?:\w+, )*\w+): ", started, section)


def public_names(module: str) -> list[str]:
    """What a module shows: its ``__all__``, or else the classes and functions that it defines without underscore."""
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [element.value for element in ast.walk(node.value) if isinstance(element, ast.Constant)]
    defined = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in tree.body if isinstance(node, defined) and not node.name.startswith("_")]


def undocumented() -> list[str]:
    """Return a line for each incomplete docstring of public functions, classes and methods."""
    extensions = griffe.Extensions(Docstrings())
    package = griffe.load("ascend_moe", search_paths=[ROOT], extensions=extensions, resolve_aliases=True)
    lacking = []
    places = [(module, public) for module in ("", *MODULES) for public in public_names(module)]
    operators = [public for public in public_names("npu") if public.startswith("npu_")]
    for module, public in places:
        name = f"{module}.{public}".strip(".")
        try:
            found: Any = package[name]
            found = found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.AliasResolutionError):
            lacking.append(f"{name}: not found")
            continue
        if not (found.is_function or found.is_class):
            continue
        for part in (found, *methods(found)):
            lacking += [f"{name}{part.path.removeprefix(found.path)}: {what}" for what in left_out(part)]
        if public in operators and not re.search(r"(?m)^ *Raises:", found.docstring.value if found.docstring else ""):
            lacking.append(f"{name}: a section Raises")
    return sorted(lacking)


def methods(documented: Any) -> list[Any]:
    """The public methods and properties that a class defines, but for those that torch calls, with a ctx."""
    members = documented.members.values() if documented.is_class else []
    public = [each for each in members if not each.name.startswith("_")]
    functions = [each for each in public if each.is_function and "ctx" not in each.parameters]
    return functions + [each for each in public if "property" in each.labels]


def left_out(documented: Any) -> list[str]:
    """What the docstring of a function or property, or of a class and its constructor, does not say."""
    if not documented.has_docstring:
        return ["a docstring"]
    if documented.is_attribute:
        return []
    text, function = documented.docstring.value, documented
    if documented.is_class:
        function = documented.members.get("__init__")
        if function is not None and function.has_docstring:
            text += "\n" + function.docstring.value
        if function is None and not any("dataclass" in str(each.value) for each in documented.decorators):
            return []  # its base has the constructor
    parameters = [each for each in (function or documented).parameters if each.name not in ("self", "cls")]
    names = [each.name.lstrip("*") for each in parameters if not each.name.lstrip("*").startswith("_")]
    lacking = [f"argument {name}" for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
    tensors = [each.name for each in parameters if re.search(r"\bTensors?\b", str(each.annotation))]
    if documented.is_function and tensors and not SHAPE.search(text) and not ELSEWHERE_DESCRIBED.search(text):
        lacking.append(f"a shape of {', '.join(tensors)}")
    if function is not None and raises(function) and not re.search(r"\b[Rr]aises?\b", text):
        lacking.append("what it raises")
    return lacking


def raises(function: Any) -> bool:
    """Whether a function itself raises, by a statement or by one of the rules of ``ascend_moe.errors``."""
    for node in ast.walk(ast.parse(textwrap.dedent(function.source))):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Call) and re.match(r"need(_|$)", getattr(node.func, "id", "")):
            return True
    return False


def main() -> int:
    """Print incomplete docstrings; return 1 if there are any."""
    lacking = undocumented()
    print("\n".join(lacking) or "every public name is documented")
    return bool(lacking)


if __name__ == "__main__":
    sys.exit(main())
