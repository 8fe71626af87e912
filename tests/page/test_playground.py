"""The playground in a browser, over the real HTTP face and a tokenizer that says what it is told to."""

import hashlib
import re

import pytest
from page.conftest import PHONE
from playwright.sync_api import expect
from support.gateway_fakes import AnsweringPeer, delta
from support.http_scripted import scripted
from support.live_script import Script
from support.page_server import page_server

from quartet.shared.messages import Abort, Deltas, ErrorCode, FinishReason, Submit, TokenLogprobs

EVIL = "<img src=x onerror=document.title='owned'><b>bold</b>"


class Slow(AnsweringPeer):
    """Says the first two of five words; the rest when `go_on` is called."""

    def __init__(self, table, words, **options):
        super().__init__(table, [" one", " two", " three", " four", " five"], **options)

    def speak(self, submit, upto=None):
        super().speak(submit, 2)

    def go_on(self):
        submit = self.last(Submit)
        total = len(" one two")
        for i, word in list(enumerate(self.words))[2:]:
            total += len(word)
            finish = FinishReason.STOP if i == 4 else None
            self._say(Deltas([delta(submit, i, [100 + i], word, total, finish=finish)]))


def ask(page, text="Hello!"):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answer(page):
    return page.locator("article.assistant").last


def finished(page):
    expect(answer(page)).not_to_have_attribute("aria-busy", "true")
    return answer(page)


def test_a_chat_streams_and_tells_what_it_cost(server, open_page):
    page = open_page(server.url)
    page.fill("#prompt", "first line")
    page.press("#prompt", "Shift+Enter")
    page.type("#prompt", "second")
    page.press("#prompt", "Enter")
    told = finished(page)
    expect(told.locator(".text").first).to_have_text("abc")
    expect(told.locator(".figures")).to_contain_text("3 tokens")
    expect(told.locator(".figures")).to_contain_text("first after")
    expect(told.locator(".figures")).to_contain_text("prompt 3")
    expect(told.locator(".figures")).to_contain_text("cut off at the limit")
    expect(page.locator("#prompt")).to_have_value("")
    expect(page.locator("#prompt")).to_be_focused()
    assert server.peer.last(Submit).prompt.messages[0].content == "first line\nsecond"

    ask(page, "And now?")
    expect(page.locator("article.assistant")).to_have_count(2)
    finished(page)
    roles = [message.role for message in server.peer.last(Submit).prompt.messages]
    assert roles == ["user", "assistant", "user"]
    page.click("#new-chat")
    expect(page.locator("article")).to_have_count(0)


def test_what_model_and_user_write_is_never_markup(open_page):
    with page_server(scripted(EVIL)) as server:
        page = open_page(server.url)
        page.check("#token-view")
        ask(page, EVIL)
        expect(finished(page).locator(".text").first).to_have_text(EVIL)
        expect(page.locator("article.user")).to_have_text(EVIL)
        assert page.locator("article img, article b").count() == 0
        assert page.title() == "Quartet"


def test_settings_reach_the_request_and_are_remembered(server, open_page):
    page = open_page(server.url)
    values = {
        "temperature": "0.5", "max_tokens": "77", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "seed": "123",
        "repetition_penalty": "1.1", "presence_penalty": "0.25", "frequency_penalty": "-0.5",
    }  # fmt: skip
    for name, value in values.items():
        page.fill(f"[name={name}]", value)
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=stop]", "END\n\\n\\n")
    page.reload()
    ask(page)
    finished(page)
    submit = server.peer.last(Submit)
    for name, value in values.items():
        assert getattr(submit.sampling, name) == pytest.approx(float(value)), name
    assert submit.text.stop == ["END", "\n\n"]
    assert [message.role for message in submit.prompt.messages] == ["system", "user"]

    page.click("#reset-settings")
    ask(page, "Again")
    expect(page.locator("article.assistant")).to_have_count(2)
    finished(page)
    sampling = server.peer.last(Submit).sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p, sampling.top_k) == (0.7, 512, 1.0, 0)


