"""A Chromium, and pages in it whose errors fail the test. QUARTET_CHROMIUM names one that is not on the PATH."""

import os
import shutil

import pytest
from playwright import sync_api
from support.page_server import page_server

DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 360, "height": 740}
TIMEOUT = 30_000  # ms; the machine may be busy


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/page/" in str(item.path):
            item.add_marker(pytest.mark.page)


def find_chromium():
    named = os.environ.get("QUARTET_CHROMIUM")
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
    return named or next((path for path in found if path), None)


# Not for the session: as long as it is there it runs an event loop in this thread, and tests elsewhere run their own.
@pytest.fixture(scope="module")
def browser():
    sync_api.expect.set_options(timeout=TIMEOUT)
    path = find_chromium()
    if path is None:
        pytest.skip("there is no Chromium: install one (apt-get install chromium) or name it with QUARTET_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        # Root has no sandbox; the pages are our own.
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def server():
    with page_server() as running:
        yield running


@pytest.fixture
def open_page(browser):
    """`open_page(url, **options of the browser's context)`; what the browser complains of fails the test, but the
    refused requests that a test expects: `allowed` is in their message."""
    contexts, complaints = [], []

    def open_one(url, viewport=None, allowed=(), **options):
        context = browser.new_context(viewport=viewport or DESKTOP, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT)

        def complain(text):
            if not any(part in text for part in allowed):
                complaints.append(text)

        page.on("pageerror", lambda error: complain(f"error: {error}"))
        page.on("console", lambda message: message.type in ("error", "warning") and complain(message.text))
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []
