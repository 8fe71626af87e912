"""What comes of a request over HTTP, whole and streamed."""

import asyncio
import json

import msgspec
import pytest
from support.gateway_fakes import AnsweringPeer, delta, in_loop, until
from support.http_fakes import http_gateway

from quartet.services.gateway.http import responses
from quartet.shared.messages import (
    ChatPrompt,
    Deltas,
    Encode,
    ErrorCode,
    Failed,
    FinishReason,
    PromptLogprobs,
    Submit,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
    ToolCallDelta,
)
from quartet.shared.sampling_params import StructuredKind, ToolChoice

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 0},
}


class Scripted(AnsweringPeer):
    """Says for each submit what `script(submit)` yields."""

    script = None

    def speak(self, submit, upto=None):
        for message in self.script(submit):
            self._say(message)


def scripted(script):
    return type("ScriptedPeer", (Scripted,), {"script": staticmethod(script)})


def body_for(path, **fields):
    return {"prompt": "x", **fields} if path == COMPLETIONS else {"messages": USER, **fields}


def texts(path, events):
    """Each choice's text, from a stream's chunks."""
    result = {}
    for event in events:
        for choice in event["choices"]:
            text = choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or ""
            result[choice["index"]] = result.get(choice["index"], "") + text
    return result


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a8_only_include_usage_gives_usage_once_and_last(path):
    """A8: absent, {}, false and null give none; true gives one last chunk, as the unary answer has it."""

    @in_loop
    async def test():
        async with http_gateway() as gateway:
            unary = (await gateway.post(path, body_for(path))).json()
            assert unary["usage"] == USAGE
            for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
                events = (await gateway.post(path, body_for(path, stream=True, stream_options=options))).events()
                assert all("usage" not in event and event["choices"] for event in events)
            options = {"include_usage": True}
            *events, last = (await gateway.post(path, body_for(path, stream=True, stream_options=options))).events()
            assert all(event["usage"] is None and event["choices"] for event in events)
            assert last["usage"] == USAGE and last["choices"] == []

    test()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_chunks_are_what_the_description_says(path):
    @in_loop
    async def test():
        kind = responses.Completion if path == COMPLETIONS else responses.ChatCompletionChunk
        async with http_gateway(("a", '"\\\n', "\u00e9\U0001f600", "\x00z")) as gateway:
            reply = await gateway.post(path, body_for(path, stream=True, n=2))
            for event in reply.events():
                msgspec.convert(event, kind)
            assert texts(path, reply.events()) == dict.fromkeys(range(2), 'a"\\\né😀\x00z')
            last = [event["choices"][0] for event in reply.events() if event["choices"][0]["finish_reason"]]
            assert sorted(choice["index"] for choice in last) == [0, 1]
            whole = (await gateway.post(path, body_for(path, n=2))).json()
            msgspec.convert(whole, responses.Completion if path == COMPLETIONS else responses.ChatCompletion)

    test()


