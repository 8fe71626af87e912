"""What is wrong with a body is told by a status and OpenAI's error object, and hurts nobody else."""

import json

import pytest
from support.gateway_fakes import in_loop
from support.http import request_bytes
from support.http_fakes import http_gateway

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_f1_what_is_no_json_object_is_a_400(path):
    """F1: a stray token, an empty body, invalid UTF-8, a top-level array; then a good request."""

    @in_loop
    async def test():
        async with http_gateway() as gateway:
            for body in (
                b'{"prompt": "x" oops}',
                b"",
                b"\xff\xfe",
                b'{"prompt": "\xc3\x28"}',
                b"[1]",
                b"null",
                b'"x"',
                b"{",
            ):
                reply = await gateway.post(path, body)
                assert reply.status == 400 and reply.error["type"] == "invalid_request_error", body
            assert (await gateway.post(COMPLETIONS, {"prompt": "x"})).status == 200

    test()


@in_loop
async def test_f1_another_content_type_is_a_415():
    async with http_gateway() as gateway:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
            assert (await gateway.post(COMPLETIONS, b'{"prompt": "x"}', {"content-type": kind})).error
            assert (await gateway.post(COMPLETIONS, b'{"prompt": "x"}', {"content-type": kind})).status == 415
        assert (await gateway.post(COMPLETIONS, b"", {"content-encoding": "gzip"})).status == 415
        for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
            assert (await gateway.post(COMPLETIONS, b'{"prompt": "x"}', {"content-type": kind})).status == 200


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["ok", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        (["ok", [1]], "prompt[1]"),
        ([1, "ok"], "prompt[1]"),
        (None, "prompt"),
        ([-1], "prompt[0]"),
        ([1, 2**31], "prompt[1]"),
        ([2**63], "prompt[0]"),
        ([2**200], "prompt[0]"),
        ([1.5], "prompt[0]"),
        (["1", 2], "prompt[1]"),
        ([[[1]]], "prompt[0][0]"),
        (7, "prompt"),
        ({"a": 1}, "prompt"),
    ],
)
def test_f2_f3_a_prompt_that_is_none_is_refused_by_name(prompt, param):
    """F2, F3: nothing of a batch is begun when one of its prompts is wrong."""

    @in_loop
    async def test():
        async with http_gateway() as gateway:
            reply = await gateway.post(COMPLETIONS, {"prompt": prompt})
            assert reply.status == 400 and reply.error["param"] == param, reply.body
            assert param in reply.error["message"]
            assert gateway.peer.sent == []

    test()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 10**12),
        ("max_tokens", 0.5),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("n", 0),
        ("n", -1),
        ("n", 10**6),
        ("n", 10**100),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_p", -1),
        ("temperature", -1),
        ("temperature", 1e308),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("stop", ["x"] * 1000),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [None]),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"-1": 1}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**40]),
        ("priority", 2**70),
        ("cache_salt", "x" * 5000),
        ("user", "é" * 600),
        ("prompt_logprobs", 10**6),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", 10**9),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("no_such_field", 1),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_f8_odd_parameters_are_refused_by_name(path, field, value):
    """F8. The body is written by hand, as clients do that know no JSON."""

    @in_loop
    async def test():
        prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        async with http_gateway() as gateway:
            if (path, field, value) == (CHAT, "max_tokens", 0):
                return
            reply = await gateway.post(path, json.dumps(prompt | {field: value}).encode())
            assert reply.status == 400, reply.body
            assert reply.error["param"].split("[")[0].split(".")[0] == field, reply.body
            assert gateway.peer.sent == []

    test()


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, {"logprobs": 10**6}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"suffix": "s"}, "suffix"),
        (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"model": "gpt-9"}, "model"),
        (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (CHAT, {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        (CHAT, {"modalities": ["audio"]}, "modalities"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        (CHAT, {"tools": [{"type": "magic", "function": {"name": "a"}}]}, "tools[0].type"),
        (CHAT, {"tools": [{"function": {"name": "a"}}], "tool_choice": "sometimes"}, "tool_choice"),
        (CHAT, {"tools": [{"function": {"name": "a"}}], "tool_choice": {"function": {"name": "b"}}}, "tool_choice"),
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        (CHAT, {"structured_outputs": {}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"regex": ""}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_f8_d1_e6_what_an_endpoint_cannot_do_is_refused_by_name(path, extra, param):
    @in_loop
    async def test():
        prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        async with http_gateway() as gateway:
            reply = await gateway.post(path, prompt | extra)
            assert reply.status in (400, 404) and reply.error["param"] == param, reply.body
            assert gateway.peer.sent == []

    test()


@in_loop
async def test_e6_a_format_of_text_or_null_asks_for_nothing():
    async with http_gateway() as gateway:
        for given in (None, {"type": "text"}):
            body = {"messages": [{"role": "user", "content": "x"}], "response_format": given}
            assert (await gateway.post(CHAT, body)).status == 200
            assert gateway.peer.last().sampling.structured is None


@in_loop
async def test_f10_large_bodies_and_deep_ones_are_refused_cheaply():
    """F10: 413 by the limit, read to its end or not; 400 for 10,000 levels, wherever they are."""
    async with http_gateway(max_body_bytes=100_000) as gateway:
        large = {"messages": [{"role": "user", "content": "x" * 150_000}]}
        reply = await gateway.post(CHAT, large)
        assert reply.status == 413 and "100000" in reply.error["message"]
        expecting = request_bytes("POST", CHAT, large, {"expect": "100-continue"}).partition(b"\r\n\r\n")
        assert (await gateway.raw(b"".join(expecting[:2]))).status == 413
        chunk = b"%x\r\n%s\r\n" % (50_000, b"x" * 50_000)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        assert (await gateway.raw(head + chunk * 5 + b"0\r\n\r\n")).status == 413
        deep = b"[" * 10_000 + b"]" * 10_000
        for body in (deep, b'{"prompt":' + deep + b"}", b'{"messages":[{"x":' + deep + b"}]}", b'{"x":' + deep + b"}"):
            assert (await gateway.post(CHAT, body)).error and (await gateway.post(COMPLETIONS, body)).error
        assert (await gateway.post(CHAT, {"messages": [{"role": "user", "content": "x"}] * 5000})).status == 413
        assert (await gateway.post(COMPLETIONS, {"prompt": "x"})).status == 200


@in_loop
async def test_f10_the_numbers_of_messages_and_prompts_are_bounded():
    async with http_gateway(max_messages=10, max_prompts_per_request=3) as gateway:
        reply = await gateway.post(CHAT, {"messages": [{"role": "user", "content": "x"}] * 11})
        assert reply.status == 400 and reply.error["param"] == "messages"
        for prompt in (["x"] * 4, [[1]] * 4):
            reply = await gateway.post(COMPLETIONS, {"prompt": prompt})
            assert reply.status == 400 and reply.error["param"] == "prompt"
        assert (await gateway.post(COMPLETIONS, {"prompt": ["x"] * 3})).status == 200


@in_loop
async def test_a_path_a_method_or_an_alias_that_is_not_there():
    async with http_gateway() as gateway:
        for path in ("/v1", "/v1/completions/", "//v1/completions", "/V1/completions", "/completions", "/v1/x"):
            assert (await gateway.post(path, {"prompt": "x"})).error
            assert (await gateway.post(path, {"prompt": "x"})).status == 404
        reply = await gateway.call("GET", COMPLETIONS)
        assert reply.status == 405 and reply.error and reply.headers["allow"] == "POST"
        assert (await gateway.call("GET", "/v1/models/none")).error["code"] == "model_not_found"


@in_loop
async def test_a_request_id_is_echoed_or_made_and_is_never_a_key():
    async with http_gateway() as gateway:
        replies = [await gateway.post(COMPLETIONS, {"prompt": "x"}, {"x-request-id": "mine"}) for _ in range(2)]
        assert [reply.headers["x-request-id"] for reply in replies] == ["mine", "mine"]
        assert replies[0].json()["id"] != replies[1].json()["id"]
        made = {(await gateway.call("GET", "/health")).headers["x-request-id"] for _ in range(2)}
        assert len(made) == 2
        for bad in ("x" * 200, "a b"):
            assert (await gateway.call("GET", "/health", headers={"x-request-id": bad})).headers["x-request-id"] != bad
