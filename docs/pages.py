"""Opens every page of the built book in headless Chromium and fails on errors that a reader would see.

Each page is opened in light and dark, on a wide and a narrow screen. A page fails if the console shows an error, a file
of the book is missing, a picture stays empty, or the text is wider than the screen.

`bash docs/check_pages [FOLDER]` runs it and stores a screenshot of each page in the folder.
"""

import pathlib
import sys

from chromium import launch, overflow, watch
from playwright.sync_api import Page, sync_playwright

WIDE, NARROW = (1280, 900), (390, 800)
EMPTY_PICTURES = "[...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)"


def faults(page: Page, file: pathlib.Path) -> list[str]:
    """Opens a page and returns what is wrong with it."""
    found = watch(page)
    page.goto(file.resolve().as_uri(), wait_until="load")
    found += [f"empty picture: {source}" for source in page.evaluate(EMPTY_PICTURES)]
    return found + overflow(page)


def main() -> int:
    book = pathlib.Path(sys.argv[1])
    screenshots = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    files = sorted(file for file in book.rglob("*.html") if file.name not in {"404.html", "print.html", "toc.html"})
    if not files:
        print(f"{book} has no pages: build the book with `bash docs/check`", file=sys.stderr)
        return 1
    failures = 0
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for scheme in ("light", "dark"):
            for width, height in (WIDE, NARROW):
                context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
                for file in files:
                    name = file.relative_to(book)
                    page = context.new_page()
                    for fault in faults(page, file):
                        failures += 1
                        print(f"{name}, {scheme}, {width} pixels wide: {fault}", file=sys.stderr)
                    if screenshots:
                        target = screenshots / f"{scheme}-{width}" / name.with_suffix(".png")
                        target.parent.mkdir(parents=True, exist_ok=True)
                        page.screenshot(path=target, full_page=True)
                    page.close()
                context.close()
        browser.close()
    print(f"pages: {len(files)} pages, each in light and dark, wide and narrow, {failures} faults")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