def test_output_follows_a_schema(server, open_page):
    page = open_page(server.url)
    page.select_option("[name=format]", "json_schema")
    page.fill("[name=schema]", '{"type": "object"')
    ask(page)
    expect(finished(page).locator(".state.error")).to_contain_text("The JSON schema is no JSON")
    expect(page.locator("[name=schema]")).to_have_attribute("aria-invalid", "true")
    assert server.peer.all(Submit) == []
    page.fill("[name=schema]", '{"type": "object"}')
    answer(page).get_by_role("button", name="Retry").click()
    expect(finished(page).locator(".text").first).to_have_text("abc")
    assert "object" in str(server.peer.last(Submit).sampling.structured)


def test_an_error_is_in_the_servers_words_and_marks_its_field(server, open_page):
    page = open_page(server.url, allowed=["400 (Bad Request)"])
    page.fill("[name=top_p]", "7")
    ask(page)
    error = finished(page).locator(".state.error")
    expect(error).to_have_text("400 · top_p: must be in (0, 1], got 7.0")
    expect(page.locator("[name=top_p]")).to_have_attribute("aria-invalid", "true")
    page.fill("[name=top_p]", "0.7")
    expect(page.locator("[name=top_p]")).not_to_have_attribute("aria-invalid", "true")
    answer(page).get_by_role("button", name="Retry").click()
    expect(finished(page).locator(".text").first).to_have_text("abc")
    expect(page.locator("article")).to_have_count(2)


def test_an_error_after_some_text_keeps_the_text(open_page):
    with page_server(scripted("so far", error=ErrorCode.UNAVAILABLE)) as server:
        page = open_page(server.url)
        ask(page)
        expect(finished(page).locator(".text").first).to_have_text("so far")
        expect(answer(page).locator(".state.error")).to_have_text("it broke")
        expect(answer(page).get_by_role("button", name="Continue")).to_be_visible()


def test_stop_ends_the_work_and_the_answer_can_be_continued(open_page):
    with page_server(Slow) as server:
        page = open_page(server.url)
        ask(page)
        expect(answer(page).locator(".text").first).to_have_text("one two")
        page.click("#stop")
        expect(finished(page).locator(".figures")).to_contain_text("stopped")
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator("#prompt")).to_be_focused()
        server.wait_for(lambda: server.peer.all(Abort))
        answer(page).get_by_role("button", name="Continue").click()
        expect(answer(page).locator(".text").first).to_have_text("one two one two")
        prompt = server.peer.last(Submit).prompt
        assert prompt.messages[-1].role == "assistant" and prompt.messages[-1].content == " one two"
        page.keyboard.press("Escape")
        expect(finished(page).locator(".figures")).to_contain_text("stopped")


def test_a_stalled_stream_says_what_it_waits_for_and_goes_on(open_page):
    with page_server(Slow) as server:
        script = Script()
        server.live.first = [("snapshot", script.snapshot() | {"services": script.services(gone="executor")})]
        page = open_page(server.url, allowed=["503 (Service Unavailable)"])
        ask(page)
        expect(answer(page).locator(".text").first).to_have_text("one two")
        server.do(_set_ready, server, False)
        expect(answer(page).locator(".state")).to_contain_text("Waiting for the executor")
        expect(page.locator("#readiness")).to_have_text("Not ready")
        server.do(_set_ready, server, True)
        server.do(server.peer.go_on)
        expect(answer(page).locator(".text").first).to_have_text("one two three four five")
        expect(finished(page).locator(".state")).to_be_empty()
        expect(page.locator("#readiness")).to_have_text("Ready")
        server.wait_for(lambda: not server.live.viewers)


def _set_ready(server, ready):
    server.peer.ready = ready
    server.table.on_status(server.peer)


