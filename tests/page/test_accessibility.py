"""axe's rules on both views, in both themes."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from support.live_script import Script
from support.page_server import page_server


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["playground", "live"])
def test_axe_finds_nothing(open_page, scheme, view):
    with page_server() as server:
        server.live.first = [("snapshot", Script().snapshot())]
        # The checker puts its script into the page, which the page's own policy would refuse.
        page = open_page(f"{server.url}#{view}", color_scheme=scheme, bypass_csp=True)
        if view == "playground":
            page.fill("#prompt", "Hello!")
            page.press("#prompt", "Enter")
            expect(page.locator("article.assistant")).not_to_have_attribute("aria-busy", "true")
        else:
            page.locator(".request").first.click()
        results = Axe().run(page)
        found = [
            (violation["id"], [(node["html"][:100], node["failureSummary"][:300]) for node in violation["nodes"][:3]])
            for violation in results.response["violations"]
        ]
        assert found == []