@in_loop
async def test_several_prompts_are_as_many_streams_and_one_answer():
    async with http_gateway() as gateway:
        body = {"prompt": ["a", "b", "c"], "n": 2, "seed": 5, "max_tokens": 3}
        answer = (await gateway.post(COMPLETIONS, body)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["completion_tokens"] == 18 and answer["usage"]["prompt_tokens"] == 9
        submits = gateway.peer.all(Submit)
        assert [submit.prompt.text for submit in submits] == ["a", "b", "c"]
        assert {submit.sampling.seed for submit in submits} == {5} and len({s.request_id for s in submits}) == 3
        events = (await gateway.post(COMPLETIONS, body | {"stream": True})).events()
        assert texts(COMPLETIONS, events) == dict.fromkeys(range(6), "abc")
        await gateway.post(COMPLETIONS, {"prompt": ["a", "b"]})
        assert len({submit.sampling.seed for submit in gateway.peer.all(Submit)[-2:]}) == 2


@in_loop
async def test_one_failing_prompt_ends_the_others_and_is_named():
    def script(submit):
        if submit.prompt.text == "bad":
            yield Failed(submit.request_id, submit.attempt, ErrorCode.INVALID_ARGUMENT, "prompt: too long", "prompt")

    async with http_gateway(peer_type=scripted(script)) as gateway:
        for stream in (False, True):
            reply = await gateway.post(COMPLETIONS, {"prompt": ["good", "bad"], "stream": stream})
            if not stream:
                assert reply.status == 400 and reply.error["param"] == "prompt[1]"
            await until(lambda: gateway.table.num_open_streams == 0)


@in_loop
async def test_fields_reach_the_tokenizer_as_they_are_meant():
    async with http_gateway() as gateway:
        same = {
            "temperature": 0.5,
            "top_p": 0.9,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "min_tokens": 1,
            "stop_token_ids": [7],
            "ignore_eos": True,
            "seed": 3,
        }
        body = {
            "prompt": [1, 2],
            "max_tokens": 9,
            "logit_bias": {"5": -1.5},
            "stop": "end",
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "priority": 4,
            "cache_salt": "s",
            "user": "u",
            "read_prefix_cache": False,
            "write_prefix_cache": False,
            "n": 2,
            "best_of": 2,
            **same,
        }
        assert (await gateway.post(COMPLETIONS, body | {"top_k": 9})).status == 200
        submit = gateway.peer.last()
        assert {name: getattr(submit.sampling, name) for name in same} == same
        assert submit.sampling.top_k == 9 and submit.sampling.max_tokens == 9
        assert submit.sampling.logit_bias == {5: -1.5} and submit.prompt == TokensPrompt([1, 2])
        assert submit.text.stop == ["end"] and submit.text.include_stop_str_in_output
        assert not submit.text.skip_special_tokens
        assert (submit.priority, submit.cache_salt, submit.tenant) == (4, "s", "u")
        assert not submit.read_prefix_cache and not submit.write_prefix_cache and len(submit.choices) == 2
        await gateway.post(COMPLETIONS, {"prompt": "x", "top_k": -1, "add_special_tokens": False, "stop": None})
        assert gateway.peer.last().sampling.top_k == 0 and gateway.peer.last().prompt == TextPrompt("x", False)


@in_loop
async def test_d1_messages_in_any_form_are_the_same_prompt():
    """D1: parts are joined by a line feed for every role; an answer can be sent back as it came."""
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    async with http_gateway() as gateway:
        seen = []
        for content in ("hi\nthere", parts):
            roles = ("system", "user", "assistant", "tool")
            await gateway.post(CHAT, {"messages": [{"role": role, "content": content} for role in roles]})
            seen.append(gateway.peer.last().prompt)
        assert seen[0] == seen[1] and isinstance(seen[0], ChatPrompt)
        await gateway.post(CHAT, {"messages": [{"role": "user", "content": []}]})
        assert gateway.peer.last().prompt.messages[0].content == ""
        answer = (await gateway.post(CHAT, {"messages": USER})).json()["choices"][0]["message"]
        messages = [{"role": "developer", "content": "be brief", "name": "bob"}, *USER, answer, *USER]
        await gateway.post(CHAT, {"messages": messages, "chat_template_kwargs": {"a": 1}})
        prompt = gateway.peer.last().prompt
        assert [m.role for m in prompt.messages] == ["system", "user", "assistant", "user"]
        assert prompt.messages[0].name == "bob" and prompt.template_kwargs == {"a": 1}
        assert prompt.add_generation_prompt
        await gateway.post(CHAT, {"messages": USER, "continue_final_message": True, "max_completion_tokens": 4})
        assert not gateway.peer.last().prompt.add_generation_prompt
        assert gateway.peer.last().prompt.continue_final_message and gateway.peer.last().sampling.max_tokens == 4


def scored(submit, ids=(5, 6, 7)):
    """Log-probabilities of prompt and output, with a token that is half a character and one at the floor."""
    entries = [
        None,
        TokenLogprobs(6, -1.0, 2, [(9, -0.5), (6, -1.0)], [b"b", b"q", b"b"]),
        TokenLogprobs(7, -9999.0, 9, [(9, -0.5), (8, -9999.0)], [b"\xf0\x9f", b"q", b"\xf0\x9f"]),
    ]
    yield PromptLogprobs(submit.request_id, submit.attempt, 0, entries[:2])
    out = [TokenLogprobs(100, -0.25, 1, [(100, -0.25), (9, -2.0)], [b"A", b"A", b"q"])]
    first = delta(submit, 0, [100], "A", 1, logprobs=out)
    yield Deltas([first])
    yield PromptLogprobs(submit.request_id, submit.attempt, 2, entries[2:])
    yield Deltas([delta(submit, 1, [101], "B", 2, logprobs=out, finish=FinishReason.STOP, stop_reason="!")])


@in_loop
async def test_a5_a11_b12_log_probabilities_are_finite_and_in_openais_forms():
    async with http_gateway(peer_type=scripted(scored)) as gateway:
        body = {"prompt": "pqr", "echo": True, "logprobs": 1}
        (choice,) = (await gateway.post(COMPLETIONS, body)).json()["choices"]
        assert choice["text"] == "pqrAB" and choice["stop_reason"] == "!"
        # The first token's text is asked for by Decode, which the fake answers with the id.
        assert choice["logprobs"] == {
            "tokens": ["5", "b", "bytes:\\xf0\\x9f", "A", "A"],
            "token_logprobs": [None, -1.0, -9999.0, -0.25, -0.25],
            "top_logprobs": [
                None,
                {"q": -0.5, "b": -1.0},
                {"q": -0.5, "bytes:\\xf0\\x9f": -9999.0},
                {"A": -0.25},
                {"A": -0.25},
            ],
            "text_offset": [0, 1, 2, 16, 17],
        }
        assert gateway.peer.last().sampling.prompt_logprobs == 1
        events = (await gateway.post(COMPLETIONS, body | {"stream": True})).events()
        merged = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for event in events:
            for name in merged:
                merged[name] += event["choices"][0]["logprobs"][name]
        assert merged == choice["logprobs"] and texts(COMPLETIONS, events) == {0: "pqrAB"}
        (choice,) = (await gateway.post(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 1})).json()[
            "choices"
        ]
        top = [{"token": "A", "logprob": -0.25, "bytes": [65]}]
        assert choice["logprobs"]["content"][0] == {"token": "A", "logprob": -0.25, "bytes": [65], "top_logprobs": top}
        (choice,) = (await gateway.post(CHAT, {"messages": USER, "logprobs": True})).json()["choices"]
        assert choice["logprobs"]["content"][0]["top_logprobs"] == []
        answer = (await gateway.post(COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1})).json()["choices"][0]
        assert answer["prompt_logprobs"][:2] == [
            None,
            {
                "9": {"logprob": -0.5, "rank": 1, "decoded_token": "q"},
                "6": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            },
        ]


