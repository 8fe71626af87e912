"""Both views over the four real services and the real model: a stream, its blocks, and a service that is killed."""

import json
import re
import signal
import urllib.request

import pytest
from playwright.sync_api import expect
from support.stack import Stack, eventually

READY = 120.0  # s; the machine may be busy


def is_ready(address):
    try:
        return json.load(urllib.request.urlopen(f"http://{address}/ready", timeout=5))["ready"]
    except OSError:
        return False


@pytest.fixture
def stack(tmp_path):
    running = Stack(tmp_path, executor_num_blocks=256, executor_max_model_len=512).start()
    try:
        eventually(lambda: is_ready(running.http_address), READY, "the line is not ready")
        yield running
    finally:
        running.stop()


def test_a_killed_executor_is_seen_to_return_and_the_stream_goes_on(stack, open_page):
    url = f"http://{stack.http_address}/"
    allowed = ["503 (Service Unavailable)"]
    live = open_page(f"{url}#live", allowed=allowed)
    expect(live.locator(".pool .summary")).to_have_text("0 of 256 blocks in use, 0 %")
    card = live.locator(".service", has_text="executor")
    expect(card).to_contain_text("ready")
    first = card.locator("code").inner_text()

    chat = open_page(url, allowed=allowed)
    chat.fill("[name=temperature]", "0")
    chat.fill("[name=max_tokens]", "300")
    chat.fill("#prompt", "Tell me a long story about a lighthouse keeper.")
    chat.press("#prompt", "Enter")
    text = chat.locator("article.assistant .text").first
    expect(text).to_have_text(re.compile(r"\w+ \w+ \w+"))

    # The request, its blocks one after the other, and the steps that it runs in.
    row = live.locator(".request")
    expect(row).to_have_count(1)
    row.click()
    expect(live.locator(".table-cells li").nth(3)).to_be_visible()
    expect(live.locator(".steps .info")).to_contain_text("1 running")
    expect(live.locator(".tile").nth(1)).to_contain_text(re.compile(r"First token\d"))

    stack.signal("executor", signal.SIGKILL)
    expect(card).to_contain_text("gone for")
    expect(chat.locator("article.assistant .state")).to_contain_text("Waiting for the executor")
    before = text.inner_text()
    stack.processes.pop("executor").wait()
    stack.start("executor")
    chat.set_default_timeout(READY * 1000)
    expect(card).to_contain_text("back", timeout=READY * 1000)
    assert card.locator("code").inner_text() != first
    expect(card.locator(".starts")).to_have_text("↻ 1")
    expect(chat.locator("article.assistant .figures")).to_contain_text(re.compile(r"\d+ tokens"), timeout=READY * 1000)
    assert text.inner_text().startswith(before) and len(text.inner_text()) > len(before)
    expect(row).to_have_count(0)
