"""Hooks of mkdocs that add files from outside docs/ and the API reference to the site.

README becomes the first page, CONTRIBUTING and their like pages of their own; every other file that a page links to is
copied beside the pages. The API reference has a page a public module, with every public name; what
``tools/docs_docstrings.py`` finds missing there fails the build.

The site in Chinese is a build of its own, of README.zh.md and docs/zh/, that lies in the folder zh of the site in
English. Links from one to the other are written "site:" and the file's path on the whole site until a page is complete.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import translations
from docs_docstrings import MODULES, public_names, undocumented
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

with contextlib.suppress(ImportError):
    import jieba  # of the search, for pages with Chinese words

    jieba.setLogLevel(logging.WARNING)

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
    """Add the pages that lie elsewhere; in English the files that pages link to, and the API reference."""
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
    """Return the links of a page to files of this repository, as written and resolved."""
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
    """Return the path of a repository file on the site, before pages become HTML."""
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
    """Rewrite links between files of the repository for the site, and mark an outdated translation."""
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
    """Take spaces out of Chinese text that only a new line in the source would make; code stays as it is."""
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
    """Make links to the other language relative, so that the site can be opened from a disk."""
    up = "../" * (page.file.dest_uri.count("/") + in_chinese(config))
    return output.replace('"site:', f'"{up}')
