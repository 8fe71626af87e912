"""/v1/messages over a scripted tokenizer: what is asked of it, and what comes of what it says."""

import hashlib
import json

import anthropic
import pydantic
import pytest
from support.gateway_fakes import in_loop
from support.http_fakes import http_gateway
from support.http_scripted import CALLS, named_events, runs, scripted

from quartet.services.gateway.http.openapi import describe
from quartet.shared.messages import ChatMessage, Encode, ErrorCode, FinishReason, Submit, ToolCall, ToolCallDelta
from quartet.shared.sampling_params import StructuredKind, ToolChoice

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "x"}]
BODY = {"max_tokens": 9, "messages": USER}
SCHEMA = {"type": "object"}
WEATHER = {"name": "weather", "description": "W", "input_schema": SCHEMA}
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
END = ["message_delta", "message_stop"]


def client(gateway, **options):
    url = f"http://{gateway.address}"
    return anthropic.AsyncAnthropic(base_url=url, max_retries=0, **({"api_key": "any"} | options))


def error(reply, status=400):
    """The error object, checked for Anthropic's form."""
    body = reply.json()
    assert reply.status == status and set(body) == {"type", "error"} and body["type"] == "error", reply
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


@in_loop
async def test_a_text_as_events_and_as_a_whole():
    async with http_gateway(peer_type=scripted("a", "b", "ü")) as gateway:
        events = named_events(await gateway.post(PATH, {**BODY, "stream": True}))
        kinds = [event["type"] for event in events]
        assert runs(kinds) == ["message_start", *BLOCK, *END]
        assert events[1] == {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": "", "citations": None},
        }
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == "abü" and {d["type"] for d in deltas} == {"text_delta"}
        assert events[0]["message"]["usage"]["input_tokens"] == 3 and events[0]["message"]["stop_reason"] is None
        whole = (await gateway.post(PATH, BODY)).json()
        assert whole["id"].startswith("msg_") and (whole["type"], whole["role"]) == ("message", "assistant")
        assert whole["content"] == [{"type": "text", "text": "abü", "citations": None}]
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert (whole["stop_reason"], whole["model"]) == ("end_turn", "tiny")
        assert (
            whole["usage"]
            == events[-2]["usage"]
            == {
                "input_tokens": 3,
                "output_tokens": 3,
                "cache_read_input_tokens": 0,
                "cache_creation_input_tokens": 0,
            }
        )


@pytest.mark.parametrize(
    ("finish", "stop_reason", "told"),
    [
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.STOP, "END", ("stop_sequence", "END")),
        (FinishReason.STOP, 7, ("end_turn", None)),
    ],
)
def test_why_it_ended(finish, stop_reason, told):
    @in_loop
    async def test():
        async with http_gateway(peer_type=scripted("a", finish=finish, stop_reason=stop_reason)) as gateway:
            whole = (await gateway.post(PATH, BODY)).json()
            assert (whole["stop_reason"], whole["stop_sequence"]) == told
            events = named_events(await gateway.post(PATH, {**BODY, "stream": True}))
            assert tuple(events[-2]["delta"].values()) == told

    test()


@in_loop
async def test_an_answer_that_says_nothing_has_no_block():
    async with http_gateway(peer_type=scripted("")) as gateway:
        assert (await gateway.post(PATH, BODY)).json()["content"] == []
        events = named_events(await gateway.post(PATH, {**BODY, "stream": True}))
        assert [event["type"] for event in events] == ["message_start", *END]