@in_loop
async def test_b12_scoring_without_generating():
    """B12: max_tokens 0 with echo has log-probabilities of the prompt, whether it tells them or not."""

    def script(submit):
        yield PromptLogprobs(submit.request_id, submit.attempt, 0, [None, *[TokenLogprobs(6, -1.0, 1)] * 2])
        yield Deltas([delta(submit, 0, [], "", 0, finish=FinishReason.LENGTH)])

    async with http_gateway(peer_type=scripted(script)) as gateway:
        for fields in ({"logprobs": 10}, {}):
            for stream in (False, True):
                body = {"prompt": "pqr", "echo": True, "max_tokens": 0, "stream": stream, **fields}
                reply = await gateway.post(COMPLETIONS, body)
                assert gateway.peer.last().sampling.prompt_logprobs == fields.get("logprobs", 0)
                if stream:
                    assert texts(COMPLETIONS, reply.events()) == {0: "pqr"}
                else:
                    (choice,) = reply.json()["choices"]
                    assert choice["text"] == "pqr" and choice["finish_reason"] == "length"
                    assert (choice["logprobs"] is not None) == bool(fields)
        for missing in ({"max_tokens": None}, {}):
            await gateway.post(COMPLETIONS, {"prompt": "x", **missing})
            assert gateway.peer.last().sampling.max_tokens is None


