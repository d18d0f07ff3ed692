"""List translated pages that are older than their sources: python tools/translations.py [--update PAGE ...]

A translated page begins with a comment that names its source and git's hash of the source's text when it was
translated (`git hash-object`). The tool lists each page whose source has another text by now, with what changed, and
each page whose code, headings, tables' rows and numbers, or links are not those of its source; then it ends with 1.
`--update` writes the present hash into a page, named by itself or by its source: do it when it says again what the
source says.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = re.compile(r"\A<!-- translation of (\S+), text ([0-9a-f]{40}) -->\n\n?")
FENCE = re.compile(r"^```[^\n]*\n.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#[^)\s]*)?\)")
MONTH = re.compile(r"\d+ 月")  # a word in English


def text_hash(text: str) -> str:
    """Return git's hash of a file with this text."""
    content = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Translation:
    """A translated page: its path and its source's, both from the root; the hash at its head; its text behind that."""

    root: Path
    page: str
    source: str
    translated: str
    text: str

    @property
    def source_text(self) -> str:
        """The source as it is now."""
        return (self.root / self.source).read_text()

    @property
    def is_stale(self) -> bool:
        """Whether the source has another text than the one that was translated."""
        return text_hash(self.source_text) != self.translated


def read(root: Path, page: str) -> Translation:
    """Return a page. Raises ValueError if its head is missing or names no file."""
    text = (root / page).read_text()
    head = HEAD.match(text)
    if head is None:
        raise ValueError(f"{page}: line 1 must be <!-- translation of PATH, text HASH -->")
    if not (root / head[1]).is_file():
        raise ValueError(f"{page}: its source {head[1]} is no file")
    return Translation(root, page, head[1], head[2], text[head.end() :])


def pages(root: Path = ROOT) -> list[str]:
    """The translated pages and pictures of a repository, in order."""
    found = [*root.glob("*.zh.md"), *(root / "docs" / "zh").rglob("*.md"), *(root / "docs" / "zh").rglob("*.svg")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def changes(page: Translation) -> str:
    """What changed in the source since it was translated, as a diff; without git, that it is not known."""
    found = subprocess.run(
        ["git", "cat-file", "blob", page.translated], cwd=page.root, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        return f"(the translated text {page.translated[:12]} is not in this clone's history)\n"
    before, now = found.stdout.splitlines(keepends=True), page.source_text.splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, now, f"{page.source}, translated", f"{page.source}, now", n=1))


def differences(page: Translation) -> list[str]:
    """What a page that is not stale shows otherwise than its source: code, headings, tables, links."""
    sources = {read(page.root, name).source: name for name in pages(page.root)}
    ours, theirs = page.text, page.source_text
    said = []
    for what, find in (("block", FENCE.findall), ("indented line", _indented), ("heading level", _levels)):
        if find(ours) != find(theirs):
            said += [f"{what}: {line}" for line in _differing(find(theirs), find(ours))]
    if _rows(ours) != _rows(theirs):
        said.append(f"rows of its tables: {_rows(ours)}, its source has {_rows(theirs)}")
    else:
        said += [f"numbers in a row: {line}" for line in _differing(_numbers(theirs), _numbers(ours))]
    said += [f"code: {line}" for line in _differing(sorted(_spans(theirs)), sorted(_spans(ours)))]
    wanted = {sources.get(target, target) for target in _targets(page.root / page.source, page.root, theirs)}
    shown = _targets(page.root / page.page, page.root, ours)
    # Each of the two may lead to the other.
    each_other = {page.page, page.source}
    return said + [f"link: {line}" for line in _differing(sorted(wanted - each_other), sorted(shown - each_other))]


def _differing(theirs: list[str], ours: list[str]) -> Iterator[str]:
    for line in difflib.ndiff([repr(item) for item in theirs], [repr(item) for item in ours]):
        if line[0] in "+-":
            yield line


def _indented(text: str) -> list[str]:
    lines = re.findall(r"^    (\S.*)$", FENCE.sub("", text), re.MULTILINE)
    return [line.partition(" #")[0].rstrip() for line in lines]  # comments are translated


def _levels(text: str) -> list[str]:
    return re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)


def _rows(text: str) -> list[int]:
    tables = re.findall(r"(?:^\|.*\n)+", FENCE.sub("", text), re.MULTILINE)
    return [table.count("\n") for table in tables]


def _numbers(text: str) -> list[str]:
    """The numbers in each row of a table, sorted: words may stand in another order."""
    rows = re.findall(r"^\|.*", FENCE.sub("", text), re.MULTILINE)
    shown = [MONTH.sub("", re.sub(r"\]\([^)]*\)", "]", row)) for row in rows]
    return [" ".join(sorted(re.findall(r"\d+(?:\.\d+)?", row))) for row in shown]


def _spans(text: str) -> set[str]:
    lines = " ".join(FENCE.sub("", text).split())  # a span may go on in the next line
    return set(SPAN.findall(lines))


def _targets(path: Path, root: Path, text: str) -> set[str]:
    """The files to which a page links, from the root, and addresses as they are."""
    return {
        target if "://" in target else (path.parent / target).resolve().relative_to(root.resolve()).as_posix()
        for target in LINK.findall(FENCE.sub("", text))
        if target
    }


def update(root: Path, name: str) -> None:
    """Write the current hash of the source into the head of page ``name``, or of its translation.

    Raises ValueError if there is none.
    """
    of_source = {read(root, page).source: page for page in pages(root)}
    page = of_source.get(name, name)
    if page not in pages(root):
        raise ValueError(f"{name}: neither a translated page nor the source of one")
    path, translation = root / page, read(root, page)
    head = f"<!-- translation of {translation.source}, text {text_hash(translation.source_text)} -->\n\n"
    path.write_text(head + translation.text)


def report(root: Path = ROOT) -> int:
    """Print stale and differing pages; return their number."""
    wrong = 0
    for page in (read(root, name) for name in pages(root)):
        if page.is_stale:
            print(f"{page.page} is older than {page.source}:\n{changes(page)}")
        elif found := differences(page):
            print(f"{page.page} shows (+) other things than {page.source} (-):", *found, sep="\n  ")
        else:
            continue
        wrong += 1
    print(f"{len(pages(root)) - wrong} of {len(pages(root))} translated pages are up to date")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--update", metavar="PAGE", nargs="+", default=[], help="pages, or their sources, to mark as up to date"
    )
    arguments = parser.parse_args()
    for name in arguments.update:
        try:
            update(ROOT, Path(name).resolve().relative_to(ROOT).as_posix())
        except ValueError as error:
            parser.error(str(error))
    return 0 if arguments.update else int(report() > 0)


if __name__ == "__main__":
    sys.exit(main())