class Guesses(AnsweringPeer):
    """Three tokens with alternatives; the last is half of a character."""

    def speak(self, submit, upto=None):
        texts = [b"Hi", b" <b>", b"\xf0\x9f"]
        total = 0
        for i, text in enumerate(texts):
            entry = TokenLogprobs(i, -0.1 - 2 * i, 1, [(i, -0.1 - 2 * i), (9, -3.0)], [text, text, b" you"])
            shown = text.decode() if i < 2 else ""
            total += len(shown)
            finish = FinishReason.STOP if i == 2 else None
            self._say(Deltas([delta(submit, i, [i], shown, total, finish=finish, logprobs=[entry])]))


def test_tokens_are_shaded_by_their_probability_and_tell_the_alternatives(open_page):
    with page_server(Guesses) as server:
        page = open_page(server.url)
        page.check("#token-view")
        ask(page)
        tokens = finished(page).locator(".token")
        expect(tokens).to_have_text(["Hi", " <b>", "f0 9f"])
        assert server.peer.last(Submit).sampling.logprobs == 5
        shades = [tokens.nth(i).evaluate("node => node.style.getPropertyValue('--shade')") for i in range(3)]
        assert [int(shade.rstrip("%")) for shade in shades] == [2, 42, 82]
        colours = {tokens.nth(i).evaluate("node => getComputedStyle(node).backgroundColor") for i in range(3)}
        assert len(colours) == 3

        tokens.nth(1).hover()
        rows = page.locator("#alternatives li")
        expect(rows).to_have_count(2)
        expect(page.locator("#alternatives li.chosen")).to_have_text("␣<b>12.2 %")
        expect(rows.nth(1)).to_have_text("␣you5.0 %")
        page.mouse.move(5, 5)
        expect(page.locator("#alternatives")).to_have_count(0)

        # The keyboard: one stop for all tokens, arrows within.
        tokens.nth(0).focus()
        page.keyboard.press("ArrowRight")
        expect(tokens.nth(1)).to_be_focused()
        expect(page.locator("#alternatives")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#alternatives")).to_have_count(0)

        page.uncheck("#token-view")
        expect(tokens.first).to_be_hidden()
        expect(answer(page).locator(".text").first).to_have_text("Hi <b>")


def test_a_phone_taps_tokens_and_opens_the_settings(open_page):
    with page_server(Guesses) as server:
        page = open_page(server.url, PHONE, has_touch=True, is_mobile=True)
        page.locator("#token-view").check()
        expect(page.locator("#settings")).to_be_hidden()
        page.click("#open-settings")
        expect(page.locator("#close-settings")).to_be_focused()
        page.fill("[name=max_tokens]", "5")
        page.keyboard.press("Escape")
        expect(page.locator("#settings")).to_be_hidden()
        ask(page)
        finished(page).locator(".token").nth(0).tap()
        expect(page.locator("#alternatives")).to_be_visible()
        box = page.locator("#alternatives").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        assert server.peer.last(Submit).sampling.max_tokens == 5


def test_the_key_is_the_password(open_page):
    digest = hashlib.sha256(b"qk-right").hexdigest()
    with page_server(api_key_hashes=[f"alice={digest}"]) as server:
        credentials = {"username": "me", "password": "qk-right"}
        page = open_page(server.url, http_credentials=credentials)
        ask(page)
        expect(finished(page).locator(".text").first).to_have_text("abc")
        assert server.peer.last(Submit).tenant == "alice"
        expect(page.locator("#readiness")).to_have_text("Ready")


def test_curl_gets_the_same_request(server, open_page):
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    page.fill("#prompt", "It's me")
    page.click("#copy-curl")
    expect(page.locator("#copy-curl")).to_have_text("Copied")
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith(f"curl -N {server.url}v1/chat/completions ")
    assert re.search(r"It'\\''s me", command) and '"max_tokens": 512' in command


def test_the_theme_is_chosen_and_kept(server, open_page):
    page = open_page(server.url, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")
    light = page.evaluate(background)
    assert light != dark
    page.reload()
    assert page.evaluate(background) == light
    page.click("#theme")
    assert page.evaluate(background) == dark
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == light
