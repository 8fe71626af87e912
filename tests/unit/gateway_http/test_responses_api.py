"""/v1/responses over a scripted tokenizer: what is asked of it, and what comes of what it says."""

import json

import openai
import pydantic
import pytest
from support.gateway_fakes import in_loop
from support.http_fakes import http_gateway
from support.http_scripted import CALLS, named_events, runs, scripted

from quartet.services.gateway.http.openapi import describe
from quartet.shared.messages import (
    ChatMessage,
    ErrorCode,
    Submit,
    ToolCall,
)
from quartet.shared.sampling_params import StructuredKind, ToolChoice

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CREATED = ["response.created", "response.in_progress"]
TEXT = ["response.output_item.added", "response.content_part.added", "response.output_text.delta"]
TEXT += ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
CALL = ["response.output_item.added", "response.function_call_arguments.delta"]
CALL += ["response.function_call_arguments.done", "response.output_item.done"]


@in_loop
async def test_a_text_as_events_and_as_a_whole():
    async with http_gateway(peer_type=scripted("a", "b", "ü")) as gateway:
        body = {"input": "x", "instructions": "Be brief.", "metadata": {"k": "v"}, "temperature": 0.5, "top_p": 0.9}
        events = named_events(await gateway.post(PATH, {**body, "stream": True}))
        kinds = [event["type"] for event in events]
        assert runs(kinds) == [
            *CREATED,
            *TEXT,
            "response.completed",
        ]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == "abü"
        started, final = events[0]["response"], events[-1]["response"]
        assert (started["status"], started["output"], started["usage"]) == ("in_progress", [], None)
        whole = (await gateway.post(PATH, body)).json()
        for response in (started, final, whole):
            assert response["metadata"] == {"k": "v"} and response["instructions"] == "Be brief."
            assert (response["temperature"], response["top_p"], response["store"]) == (0.5, 0.9, False)
            assert response["model"] == "tiny" and response["text"]["format"] == {"type": "text"}
        (item,) = final["output"]
        assert item["id"].startswith("msg_") and item["status"] == final["status"] == "completed"
        assert item["content"] == [{"type": "output_text", "text": "abü", "annotations": [], "logprobs": []}]
        assert (
            final["usage"]
            == whole["usage"]
            == {
                "input_tokens": 3,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 6,
            }
        )
        assert whole["output"][0]["content"] == item["content"] and whole["completed_at"]


@in_loop
async def test_what_max_output_tokens_cuts_off_is_incomplete():
    async with http_gateway() as gateway:
        *events, last = named_events(await gateway.post(PATH, {"input": "x", "stream": True, "max_output_tokens": 3}))
        assert last["type"] == "response.incomplete" and events[-1]["item"]["status"] == "incomplete"
        for response in (last["response"], (await gateway.post(PATH, {"input": "x"})).json()):
            assert response["status"] == response["output"][0]["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert gateway.peer.all(Submit)[0].sampling.max_tokens == 3


@in_loop
async def test_an_answer_that_says_nothing_is_an_empty_text():
    async with http_gateway(peer_type=scripted("")) as gateway:
        events = named_events(await gateway.post(PATH, {"input": "x", "stream": True}))
        assert [event["type"] for event in events] == [*CREATED, *TEXT[:2], *TEXT[3:], "response.completed"]
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


@in_loop
async def test_calls_of_tools_through_the_openai_package():
    async with http_gateway(peer_type=CALLS) as gateway, client(gateway) as api:
        options = {"model": "tiny", "input": "x", "tools": [WEATHER], "tool_choice": "required"}
        whole = await api.responses.create(**options)
        text, *calls = whole.output
        assert (whole.output_text, text.type) == ("Let me see.", "message")
        assert [(call.call_id, call.name, call.arguments) for call in calls] == [
            ("call_a", "weather", '{"city": "Ulm"}'),
            ("call_b", "weather", "{}"),
        ]
        assert whole.tools[0].name == "weather" and whole.tool_choice == "required"
        async with api.responses.stream(**options) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert [item.to_dict() | {"id": ""} for item in final.output[1:]] == [
            item.to_dict() | {"id": "", "parsed_arguments": json.loads(item.arguments)} for item in calls
        ]
        assert runs(kinds) == [
            *CREATED,
            *TEXT,
            *CALL,
            *CALL,
            "response.completed",
        ]
        submit = gateway.peer.last()
        assert submit.tools.choice is ToolChoice.REQUIRED and submit.tools.tools[0].strict
        named = {"type": "function", "name": "weather"}
        await api.responses.create(**options | {"tool_choice": named, "parallel_tool_calls": False})
        submit = gateway.peer.last()
        assert submit.tools.name == "weather" and not submit.tools.parallel


@in_loop
async def test_a_conversation_goes_back_as_input():
    async with http_gateway(peer_type=CALLS) as gateway, client(gateway) as api:
        answer = await api.responses.create(model="tiny", input="x", tools=[WEATHER])
        history = [
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            *answer.output,
            {"type": "function_call_output", "call_id": "call_a", "output": "sunny"},
            {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "wet"}]},
        ]
        await api.responses.create(model="tiny", instructions="I", input=history)
        calls = [ToolCall("call_a", "weather", '{"city": "Ulm"}'), ToolCall("call_b", "weather", "{}")]
        assert gateway.peer.last().prompt.messages == [
            ChatMessage("system", "I"),
            ChatMessage("system", "D"),
            ChatMessage("user", "one\ntwo"),
            ChatMessage("assistant", "Let me see.", tool_calls=calls),
            ChatMessage("tool", "sunny", tool_call_id="call_a"),
            ChatMessage("tool", "wet", tool_call_id="call_b"),
        ]


