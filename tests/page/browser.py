"""A headless Chromium for the tests of the page; without one, they are skipped and say why."""

import shutil
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="the page is tested in a browser: apt-get install chromium-headless-shell; pip install playwright",
)


@contextmanager
def launched():
    """Start a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of the browser that keeps what it said, asked for and failed at."""

    def __init__(self, browser, **options):
        self.page = browser.new_page(**{"viewport": {"width": 1300, "height": 900}, **options})
        self.page.set_default_timeout(10_000)
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address):
        """Open an address, also where only what follows the # is another, and wait until the page is drawn."""
        self.page.goto("about:blank")
        self.page.goto(address)
        self.page.evaluate("window.gyroscope.ready")
        return self.page

    def ask(self, expression, argument=None):
        """Return the value of a JavaScript expression or function."""
        return self.page.evaluate(expression, argument)

    def until(self, expression):
        """Wait for a JavaScript expression to hold; the page's policy forbids Playwright's own way to wait."""
        for _ in range(200):
            if self.ask(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never held: {expression}")

    @property
    def state(self):
        """What the page shows: quantity, steps, layers, ..."""
        return self.ask("window.gyroscope.view()")
