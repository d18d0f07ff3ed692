"""Hooks of mkdocs: adds to the pages of docs/ what the repository has elsewhere, and the API reference.

README becomes the first page, CONTRIBUTING and their like pages of their own; every other file that a page links to is
copied beside the pages. The API reference has a page a public module, with every public name; a name that has no
docstring, or that griffe does not find, fails a strict build.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ascend_moe"
# Pages that do not lie in docs/: by file, the name on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
# What users import beside ascend_moe itself.
MODULES = (
    *("errors", "settings", "dispatchers", "experts", "experts.activations", "routing", "permute", "placement"),
    *("checkpoint", "fused", "npu", "torch_npu_ops", "reference", "timeline", "foreign", "plan"),
    *("interop.deep_ep", "interop.fused_moe", "interop.megatron", "interop.sglang", "interop.vllm"),
    *("interop.vllm_ascend", "interop.vllm_plugin", "interop.cann_ops_transformer", "standin.torch_npu"),
)


class Docstrings(griffe.Extension):
    """Makes of this package's docstrings what griffe's parser and Markdown read as meant."""

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
        obj.docstring.value = text.replace("][", "]\\[")  # "sums over [expert][rank]" is no link


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
    """The public names without a docstring, and those that are not found: functions, classes and their methods."""
    package = griffe.load("ascend_moe", search_paths=[ROOT], resolve_aliases=True)
    lacking = []
    for name in (f"{module}.{public}".strip(".") for module in ("", *MODULES) for public in public_names(module)):
        try:
            found: griffe.Object | griffe.Alias = package[name]
            found = found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.AliasResolutionError):
            lacking.append(name)
            continue
        if (found.is_function or found.is_class) and not found.has_docstring:
            lacking.append(name)
    return sorted(lacking)


def api_page(module: str) -> str:
    """The page of a module: its docstring and each public name."""
    name = f"ascend_moe.{module}" if module else "ascend_moe"
    head = [
        f"# {name}",
        "",
        f"::: {name}",
        "    options:",
        "      members: false",
        "      show_root_heading: false",
        "",
    ]
    for public in sorted(public_names(module)):
        head += [f"::: {name}.{public}", ""]
    return "\n".join(head)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere, the files that pages link to, and the API reference."""
    for source, name in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for target in sorted({target for page in files.documentation_pages() for target in _outside(page)}):
        content = (ROOT / target).read_bytes()
        name = _place(target)
        files.append(File.generated(config, name, content=content.decode() if name.endswith(".md") else content))
    if lacking := undocumented():
        raise PluginError("public names without a docstring: " + ", ".join(lacking))
    for module in ("", *MODULES):
        name = f"api/{module or 'index'}.md"
        files.append(File.generated(config, name, content=api_page(module)))
    config.nav[-1]["API"] = ["api/index.md", *(f"api/{module}.md" for module in MODULES)]  # type: ignore[index]
    return files


def _folder_of(page: File) -> Path:
    """The folder of the repository from which a page's links count."""
    if page.src_uri.startswith("source/"):
        return (ROOT / page.src_uri.removeprefix("source/")).parent
    source = next((source for source, name in ELSEWHERE.items() if name == page.src_uri), f"docs/{page.src_uri}")
    return (ROOT / source).parent


def _links(page: File) -> Iterator[tuple[str, Path]]:
    """The links of a page to files of this repository: as written, and what they mean."""
    for match in LINK.finditer(page.content_string):
        if "://" not in match[2] and not page.src_uri.startswith("api/"):
            yield match[2], (_folder_of(page) / match[2]).resolve()


def _outside(page: File) -> Iterator[str]:
    for written, path in _links(page):
        if not path.is_relative_to(ROOT) or not path.exists():
            raise PluginError(f"{page.src_uri}: {written} is no file of this repository")
        inside = path.relative_to(ROOT).as_posix()
        if path.is_file() and not inside.startswith("docs/") and inside not in ELSEWHERE:
            yield inside


def _place(target: str) -> str:
    """Where a file of the repository lies on the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    if (ROOT / target).is_dir():
        return ELSEWHERE["examples/README.md"]
    return f"source/{target}" if target.endswith(".md") else f"source/{target}.txt"


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Points links between files of the repository to where these files lie on the site."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    folder = _folder_of(page.file)

    def rewritten(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        target = (folder / match[2]).resolve().relative_to(ROOT).as_posix()
        up = "../" * page.file.src_uri.count("/")
        return f"{match[1]}{up}{_place(target)}{match[3] or ''}{match[4]}"

    return LINK.sub(rewritten, markdown)