@in_loop
async def test_d9_tool_calls_are_told_whole_and_in_parts():
    """D9: a call without arguments, one in parts, text beside it; a cut one ends with length."""
    parts = [
        [ToolCallDelta(0, "call_a", "look", ""), ToolCallDelta(1, "call_b", "find")],
        [ToolCallDelta(1, arguments='{"x"')],
        [ToolCallDelta(1, arguments=":1}")],
    ]

    def script(submit):
        total = 0
        for i, calls in enumerate(parts):
            total += sum(len(call.arguments.encode()) + bool(call.name) for call in calls)
            last = i == len(parts) - 1
            reason = (FinishReason.LENGTH if submit.sampling.max_tokens == 3 else FinishReason.STOP) if last else None
            yield Deltas([delta(submit, i, [i], "T", i + 1, finish=reason, tool_calls=calls, num_call_bytes=total)])

    tools = [{"type": "function", "function": {"name": "look"}}]
    tools += [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}, "strict": True}}]
    async with http_gateway(peer_type=scripted(script)) as gateway:
        body = {"messages": USER, "tools": tools, "parallel_tool_calls": False, "tool_choice": "required"}
        (choice,) = (await gateway.post(CHAT, body)).json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "TTT"
        calls = [(call["id"], call["type"], call["function"]) for call in choice["message"]["tool_calls"]]
        assert calls == [
            ("call_a", "function", {"name": "look", "arguments": ""}),
            ("call_b", "function", {"name": "find", "arguments": '{"x":1}'}),
        ]
        sent = gateway.peer.last().tools
        assert [(t.name, t.parameters, t.strict) for t in sent.tools] == [
            ("look", "", False),
            ("find", '{"type":"object"}', True),
        ]
        assert sent.choice is ToolChoice.REQUIRED and not sent.parallel
        events = (await gateway.post(CHAT, body | {"stream": True})).events()
        for event in events:
            msgspec.convert(event, responses.ChatCompletionChunk)
        told = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
        assert told[0] == {
            "index": 0,
            "id": "call_a",
            "type": "function",
            "function": {"name": "look", "arguments": ""},
        }
        assert "".join(call["function"]["arguments"] for call in told if call["index"] == 1) == '{"x":1}'
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        (choice,) = (await gateway.post(CHAT, body | {"max_tokens": 3})).json()["choices"]
        assert choice["finish_reason"] == "length"
        message = choice["message"]
        messages = [*USER, message, {"role": "tool", "content": "42", "tool_call_id": "call_b"}]
        named = {"type": "function", "function": {"name": "find"}}
        await gateway.post(CHAT, body | {"messages": messages, "tool_choice": named})
        sent = gateway.peer.last()
        assert sent.prompt.messages[1].tool_calls[1].arguments == '{"x":1}' and sent.tools.name == "find"
        assert sent.prompt.messages[2].tool_call_id == "call_b"


