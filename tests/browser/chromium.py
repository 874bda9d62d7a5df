"""Headless Chromium for tests of pages, and what goes wrong in a page.

Needs `playwright` from pip, and Chromium or Chrome on the path; `bash tests/browser/install` installs both.
"""

import shutil

from playwright.sync_api import Browser, Page, Playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def launch(playwright: Playwright) -> Browser:
    """Starts the browser."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


def watch(page: Page) -> list[str]:
    """Returns a list that grows with each error of the page."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda request: found.append(f"not loaded: {request.url}"))
    return found


def overflow(page: Page) -> list[str]:
    """Says so if the page is wider than the screen."""
    pixels = page.evaluate(OVERFLOW)
    return [f"the page is {pixels} pixels wider than the screen"] if pixels > 0 else []