@in_loop
async def test_calls_of_tools_through_the_anthropic_package():
    async with http_gateway(peer_type=CALLS) as gateway, client(gateway) as api:
        options = {**BODY, "model": "tiny", "tools": [WEATHER]}
        whole = await api.messages.create(**options, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        submit = gateway.peer.last()
        assert submit.tools.choice is ToolChoice.REQUIRED and not submit.tools.parallel
        assert json.loads(submit.tools.tools[0].parameters) == SCHEMA
        text, *calls = whole.content
        assert (text.type, text.text, whole.stop_reason) == ("text", "Let me see.", "tool_use")
        assert [(call.id, call.name, call.input) for call in calls] == [
            ("call_a", "weather", {"city": "Ulm"}),
            ("call_b", "weather", {}),
        ]
        async with api.messages.stream(**options, tool_choice={"type": "tool", "name": "weather"}) as stream:
            kinds = [event.type async for event in stream if event.type not in ("text", "input_json")]
            final = await stream.get_final_message()
        assert runs(kinds) == ["message_start", *BLOCK, *BLOCK, *BLOCK, *END]
        assert [block.to_dict() for block in final.content[1:]] == [call.to_dict() for call in calls]
        assert (final.content[0].text, final.stop_reason, final.usage) == (text.text, "tool_use", whole.usage)
        assert gateway.peer.last().tools.name == "weather"
        await api.messages.create(**options, tool_choice={"type": "none"})
        assert gateway.peer.last().tools.choice is ToolChoice.NONE


@in_loop
async def test_blanks_are_lost_only_beside_calls():
    for parts, expected in ((["a", " b \n", "\n"], "a b \n\n"), (["\n"], "\n"), (["a\n", "\nb"], "a\n\nb")):
        async with http_gateway(peer_type=scripted(*parts)) as gateway:
            for tools in ({}, {"tools": [WEATHER]}):
                (block,) = (await gateway.post(PATH, BODY | tools)).json()["content"]
                assert block["text"] == expected
                events = named_events(await gateway.post(PATH, {**BODY, **tools, "stream": True}))
                texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
                assert "".join(texts) == expected
    call = [ToolCallDelta(0, "call_a", "weather", "{}")]
    async with http_gateway(peer_type=scripted("\n", call, "\n", "More.")) as gateway:
        kinds = [block["type"] for block in (await gateway.post(PATH, {**BODY, "tools": [WEATHER]})).json()["content"]]
        assert sorted(kinds) == ["text", "tool_use"]


@in_loop
async def test_a_call_that_is_cut_off_has_no_input():
    cut = scripted([ToolCallDelta(0, "call_a", "weather", '{"city": "U')], finish=FinishReason.LENGTH)
    async with http_gateway(peer_type=cut) as gateway:
        whole = (await gateway.post(PATH, {**BODY, "tools": [WEATHER]})).json()
        assert whole["stop_reason"] == "max_tokens" and whole["content"][0]["input"] == {}


@in_loop
async def test_a_conversation_goes_back_as_messages():
    async with http_gateway(peer_type=CALLS) as gateway, client(gateway) as api:
        answer = await api.messages.create(**BODY, model="tiny", tools=[WEATHER])
        history = [
            {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": answer.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_a", "content": "sunny"},
                    {"type": "tool_result", "tool_use_id": "call_b", "content": [{"type": "text", "text": "wet"}]},
                    {"type": "text", "text": "So?"},
                ],
            },
        ]
        system = [{"type": "text", "text": "I"}, {"type": "text", "text": "J"}]
        await api.messages.create(model="tiny", max_tokens=9, system=system, messages=history, stop_sequences=["E"])
        submit = gateway.peer.last()
        calls = [ToolCall("call_a", "weather", '{"city":"Ulm"}'), ToolCall("call_b", "weather", "{}")]
        assert submit.prompt.messages == [
            ChatMessage("system", "I\nJ"),
            ChatMessage("user", "one"),
            ChatMessage("assistant", "Let me see.", tool_calls=calls),
            ChatMessage("tool", "sunny", tool_call_id="call_a"),
            ChatMessage("tool", "wet", tool_call_id="call_b"),
            ChatMessage("user", "So?"),
        ]
        assert submit.text.stop == ["E"] and submit.prompt.add_generation_prompt
        await gateway.post(PATH, {**BODY, "messages": [*USER, {"role": "assistant", "content": "Well,"}]})
        prompt = gateway.peer.last().prompt
        assert prompt.continue_final_message and not prompt.add_generation_prompt


class City(pydantic.BaseModel):
    name: str


@in_loop
async def test_parse_asks_for_a_schema_and_reads_it():
    async with http_gateway(peer_type=scripted('{"name":', ' "Ulm"}')) as gateway, client(gateway) as api:
        answer = await api.messages.parse(**BODY, model="tiny", output_format=City)
        assert answer.parsed_output == City(name="Ulm")
        structured = gateway.peer.last().sampling.structured
        assert structured.kind is StructuredKind.JSON_SCHEMA and "name" in json.loads(structured.text)["properties"]


@in_loop
async def test_tokens_are_counted_of_the_same_prompt():
    async with http_gateway() as gateway, client(gateway) as api:
        options = {"messages": USER, "system": "S", "tools": [WEATHER]}
        assert (await api.messages.count_tokens(model="tiny", **options)).input_tokens == 2
        assert (await gateway.post(COUNT, {**BODY, **options, "stream": True})).json() == {"input_tokens": 2}
        await gateway.post(PATH, {**BODY, **options})
        encode, submit = gateway.peer.last(Encode), gateway.peer.last(Submit)
        assert (encode.prompt, encode.tools) == (submit.prompt, submit.tools)