@in_loop
async def test_formats_reach_the_tokenizer():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    cases = [
        ({"response_format": {"type": "json_object"}}, StructuredKind.JSON_OBJECT, ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema, "strict": True},
                }
            },
            StructuredKind.JSON_SCHEMA,
            schema,
        ),
        ({"structured_outputs": {"json": schema}}, StructuredKind.JSON_SCHEMA, schema),
        ({"structured_outputs": {"regex": "a+"}}, StructuredKind.REGEX, "a+"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredKind.GRAMMAR, 'start: "a"'),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredKind.CHOICE, ["a", "b"]),
    ]
    async with http_gateway() as gateway:
        for fields, kind, text in cases:
            for path in (COMPLETIONS, CHAT):
                assert (await gateway.post(path, body_for(path, **fields))).status == 200
                structured = gateway.peer.last().sampling.structured
                assert structured.kind is kind
                assert (structured.text if isinstance(text, str) else json.loads(structured.text)) == text


@in_loop
async def test_errors_behind_have_this_apis_names_and_statuses():
    cases = [
        (ErrorCode.INVALID_ARGUMENT, "prompt_token_ids", 400, "prompt"),
        (ErrorCode.RESOURCE_EXHAUSTED, "", 429, None),
        (ErrorCode.UNAVAILABLE, "", 503, None),
        (ErrorCode.FAILED_PRECONDITION, "messages", 400, "messages"),
        (ErrorCode.INTERNAL, "", 500, None),
        (ErrorCode.UNIMPLEMENTED, "structured", 400, "response_format"),
    ]
    for code, field, status, param in cases:

        def script(submit, code=code, field=field):
            yield Failed(submit.request_id, submit.attempt, code, "it failed", field, retry_after_ms=1500)

        class Refusing(Scripted):
            pass

        Refusing.script = staticmethod(script)
        async with http_gateway(peer_type=Refusing, recovery_deadline=0.1) as gateway:
            reply = await gateway.post(COMPLETIONS, {"prompt": [1], "response_format": {"type": "json_object"}})
            assert reply.status == status and reply.error["param"] == param, (code, reply.body)
            if status in (429, 503):
                assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_in_a_stream_is_its_last_event(path):
    def script(submit):
        yield Deltas([delta(submit, 0, [1], "a", 1)])
        yield Failed(submit.request_id, submit.attempt, ErrorCode.INTERNAL, "broken")

    @in_loop
    async def test():
        async with http_gateway(peer_type=scripted(script)) as gateway:
            reply = await gateway.post(path, body_for(path, stream=True))
            assert reply.status == 200
            *_, last, end = reply.body.split(b"\n\n")
            assert end == b"" and json.loads(last[6:])["error"]["message"] == "broken" and b"[DONE]" not in reply.body

    test()


@in_loop
async def test_an_error_before_a_streams_beginning_is_a_status():
    class Refusing(AnsweringPeer):
        def _answer(self, message):
            if isinstance(message, Submit):
                code = ErrorCode.INVALID_ARGUMENT
                self._say(Failed(message.request_id, message.attempt, code, "messages: no", "messages"))

    async with http_gateway(peer_type=Refusing) as gateway:
        reply = await gateway.post(CHAT, {"messages": USER, "stream": True})
        assert reply.status == 400 and reply.error["param"] == "messages"


@in_loop
async def test_the_queue_is_bounded_with_retry_after():
    async with http_gateway(max_concurrent_requests=2) as gateway:
        gateway.peer.silent = True
        waiting = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": ["a", "b"]}))
        await until(lambda: gateway.table.num_open_streams == 2)
        reply = await gateway.post(CHAT, {"messages": USER})
        assert reply.status == 429 and reply.error["type"] == "rate_limit_error" and reply.headers["retry-after"] == "1"
        waiting.cancel()
        await until(lambda: gateway.table.num_open_streams == 0)
        assert (await gateway.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})).status == 429
        assert gateway.table.num_open_streams == 0


