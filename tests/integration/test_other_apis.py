"""/v1/responses and /v1/messages on the real line: the openai and anthropic packages, and the same answers as chats."""

import asyncio
import re
from pathlib import Path
from typing import Literal

import anthropic
import openai
import pydantic
import pytest
from support.client import Client
from support.http import post
from support.http_scripted import named_events
from support.stack import Stack
from support.tiny_model import make_tiny_llama

USER = [{"role": "user", "content": "Hi, who is there?"}]
SYSTEM = "Say little."
CHAT = [{"role": "system", "content": SYSTEM}, *USER]
EOS = 257
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(folder, 2048)
    stack = Stack(
        tmp_path_factory.mktemp("stack"),
        model=folder,
        tokenizer_tokenizer="byte",
        executor_dtype="float32",
        executor_num_blocks=512,
    ).start()
    client = Client(stack.address)
    try:
        client.wait_ready()
    except AssertionError as error:
        stack.stop()
        pytest.fail(f"{error}\n{stack.tail()}")
    finally:
        client.close()
    yield stack.http_address
    codes = stack.stop()
    assert set(codes.values()) == {0}, f"{codes}\n{stack.tail()}"


@pytest.fixture
def responses(line):
    with openai.OpenAI(base_url=f"http://{line}/v1", api_key="any", max_retries=0) as client:
        yield client.responses


@pytest.fixture
def messages(line):
    with anthropic.Anthropic(base_url=f"http://{line}", api_key="any", max_retries=0) as client:
        yield client.messages


