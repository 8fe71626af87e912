"""Any JSON body: an answer or a refusal in the API's form, never the server's fault, and nobody else is hurt."""

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.http import call, post

from quartet.services.gateway.http.messages_api.bodies import CountTokensRequest, MessagesRequest
from quartet.services.gateway.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quartet.services.gateway.http.responses_api.bodies import ResponsesRequest

NUM_EXAMPLES = 25
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DOORS = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 4}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 4}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi", "max_output_tokens": 16}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 4}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": MESSAGES}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [72]}),
}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 20, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**40, 1e308, 5e-324, -0.0, 0.5]),
    st.sampled_from([float("nan"), float("inf")]),
    st.integers(-5, 300),
)
texts = st.one_of(
    st.sampled_from(
        ["", "auto", "none", "user", "text", "json_object", "a" * 3000, "\x00", "\ud800", "é🙂", "f", "(("]
    ),
    st.text(st.characters(exclude_categories=()), max_size=8),
)
plausible = st.sampled_from(
    [
        MESSAGES,
        [TOOL],
        ["a", "b"],
        [72, 105],
        [[72, 105], [1]],
        [["a"]],
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        {"type": "function", "function": {"name": "f"}},
        {"regex": "[ab]{3}"},
        {"grammar": "root ::= x"},
        {"json": {"$ref": "#/nowhere"}},
        {"choice": ["a", "b"]},
        {"72": 5},
        {"include_usage": True},
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
    ]
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts, plausible),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def bodies(path):
    """The endpoint's fields, some with a value of their kind and some with any, beside what makes a good request."""
    kind, good = DOORS[path]
    names = st.one_of(st.sampled_from(kind.__struct_encode_fields__), st.text(max_size=5))
    return st.dictionaries(names, values, max_size=5).map(lambda changes: _bounded(good | changes, good))


def _bounded(body, good):
    """With so few tokens that it is soon over."""
    for name in LENGTHS:
        if isinstance(body.get(name), int | float | None) and name in good and not 0 <= (body.get(name) or -1) <= 32:
            body[name] = good[name]
    if isinstance(body.get("min_tokens"), int) and body["min_tokens"] > 32:
        body["min_tokens"] = 2
    return body


def check(path, reply):
    """An answer, or an error in the form of the endpoint's API."""
    assert reply.status < 500 or reply.status == 503, reply
    if reply.status == 200:
        if reply.headers["content-type"].startswith("text/event-stream"):
            assert reply.body.endswith(b"\n\n") and b"internal error" not in reply.body, reply
        else:
            reply.json()
        return
    error = reply.json()["error"]
    assert error["message"] and error["type"], reply
    if not path.startswith("/v1/messages"):
        assert reply.error["type"] == "invalid_request_error", reply


@pytest.fixture(scope="module")
def works(line):
    """Asserts that a good request has its answer."""
    body = {"prompt": "Is all well?", "temperature": 0, "max_tokens": 6, "ignore_eos": True}

    def ask():
        reply = post(line.http, "/v1/completions", body)
        assert reply.status == 200, (reply, line.stack.tail())
        return reply.json()["choices"]

    expected = ask()
    return lambda: ask() == expected


@pytest.mark.parametrize("path", DOORS)
def test_any_json_body_is_answered_or_refused(line, works, path):
    _, good = DOORS[path]
    assert post(line.http, path, good).status == 200

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, database=None, derandomize=NUM_EXAMPLES < 100,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(bodies(path))
    def run(body):
        check(path, post(line.http, path, json.dumps(body).encode()))

    run()
    assert works(), line.stack.tail()


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("changes", [{"user": {"\ud800": float("nan")}}, {"\ud800": "\ud800"}, {"model": 10**400}])
def test_bodies_that_no_answer_could_repeat(line, path, changes):
    reply = post(line.http, path, json.dumps(DOORS[path][1] | changes).encode())
    assert reply.status in (200, 400), reply  # fields that make no difference may be ignored
    check(path, reply)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_any_bytes_are_refused_or_answered(line, works, path):
    _, good = DOORS[path]

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, database=None, derandomize=NUM_EXAMPLES < 100,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, 60), st.binary(max_size=6), st.integers(0, 6))
    def run(at, data, removed):
        body = json.dumps(good).encode()
        check(path, post(line.http, path, body[:at] + data + body[at + removed :]))

    run()
    assert works(), line.stack.tail()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
def test_a_method_that_is_not_there_is_told_in_the_form_of_an_error(line, method):
    assert call(line.http, method, "/v1/completions").error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", DOORS)
def test_very_many_json_bodies(line, works, path, monkeypatch):
    monkeypatch.setitem(globals(), "NUM_EXAMPLES", 600)
    test_any_json_body_is_answered_or_refused(line, works, path)


def test_the_doors_are_all_that_take_a_body(line):
    document = msgspec.json.decode(call(line.http, "GET", "/openapi.json").body)
    with_body = {path for path, item in document["paths"].items() if "requestBody" in item.get("post", {})}
    assert with_body == set(DOORS)
