"""What clients of vLLM send and expect beyond OpenAI's API, and what others write out though they ask nothing by it."""

import json

import msgspec
import pytest
from support.gateway_fakes import in_loop
from support.http_fakes import http_gateway

from quartet.services.gateway.http import responses
from quartet.shared.config import version
from quartet.shared.messages import Submit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
BODIES = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": USER},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_null_is_as_good_as_left_out_whether_it_is_known_or_not(path):
    """Clients with typed bodies write all that they know of, in every version anew."""

    @in_loop
    async def test():
        async with http_gateway() as gateway:
            for empty in ({"prediction": None, "verbosity": None}, {"prediction": None, "model": None, "audio": None}):
                assert (await gateway.post(path, {**empty, **BODIES[path], **empty})).status == 200
            reply = await gateway.post(path, {"prediction": None, "audio": {}, **BODIES[path]})
            assert reply.status == 400 and "audio: there is no such field" in reply.body.decode()
            assert (await gateway.post(path, {"prediction": None, **BODIES[path], "model": 5})).status == 400
            nested = {"prediction": None, **BODIES[path], "tools": [{"type": "function", "nope": None}]}
            assert (await gateway.post(path, nested)).status == 400

    test()


@in_loop
async def test_defaults_of_what_is_not_there_are_taken_and_nothing_else_is():
    defaults = {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True, "bad_words": []}
    async with http_gateway() as gateway:
        assert (await gateway.post(COMPLETIONS, BODIES[COMPLETIONS] | defaults)).status == 200
        assert gateway.peer.last(Submit).prompt.add_special_tokens
        chat = BODIES[CHAT] | defaults | {"include_reasoning": True, "add_special_tokens": False, "echo": False}
        assert (await gateway.post(CHAT, chat)).status == 200
        # Where the field is known, its value counts.
        assert (await gateway.post(COMPLETIONS, {"prompt": "x", "add_special_tokens": False, "verbosity": None})).status
        assert not gateway.peer.last(Submit).prompt.add_special_tokens
        for name, value in (("use_beam_search", True), ("length_penalty", 0.5), ("bad_words", ["a"])):
            reply = await gateway.post(COMPLETIONS, BODIES[COMPLETIONS] | {name: value})
            assert reply.status == 400 and reply.error["param"] == name
            assert reply.error["code"] == "unknown_parameter"


@in_loop
async def test_who_asks_by_a_former_name_is_told_the_present_one():
    async with http_gateway() as gateway:
        for name, there in (("guided_json", "structured_outputs.json"), ("functions", "tools")):
            error = (await gateway.post(CHAT, BODIES[CHAT] | {name: {}})).error
            assert error["param"] == name and error["message"].endswith(f"there is {there}")


@in_loop
async def test_half_of_a_surrogate_pair_is_said_to_be_that():
    async with http_gateway() as gateway:
        for body in (rb'{"prompt": "\ud800"}', rb'{"prompt": "\udc00x"}', rb'{"prompt": "x", "stop": ["\ud800"]}'):
            error = (await gateway.post(COMPLETIONS, body)).error
            assert "surrogate" in error["message"]
        error = (await gateway.post(COMPLETIONS, rb'{"prompt": "\u0041", "temperature": NaN}')).error
        assert error["param"] == "temperature"
        assert "surrogate" not in (await gateway.post(COMPLETIONS, rb'{"prompt": "\u0041"')).error["message"]


@in_loop
async def test_the_version_and_a_model_without_a_name():
    async with http_gateway(api_key_hashes=["0" * 64]) as secured, http_gateway() as gateway:
        assert (await gateway.call("GET", "/version")).json() == {"version": version()}
        assert (await secured.call("GET", "/version")).status == 401
        assert (await gateway.call("GET", "/v1/models/tiny")).status == 200
        reply = await gateway.call("GET", "/v1/models/")
        assert reply.status == 404 and reply.error["code"] == "model_not_found"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_continuous_usage_is_told_in_every_chunk_and_ends_with_the_whole(path):
    @in_loop
    async def test():
        kind = responses.Completion if path == COMPLETIONS else responses.ChatCompletionChunk
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with http_gateway() as gateway:
            body = BODIES[path] | {"n": 2, "stream": True, "stream_options": options}
            *events, last = (await gateway.post(path, body)).events()
            for event in events:
                msgspec.convert(event, kind)
            totals = [event["usage"]["completion_tokens"] for event in events]
            assert totals == sorted(totals) and totals[-1] == last["usage"]["completion_tokens"] == 6
            assert {event["usage"]["prompt_tokens"] for event in events} == {last["usage"]["prompt_tokens"]}
            # Without include_usage it asks nothing.
            body["stream_options"] = {"continuous_usage_stats": True}
            assert all("usage" not in event for event in (await gateway.post(path, body)).events())

    test()


@pytest.mark.parametrize("echo", [False, True])
def test_a_completion_s_stream_tells_the_prompt_s_ids_once_for_each_choice(echo):
    @in_loop
    async def test():
        async with http_gateway() as gateway:
            body = {"prompt": ["x", "y"], "n": 2, "stream": True, "return_token_ids": True, "echo": echo}
            whole = {
                choice["index"]: (choice["prompt_token_ids"], choice["token_ids"])
                for choice in (await gateway.post(COMPLETIONS, body | {"stream": None})).json()["choices"]
            }
            found = {}
            for event in (await gateway.post(COMPLETIONS, body)).events():
                (choice,) = event["choices"]
                if choice["index"] not in found:
                    found[choice["index"]] = (choice.pop("prompt_token_ids"), [])
                assert "prompt_token_ids" not in choice
                found[choice["index"]][1].extend(choice.get("token_ids", []))
            assert found == whole

    test()


@in_loop
async def test_a_chat_s_stream_tells_the_prompt_s_ids_in_its_first_chunks():
    async with http_gateway() as gateway:
        body = BODIES[CHAT] | {"return_token_ids": True}
        whole = (await gateway.post(CHAT, body)).json()["prompt_token_ids"]
        first, *rest = (await gateway.post(CHAT, body | {"stream": True})).events()
        assert first["prompt_token_ids"] == whole and all("prompt_token_ids" not in event for event in rest)


@in_loop
async def test_the_reasoning_effort_is_the_template_s():
    async with http_gateway() as gateway:
        for fields, expected in (
            ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
            ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
            (
                {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
                {"reasoning_effort": "high", "enable_thinking": False},
            ),
            ({}, {}),
        ):
            assert (await gateway.post(CHAT, BODIES[CHAT] | fields)).status == 200
            assert gateway.peer.last(Submit).prompt.template_kwargs == expected
        assert (await gateway.post(CHAT, json.dumps(BODIES[CHAT] | {"reasoning_effort": 3}).encode())).status == 400