def chat(line, **fields):
    """What /v1/chat/completions says: the text, how it ended, and the usage."""
    answer = post(line, "/v1/chat/completions", {"messages": CHAT, "temperature": 0, **fields}).json()
    (choice,) = answer["choices"]
    usage = answer["usage"]
    return choice["message"]["content"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 24},
        {"max_tokens": 24, "seed": 5, "temperature": 1.0, "top_p": 0.9},
        {"max_tokens": 40, "stop": True},
    ],
)
def test_the_same_answer_as_a_chat(line, fields):
    """Text, end and usage, as a whole and streamed, through all three."""
    if "stop" in fields:
        whole = chat(line, max_tokens=fields["max_tokens"])[0]
        fields = fields | {"stop": next(character for character in whole[3:] if character.isascii())}
    text, reason, prompt_tokens, completion_tokens = chat(line, **fields)
    assert reason == ("stop" if "stop" in fields else "length")
    body = {"temperature": 0, **fields, "read_prefix_cache": False}
    limit, stop = body.pop("max_tokens"), body.pop("stop", None)
    asked = {"input": USER, "instructions": SYSTEM, "max_output_tokens": limit, "stop": stop, **body}
    response = post(line, "/v1/responses", asked).json()
    streamed = named_events(post(line, "/v1/responses", asked | {"stream": True}))[-1]["response"]
    for answer in (response, streamed):
        assert answer["output"][0]["content"][0]["text"] == text
        assert answer["status"] == {"length": "incomplete", "stop": "completed"}[reason]
        usage = answer["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (prompt_tokens, completion_tokens)
        assert usage["input_tokens_details"]["cached_tokens"] == 0
    asked = {"messages": USER, "system": SYSTEM, "max_tokens": limit, "stop_sequences": stop and [stop], **body}
    message = post(line, "/v1/messages", asked).json()
    assert message["content"][0]["text"] == text
    assert message["stop_reason"] == {"length": "max_tokens", "stop": "stop_sequence"}[reason]
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (prompt_tokens, completion_tokens)
    events = named_events(post(line, "/v1/messages", asked | {"stream": True}))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == text
    assert events[-2]["usage"] == message["usage"] and events[-2]["delta"]["stop_reason"] == message["stop_reason"]


def test_openai_responses_sync_and_streamed(responses):
    options = {"model": "", "input": "Hi", "temperature": 0.0, "max_output_tokens": 12}
    whole = responses.create(**options, metadata={"a": "b"})
    assert whole.status == "incomplete" and whole.metadata == {"a": "b"} and whole.usage.output_tokens == 12
    events = list(responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
    forced = {"extra_body": {"logit_bias": {str(EOS): 100}}}
    with responses.stream(model="", input="Hi", **forced) as stream:
        final = stream.get_final_response()
    assert (final.status, final.output_text, final.usage.output_tokens) == ("completed", "", 1)
    with pytest.raises(openai.BadRequestError) as caught:
        responses.create(model="", input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as caught:
        responses.create(model="", input="x" * 5000)
    assert caught.value.param == "input"


def test_anthropic_messages_sync_and_streamed(line, messages):
    options = {"model": "", "messages": USER, "system": SYSTEM, "max_tokens": 12}
    greedy = {"extra_body": {"temperature": 0}}
    whole = messages.create(**options, **greedy)
    (block,) = whole.content
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    usage = whole.usage
    counted = messages.count_tokens(model="", messages=USER, system=SYSTEM).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    with messages.stream(**options, **greedy) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12
    # What the first request left in the prefix cache is told apart.
    assert final.usage.cache_read_input_tokens > 0
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted
    events = list(messages.create(**options, **greedy, stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    goes_on = [*USER, {"role": "assistant", "content": block.text[:4]}]
    continued = messages.create(model="", messages=goes_on, system=SYSTEM, max_tokens=8, **greedy)
    asked = {"messages": [CHAT[0], *goes_on], "continue_final_message": True, "max_tokens": 8, "temperature": 0}
    (choice,) = post(line, "/v1/chat/completions", asked).json()["choices"]
    assert continued.content[0].text == choice["message"]["content"]
    with pytest.raises(anthropic.BadRequestError, match=r"messages: has \d+ tokens"):
        messages.create(model="", max_tokens=9, messages=[{"role": "user", "content": "x" * 5000}])
    with pytest.raises(anthropic.NotFoundError):
        messages.create(**options | {"model": "claude"})


def test_both_async_at_once(line):
    async def run():
        async with (
            openai.AsyncOpenAI(base_url=f"http://{line}/v1", api_key="any", max_retries=0) as first,
            anthropic.AsyncAnthropic(base_url=f"http://{line}", api_key="any", max_retries=0) as second,
        ):

            async def by_openai():
                options = {"model": "", "input": USER, "instructions": SYSTEM, "max_output_tokens": 20}
                stream = await first.responses.create(**options, temperature=0, stream=True)
                return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

            async def by_anthropic():
                options = {"model": "", "messages": USER, "system": SYSTEM, "max_tokens": 20}
                async with second.messages.stream(**options, extra_body={"temperature": 0}) as stream:
                    return "".join([text async for text in stream.text_stream])

            async with asyncio.timeout(60):
                return await asyncio.gather(*(kind() for _ in range(4) for kind in (by_openai, by_anthropic)))

    texts = asyncio.run(run())
    assert set(texts) == {chat(line, max_tokens=20)[0]}


class City(pydantic.BaseModel):
    name: Literal["Ulm", "Bonn"]
    large: bool


def test_structured_parse_through_both(responses, messages):
    schema_options = {"temperature": 0.0}
    parsed = responses.parse(model="", input="Hi", text_format=City, max_output_tokens=400, **schema_options)
    assert isinstance(parsed.output_parsed, City) and parsed.status == "completed"
    parsed = messages.parse(model="", messages=USER, max_tokens=400, output_format=City, extra_body=schema_options)
    assert isinstance(parsed.parsed_output, City) and parsed.stop_reason == "end_turn"


def test_required_tools_through_both(responses, messages):
    schema = City.model_json_schema()
    tool = {"type": "function", "name": "visit", "parameters": schema, "strict": True}
    options = {"model": "", "temperature": 0.0, "max_output_tokens": 400}
    response = responses.create(input="Hi", tools=[tool], tool_choice="required", parallel_tool_calls=False, **options)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "visit") and City.model_validate_json(call.arguments)
    message = messages.create(
        model="",
        messages=USER,
        max_tokens=400,
        tools=[{"name": "visit", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "visit", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0},
    )
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "visit", "tool_use")
    assert City.model_validate(block.input)


def test_readme_anthropic_client(line, capsys):
    (example,) = re.findall(r"```python\n(from anthropic .*?)```", README.read_text(), re.DOTALL)
    code = example.replace("127.0.0.1:8000", line)
    assert code != example
    names = {}
    exec(code, names)
    names["client"].close()
    assert capsys.readouterr().out


def test_readme_responses(line, capsys):
    (example,) = re.findall(r"```python\n(print\(client\.responses.*?)```", README.read_text(), re.DOTALL)
    with openai.OpenAI(base_url=f"http://{line}/v1", api_key="none") as client:
        exec(example, {"client": client})
    assert capsys.readouterr().out
