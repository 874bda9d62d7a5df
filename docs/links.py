"""Checks links: of the Markdown files of the repository, and of the built book if it is named. Standard library only.

    python3 docs/links.py [docs/book]

Prints each broken link and exits with 1 if there is one. Links to other hosts are not followed.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links and anchors of one HTML page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.update(found[name] for name in ("id", "name") if found.get(name))
        self.links += [found[name] for name in ("href", "src") if found.get(name)]


def split(link):
    """Path and anchor of a relative link; None for one to another host."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or link.startswith("/"):
        return None
    return unquote(parts.path), unquote(parts.fragment)


def check_book(book):
    # `print.html` repeats all pages, `404.html` is served from any folder.
    pages = {path.resolve(): Page(path) for path in sorted(book.rglob("*.html")) if path.name not in ("print.html", "404.html", "toc.html")}
    for path, page in pages.items():
        for target in filter(None, map(split, page.links)):
            file = (path.parent / target[0]).resolve() if target[0] else path
            if not file.exists():
                yield f"{path.relative_to(book.resolve())}: no file {target[0]}"
            elif target[1] and file in pages and target[1] not in pages[file].anchors:
                yield f"{path.relative_to(book.resolve())}: no anchor {target[0]}#{target[1]}"


FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def anchors_of(text):
    """Anchors that GitHub and mdBook give to the headings of a page."""
    headings = HEADING.findall(FENCE.sub("", text))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


def check_markdown(root):
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    pages = {(root / name).resolve(): (root / name).read_text() for name in listed.stdout.splitlines() if (root / name).exists()}
    for path, text in pages.items():
        for target in filter(None, map(split, LINK.findall(CODE.sub("", FENCE.sub("", text))))):
            file = (path.parent / target[0]).resolve() if target[0] else path
            if not file.exists():
                yield f"{path.relative_to(root)}: no file {target[0]}"
            elif target[1] and file in pages and target[1] not in anchors_of(pages[file]):
                yield f"{path.relative_to(root)}: no anchor {target[0]}#{target[1]}"


def main():
    root = Path(__file__).resolve().parents[1]
    broken = [*check_markdown(root), *(found for book in sys.argv[1:] for found in check_book(Path(book)))]
    print("\n".join(broken) if broken else "links: all whole")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