class City(pydantic.BaseModel):
    name: str


@in_loop
async def test_parse_asks_for_a_schema_and_reads_it():
    async with http_gateway(peer_type=scripted('{"name":', ' "Ulm"}')) as gateway, client(gateway) as api:
        options = {"model": "tiny", "input": "x", "text_format": City}
        assert (await api.responses.parse(**options)).output_parsed == City(name="Ulm")
        structured = gateway.peer.last().sampling.structured
        assert structured.kind is StructuredKind.JSON_SCHEMA and "name" in json.loads(structured.text)["properties"]
        async with api.responses.stream(**options) as stream:
            assert (await stream.get_final_response()).output_parsed == City(name="Ulm")


@in_loop
async def test_logprobs_come_with_their_text():
    async with http_gateway(peer_type=scripted("a", "", "b")) as gateway:
        body = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
        events = named_events(await gateway.post(PATH, {**body, "stream": True}))
        (part,) = events[-1]["response"]["output"][0]["content"]
        assert [entry["token"] for entry in part["logprobs"]] == ["a", "", "b"]
        assert part["logprobs"][0]["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
        streamed = [entry for event in events if event["type"].endswith("delta") for entry in event["logprobs"]]
        assert streamed == part["logprobs"]


@in_loop
async def test_a_stream_that_fails_ends_with_response_failed():
    async with http_gateway(peer_type=scripted("a", error=ErrorCode.INTERNAL)) as gateway:
        *_, last = named_events(await gateway.post(PATH, {"input": "x", "stream": True}))
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
        assert last["response"]["output"][0]["content"][0]["text"] == "a"
        reply = await gateway.post(PATH, {"input": "x"})
        assert reply.status == 500 and reply.error["message"] == "it broke"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "jester", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"stream_options": {}}, "stream_options"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"model": "gpt-9"}, "model"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    @in_loop
    async def test():
        async with http_gateway() as gateway:
            reply = await gateway.post(PATH, {"input": "x"} | fields)
            assert reply.status == (404 if param == "model" else 400)
            assert reply.error["param"] == param and reply.error["message"].startswith(f"{param}: "), reply.body
            assert gateway.peer.sent == []

    test()


def test_it_is_described():
    operation = describe(False)["paths"][PATH]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ResponsesRequest")
    events = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]["anyOf"]
    assert len(events) == 13


def client(gateway):
    return openai.AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="any", max_retries=0)