@in_loop
async def test_a_prompt_is_cut_only_when_asked():
    """F6: truncate_prompt_tokens keeps the last tokens; the fake's texts have the ids 1 and 2."""
    async with http_gateway() as gateway:
        await gateway.post(COMPLETIONS, {"prompt": [4, 5, 6], "truncate_prompt_tokens": 2})
        assert gateway.peer.last().prompt == TokensPrompt([5, 6])
        await gateway.post(COMPLETIONS, {"prompt": "long", "truncate_prompt_tokens": 1, "echo": True})
        assert gateway.peer.last().prompt == TokensPrompt([2])
        await gateway.post(CHAT, {"messages": USER, "truncate_prompt_tokens": -1})
        assert gateway.peer.last().prompt == TokensPrompt([1, 2]) and len(gateway.peer.all(Encode)) == 2


@in_loop
async def test_models_tokens_and_readiness():
    async with http_gateway(served_model_names=["one", "org/two"]) as gateway:
        models = (await gateway.call("GET", "/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["one", "org/two"]
        assert (await gateway.call("GET", "/v1/models/org/two")).json()["max_model_len"] == 512
        assert (await gateway.post(COMPLETIONS, {"prompt": "x", "model": "org/two"})).json()["model"] == "org/two"
        assert (await gateway.post(COMPLETIONS, {"prompt": "x", "model": "tiny"})).status == 404
        tokens = (await gateway.post("/tokenize", {"prompt": "x", "return_token_strs": True})).json()
        assert tokens == {"count": 2, "max_model_len": 512, "tokens": [1, 2], "token_strs": ["a", "bytes:\\xc3"]}
        assert (await gateway.post("/tokenize", {"messages": USER})).json()["count"] == 2
        assert (await gateway.post("/detokenize", {"tokens": [1, 2]})).json() == {"prompt": "1 2"}
        assert (await gateway.post("/detokenize", {"tokens": [-1]})).error["param"] == "tokens[0]"
        for body in ({}, {"prompt": "x", "messages": USER}):
            assert (await gateway.post("/tokenize", body)).status == 400
        assert (await gateway.call("GET", "/ready")).json() == {"ready": True, "reason": ""}
        gateway.peer.ready = False
        gateway.table.on_status(gateway.peer)
        reply = await gateway.call("GET", "/ready")
        assert reply.status == 503 and "scheduler or the executor" in reply.json()["reason"]
        gateway.peer.alive = False
        gateway.table.on_down(gateway.peer, "gone")
        assert "no tokenizer" in (await gateway.call("GET", "/ready")).json()["reason"]
        assert (await gateway.call("GET", "/health")).status == 200
        reply = await gateway.call("GET", "/v1/models")
        assert reply.status == 503 and reply.headers["retry-after"] == "1" and reply.error
        gateway.table.draining = True
        assert "shutting down" in (await gateway.call("GET", "/ready")).json()["reason"]


@in_loop
async def test_a_request_waits_for_a_tokenizer_that_is_away():
    async with http_gateway() as gateway:
        assert (await gateway.post(CHAT, {"messages": USER})).status == 200
        gateway.peer.alive = False
        gateway.table.on_down(gateway.peer, "gone")
        waiting = asyncio.create_task(gateway.post(CHAT, {"messages": USER, "model": "tiny"}))
        await until(lambda: gateway.table.num_open_streams == 1)
        gateway.table.on_up(AnsweringPeer(gateway.table, ("d",), name="t2"))
        assert (await waiting).json()["choices"][0]["message"]["content"] == "d"


@in_loop
async def test_token_ids_beside_the_text():
    async with http_gateway() as gateway:
        (choice,) = (await gateway.post(COMPLETIONS, {"prompt": "x", "return_token_ids": True})).json()["choices"]
        assert choice["token_ids"] == [100, 101, 102] and choice["prompt_token_ids"] == [5, 6, 7]
        body = {"messages": USER, "return_token_ids": True, "stream": True}
        chunks = [event["choices"][0] for event in (await gateway.post(CHAT, body)).events()]
        assert [token_id for chunk in chunks for token_id in chunk.get("token_ids", ())] == [100, 101, 102]
