"""Checks the links of a built site, in HTML: python tools/site_links.py build/site

mkdocs checks the links within one build; this sees those between the builds of two languages too. Every link to a file
must find it, and every anchor an element of that name.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Holds what a page links to and the names that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name in ("id", "name") and value is not None:
                self.names.add(value)


def dead(site: Path) -> list[str]:
    """Returns each dead link with the page that has it."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            if parts.scheme or not target.is_file():
                found.append(f"{path.relative_to(site)}: {link} finds no file")
            elif anchor and target in pages and anchor not in pages[target].names and anchor != "__skip":
                found.append(f"{path.relative_to(site)}: {link} finds no {anchor}")
    print(f"{len(pages)} pages, {sum(len(page.links) for page in pages.values())} links, {len(found)} dead")
    return found


if __name__ == "__main__":
    lines = dead(Path(sys.argv[1]).resolve())
    print(*lines, sep="\n")
    sys.exit(1 if lines else 0)
