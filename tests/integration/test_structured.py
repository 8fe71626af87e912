"""Structured output, tool calls and the prefix cache's control on the real model, over gRPC."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb import inference_pb2_grpc as pb_grpc

NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
UNHELPFUL = [{"role": "user", "content": "Sing!"}]


def structured(client, options, messages=UNHELPFUL, **more):
    given = {"max_tokens": 200, "temperature": 0.0, "seed": 3} | more
    return client.generate(messages, structured=options, **given)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_e4_a_schema_gives_a_value_of_it_whatever_the_prompt(client, temperature):
    result = structured(client, {"json_schema": json.dumps(NESTED)}, temperature=temperature, logprobs=5)
    value = json.loads(result.text)
    assert result.finish_reason == "STOP"
    assert set(value) == set(NESTED["properties"]) and 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"a", "b", "c"} and len(value["home"]["zip"]) == 5
    # A11: where few tokens are allowed, the others' log-probabilities are finite all the same.
    tops = [top.logprob for entry in result.choices[0].logprobs for top in entry.top]
    assert len(tops) == 5 * len(result.token_ids) and min(tops) == -9999.0


def test_e4_blanks_do_not_go_on_for_ever(client):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    for options in ({"json_schema": schema}, {"json_object": True}):
        result = structured(client, options, max_tokens=96)
        if result.finish_reason == "STOP":
            assert isinstance(json.loads(result.text), dict)
        assert " " * 17 not in result.text and "\n\n" not in result.text


def test_a_regex_a_choice_and_grammars_are_kept_to(client):
    assert structured(client, {"regex": r"\d{3}-\d{4}"}).text.replace("-", "").isdigit()
    assert structured(client, {"choice": {"texts": ["yes", "no", "maybe so"]}}).text in ("yes", "no", "maybe so")
    assert structured(client, {"grammar": 'start: "x" /[ab]{2}/ "y"'}).text[0::3] == "xy"
    assert structured(client, {"grammar": 'root ::= "yes" | "no"'}).text in ("yes", "no")


def test_neighbours_are_not_touched_and_choices_each_follow(client):
    plain = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    alone = client.generate("Once upon a time", **plain).token_ids
    with ThreadPoolExecutor(5) as pool:
        kept = [
            pool.submit(structured, client, {"regex": "(ab)+c"}, n=3, temperature=1.0, seed=i, max_tokens=40)
            for i in range(4)
        ]
        assert pool.submit(client.generate, "Once upon a time", **plain).result().token_ids == alone
    for future in kept:
        for choice in future.result().choices.values():
            assert choice.finish_reason == "LENGTH" or choice.text.replace("ab", "") == "c"


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "(abc"},
        {"regex": "(?<=a)b"},
        {"grammar": 'root ::= "yes"\nroot ::= "no"'},
        {"json_schema": '{"type": "yaml"}'},
    ],
)
def test_e1_e2_what_does_not_compile_is_an_error_of_that_request_alone(client, options):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, "Once upon a time", max_tokens=16, temperature=0.0)
        with pytest.raises(grpc.RpcError) as caught:
            structured(client, options)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("structured: ")
        assert running.result().text
    assert structured(client, {"regex": "a|b"}).text in ("a", "b")


def test_e2_a_long_regex_is_no_error_and_ends_nothing_but_itself(client):
    assert set(structured(client, {"regex": "a" * 100_000}, max_tokens=8).text) == {"a"}


def test_a_required_call_is_made_and_goes_on_after_its_answer(client):
    weather = pb.Tool(
        name="get_weather",
        description="The weather in a city.",
        parameters=json.dumps(
            {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            }
        ),
    )
    tools = pb.ToolParams(tools=[weather], choice=pb.TOOL_CHOICE_REQUIRED, parallel=False)
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    result = client.generate([question], tools=tools, max_tokens=120, temperature=0.0)
    (call,) = calls(result)
    assert result.finish_reason == "STOP" and result.text == "" and call["name"] == "get_weather"
    assert set(json.loads(call["arguments"])) == {"city"}
    answered = [
        question,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    tools.choice = pb.TOOL_CHOICE_NONE
    assert client.generate(answered, tools=tools, max_tokens=8, temperature=0.0).text


def calls(result):
    found = {}
    for part in result.choices[0].tool_calls:
        call = found.setdefault(part.index, {"id": part.id, "name": part.name, "arguments": ""})
        call["arguments"] += part.arguments
    return list(found.values())


def test_the_prefix_cache_is_read_written_and_reset_as_asked(client):
    options = {"max_tokens": 1, "temperature": 0.0}
    prompt = "A prompt that nobody else has, and that is long enough to fill some blocks of the cache. " * 4

    def cached(**more):
        return client.generate(prompt, **options, **more).usage.cached_tokens

    assert cached(write_prefix_cache=False) == 0 and cached(read_prefix_cache=False) == 0
    assert cached() > 0 and cached(read_prefix_cache=False) == 0
    stub = pb_grpc.InferenceServiceStub(client.channel)
    assert stub.ResetPrefixCache(pb.ResetPrefixCacheRequest()).num_blocks > 0
    assert cached() == 0 and cached() > 0