@in_loop
async def test_a_stream_that_fails_ends_with_an_error():
    async with http_gateway(peer_type=scripted("a", error=ErrorCode.INTERNAL)) as gateway, client(gateway) as api:
        *_, last = named_events(await gateway.post(PATH, {**BODY, "stream": True}))
        assert last == {"type": "error", "error": {"type": "api_error", "message": "it broke"}}
        assert error(await gateway.post(PATH, BODY), 500) == last["error"]
        with pytest.raises(anthropic.APIStatusError, match="it broke"):
            async for _ in await api.messages.create(**BODY, model="tiny", stream=True):
                pass


@in_loop
async def test_either_header_may_bring_the_key():
    hashes = [hashlib.sha256(b"secret").hexdigest()]
    async with http_gateway(api_key_hashes=hashes) as gateway:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await gateway.post(PATH, BODY, headers)).status == 200
            assert (await gateway.call("GET", "/v1/models", headers=headers)).status == 200
        for headers in ({}, {"x-api-key": "other"}, {"x-api-key": "Bearer secret"}, {"x-api-key": ""}):
            assert error(await gateway.post(PATH, BODY, headers), 401)["type"] == "authentication_error"
        async with client(gateway, api_key="secret") as api:
            message = await api.messages.create(**BODY, model="tiny")
            assert message.content[0].text == "abc" and message._request_id
        async with client(gateway, api_key="other") as api:
            with pytest.raises(anthropic.AuthenticationError):
                await api.messages.create(**BODY, model="tiny")


@in_loop
async def test_models_have_the_form_of_the_api_that_asks():
    async with http_gateway(served_model_names=["one", "two"]) as gateway, client(gateway) as api:
        page = await api.models.list(limit=1)
        assert [model.id async for model in page] == ["one", "two"] and not page.has_more
        assert (page.first_id, page.last_id) == ("one", "two")
        model = await api.models.retrieve("two")
        assert (model.type, model.id, model.display_name) == ("model", "two", "tiny")
        assert model.max_input_tokens == 512 and model.created_at.year >= 2026 and model.lifecycle == "active"
        with pytest.raises(anthropic.NotFoundError):
            await api.models.retrieve("claude")
        version = {"anthropic-version": "2023-06-01"}
        reply = await gateway.call("GET", "/v1/models/claude", headers=version)
        assert error(reply, 404)["message"].startswith("model: ") and reply.headers["request-id"]
        assert error(await gateway.post("/v1/models", {}, version), 405)
        assert (await gateway.call("GET", "/v1/models")).json()["object"] == "list"
        assert (await gateway.call("GET", "/v1/models/claude")).error["code"] == "model_not_found"


@in_loop
async def test_errors_have_anthropics_form():
    async with http_gateway(max_concurrent_requests=1, max_body_bytes=1024) as gateway:
        assert error(await gateway.call("GET", PATH), 405)["type"] == "invalid_request_error"
        assert error(await gateway.post(f"{PATH}/batches", {}), 404)["type"] == "not_found_error"
        assert error(await gateway.post(PATH, {**BODY, "model": "claude"}), 404)["type"] == "not_found_error"
        assert error(await gateway.post(PATH, b" " * 2000), 413)["type"] == "request_too_large"
        gateway.peer.silent = True
        async with client(gateway) as api, await api.messages.create(**BODY, model="tiny", stream=True):
            reply = await gateway.post(PATH, BODY)
            assert error(reply, 429)["type"] == "rate_limit_error" and reply.headers["retry-after"]
        for version in ("2023-01-01", "latest"):
            for path in (PATH, COUNT):
                reply = await gateway.post(path, BODY, {"anthropic-version": version})
                assert error(reply)["message"].startswith("anthropic-version: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "jester", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "messages[0]",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 1000}, "temperature"),
        ({"metadata": {"user_id": "x" * 2000}}, "metadata.user_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "min_tokens": 1}, "min_tokens"),
        ({"stop": ["x"]}, "stop"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    @in_loop
    async def test():
        async with http_gateway() as gateway:
            found = error(await gateway.post(PATH, BODY | fields))
            assert found["type"] == "invalid_request_error" and found["message"].startswith(f"{param}: "), found
            assert gateway.peer.sent == []

    test()


def test_it_is_described():
    paths = describe(True)["paths"]
    for path, name in ((PATH, "MessagesRequest"), (COUNT, "CountTokensRequest")):
        operation = paths[path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{name}")
        refused = operation["responses"]["401"]["content"]["application/json"]["schema"]
        assert refused["$ref"].endswith("/MessagesError")
