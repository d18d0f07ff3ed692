"""Hooks of mkdocs: adds to the pages of docs/ what the repository has elsewhere, and the API reference.

README becomes the first page, CONTRIBUTING and their like pages of their own; every other file that a page links to is
copied beside the pages. The API reference has a page a public module, with every public name; a name that has no
docstring, or that griffe does not find, or whose docstring leaves out an argument, a tensor's shape or that it raises,
fails the build; so does a public method of a public class.

The site in Chinese is a build of its own, of README.zh.md and docs/zh/, that lies in the folder zh of the site in
English. Links from one to the other are written "site:" and the file's path on the whole site until a page is complete.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import translations
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

with contextlib.suppress(ImportError):
    import jieba  # of the search, for pages with Chinese words

    jieba.setLogLevel(logging.WARNING)

PACKAGE = ROOT / "ascend_moe"
# Pages that do not lie in docs/: by file, the name on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
CHINESE = "docs/zh/"
ELSEWHERE_IN_CHINESE = {"README.zh.md": "index.md"}
OLDER = '!!! warning "英文页面较新"\n    [英文原文]({}) 在本页翻译之后有改动，内容以英文页面为准。\n\n'
FULL_WIDTH = "[\u3000-\u303f\uff00-\uffef]"
# A new line in text that is no space: between Chinese characters, and beside a full-width sign.
NO_SPACE = re.compile(rf"(?<={FULL_WIDTH})\n|\n(?={FULL_WIDTH})|(?<=[\u4e00-\u9fff])\n(?=[\u4e00-\u9fff])")
BLOCK = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
# What users import beside ascend_moe itself.
MODULES = (
    *("errors", "settings", "dispatchers", "experts", "experts.activations", "routing", "permute", "placement"),
    *("checkpoint", "fused", "npu", "torch_npu_ops", "reference", "timeline", "foreign", "plan"),
    *("interop.deep_ep", "interop.fused_moe", "interop.megatron", "interop.sglang", "interop.vllm"),
    *("interop.vllm_ascend", "interop.vllm_plugin", "interop.sglang_plugin", "interop.cann_ops_transformer"),
    "standin.torch_npu",
)

SIZE = r"(?:\.\.\.|[\w*/+>= -]{1,16})"
SHAPE = re.compile(rf"\({SIZE},(?: {SIZE}(?:, {SIZE})*)?\)")  # (T,), (BS, H), (..., 2I)
ELSEWHERE_DESCRIBED = re.compile(r"\bas (?:there|of|for)\b|\bany shape\b|\bwhose arguments these are\b", re.IGNORECASE)


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
    """What public names lack, a line each: name and what; functions, classes and their methods."""
    package = griffe.load("ascend_moe", search_paths=[ROOT], resolve_aliases=True)
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


def in_chinese(config: MkDocsConfig) -> bool:
    """Whether this is the build of the pages in Chinese."""
    return Path(config.docs_dir) == ROOT / CHINESE


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere; in English the files that pages link to, and the API reference."""
    for source, name in (ELSEWHERE_IN_CHINESE if in_chinese(config) else ELSEWHERE).items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for asset in sorted((ROOT / "tools" / "site").iterdir()):
        files.append(File.generated(config, f"assets/{asset.name}", content=asset.read_text()))
    targets = sorted({target for page in files.documentation_pages() for target in _outside(page, config)})
    if in_chinese(config):
        return files
    for target in targets:
        content = (ROOT / target).read_bytes()
        name = _place(target)
        files.append(File.generated(config, name, content=content.decode() if name.endswith(".md") else content))
    if lacking := undocumented():
        raise PluginError("public names whose docstrings lack something:\n  " + "\n  ".join(lacking))
    for module in ("", *MODULES):
        name = f"api/{module or 'index'}.md"
        files.append(File.generated(config, name, content=api_page(module)))
    config.nav[-1]["API"] = ["api/index.md", *(f"api/{module}.md" for module in MODULES)]  # type: ignore[index]
    return files


def _source(page: File, config: MkDocsConfig) -> str:
    """The file of the repository from which a page is made."""
    if page.src_uri.startswith("source/"):
        return page.src_uri.removeprefix("source/")
    elsewhere, folder = (ELSEWHERE_IN_CHINESE, CHINESE) if in_chinese(config) else (ELSEWHERE, "docs/")
    return next((source for source, name in elsewhere.items() if name == page.src_uri), folder + page.src_uri)


def _links(page: File, config: MkDocsConfig) -> Iterator[tuple[str, Path]]:
    """The links of a page to files of this repository: as written, and what they mean."""
    folder = (ROOT / _source(page, config)).parent
    for match in LINK.finditer(page.content_string):
        if "://" not in match[2] and not page.src_uri.startswith("api/"):
            yield match[2], (folder / match[2]).resolve()


def _outside(page: File, config: MkDocsConfig) -> Iterator[str]:
    for written, path in _links(page, config):
        if not path.is_relative_to(ROOT) or not path.exists():
            raise PluginError(f"{page.src_uri}: {written} is no file of this repository")
        inside = path.relative_to(ROOT).as_posix()
        if path.is_file() and not inside.startswith("docs/") and inside not in {*ELSEWHERE, *ELSEWHERE_IN_CHINESE}:
            yield inside


def _place(target: str) -> str:
    """Where a file of the repository lies on the site, before a page becomes HTML."""
    if target in ELSEWHERE_IN_CHINESE:
        return f"zh/{ELSEWHERE_IN_CHINESE[target]}"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    if (ROOT / target).is_dir():
        return ELSEWHERE["examples/README.md"]
    return f"source/{target}" if target.endswith(".md") else f"source/{target}.txt"


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Points links between files of the repository to where these files lie on the site; marks an old translation."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    source = _source(page.file, config)
    chinese = in_chinese(config)

    def rewritten(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        place = _place((ROOT / source).parent.joinpath(match[2]).resolve().relative_to(ROOT).as_posix())
        if place.startswith("zh/") != chinese:
            place = "site:" + re.sub(r"\.md$", ".html", place)
        else:
            place = "../" * page.file.src_uri.count("/") + (place.removeprefix("zh/") if chinese else place)
        return f"{match[1]}{place}{match[3] or ''}{match[4]}"

    if not chinese:
        return LINK.sub(rewritten, markdown)
    text = LINK.sub(rewritten, translations.HEAD.sub("", markdown))
    if translations.read(ROOT, source).is_stale:
        older = OLDER.format(f"site:{page.file.dest_uri}")
        text = re.sub(r"^# .*\n", lambda title: f"{title[0]}\n{older}", text, count=1, flags=re.MULTILINE)
    return text


def on_page_content(html: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Takes spaces out of Chinese text that only a new line in the source would make; code stays as it is."""
    parts = BLOCK.split(html)
    return "".join(part if part.startswith("<pre") else NO_SPACE.sub("", part) for part in parts)


def on_page_context(context: Any, page: Any, config: MkDocsConfig, nav: Any) -> Any:
    """Points the switch of languages to the same page in the other language, or to its first page."""
    name = page.file.dest_uri
    translated = name == "index.html" or (ROOT / CHINESE / page.file.src_uri).exists()
    config.extra["alternate"] = [
        {"name": "English", "link": f"site:{name}", "lang": "en"},
        {"name": "中文", "link": f"site:zh/{name if translated else 'index.html'}", "lang": "zh"},
    ]
    return context


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Makes links to the other language relative, so that the site can be opened from a disk."""
    up = "../" * (page.file.dest_uri.count("/") + in_chinese(config))
    return output.replace('"site:', f'"{up}')
