"""HTTP on the real line: four processes, a tiny model whose tokens are bytes; the openai package and raw sockets."""

import asyncio
import json
import signal
import threading
import time

import httpx2
import openai
import pytest
from support.doors import Refused
from support.http import call, connect, post, read_all, request_bytes
from support.lines import line_of
from support.stack import eventually
from support.tiny_model import make_tiny_llama

CONTEXT = 4096
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0.0}
LONG = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 3000}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(folder, CONTEXT)
    settings = {
        "tokenizer_tokenizer": "byte",
        "executor_num_blocks": 1024,
        "scheduler_max_num_seqs": 4,
        "scheduler_max_num_batched_tokens": 256,
        "scheduler_enable_prefix_caching": "false",
    }
    with line_of(tmp_path_factory.mktemp("stack"), folder, **settings) as stack:
        yield stack


@pytest.fixture
def http(line):
    return line.http_address


@pytest.fixture
def api(http):
    with openai.OpenAI(base_url=f"http://{http}/v1", api_key="any", max_retries=0) as client:
        yield client


# --- the openai package ---------------------------------------------------------------------------


def test_openai_completions_and_chat(api):
    (model,) = api.models.list().data
    assert api.models.retrieve(model.id).id == model.id
    whole = api.completions.create(model=model.id, prompt="Once", max_tokens=8, **GREEDY)
    parts = list(api.completions.create(model=model.id, prompt="Once", max_tokens=8, stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == "length"
    options = {"model": model.id, "messages": USER, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2}
    chat = api.chat.completions.create(**options, **GREEDY)
    assert chat.usage.completion_tokens == len(chat.choices[0].logprobs.content) == 8
    stream = api.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}, n=2, seed=1, extra_body={"top_k": 1}
    )
    texts, usage = {0: "", 1: ""}, None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == dict.fromkeys((0, 1), chat.choices[0].message.content)
    assert usage.completion_tokens == 16 and usage.prompt_tokens == chat.usage.prompt_tokens


def test_openai_async_and_its_stream_helper(http):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="any", max_retries=0) as api:
            options = {"model": "", "messages": USER, "max_tokens": 8, "temperature": 0.0}
            many = await asyncio.gather(*(api.chat.completions.create(**options) for _ in range(8)))
            (text,) = {answer.choices[0].message.content for answer in many}
            # It is an exception to the helper when the length ends a text.
            async with api.chat.completions.stream(**options, stop=text[-1]) as stream:
                final = await stream.get_final_completion()
        assert final.choices[0].message.content == text.partition(text[-1])[0]

    asyncio.run(run())


def test_openais_exceptions(api):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        api.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="", messages=USER, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        list(api.chat.completions.create(model="", messages=[{"role": "jester", "content": "x"}], stream=True))
    assert caught.value.param == "messages" and "jester" in str(caught.value)


def test_openai_leaving_a_stream_ends_it(api, line):
    """C10."""
    for _ in range(20):
        stream = api.chat.completions.create(model="", messages=USER, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    eventually(line.client.at_rest, 5.0)


# --- parity ---------------------------------------------------------------------------------------

# The fields are those of HTTP; `_grpc` turns them.
TABLE = [
    {"prompt": "Once", "max_tokens": 12},
    {"prompt": [1, 2, 3], "max_tokens": 12},
    {"prompt": "Once", "max_tokens": 12, "n": 3, "seed": 7, "temperature": 1.0},
    {"prompt": "Grüße 😀", "max_tokens": 30, "temperature": 1.2, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"prompt": "x", "max_tokens": 1, "logit_bias": {"240": 100}},  # A2: a character is cut
    {"prompt": "x", "max_tokens": 5, "logit_bias": {"240": 100}},
    {"prompt": "x", "max_tokens": 6, "logit_bias": {"65": 100}, "stop": ["AAA"]},  # A4
    {"prompt": "x", "max_tokens": 6, "logit_bias": {"65": 100}, "stop": "AB"},
    {"prompt": "x", "max_tokens": 6, "logit_bias": {"65": 100}, "stop": ["AAA"], "include_stop_str_in_output": True},
    {"prompt": "x", "max_tokens": 6, "logit_bias": {"65": 100}, "stop_token_ids": [65], "min_tokens": 3},
    {"prompt": "x", "logit_bias": {"257": 100}},
    {"prompt": "x", "max_tokens": 6, "logit_bias": {"257": 100}, "ignore_eos": True, "skip_special_tokens": False},
    {"prompt": "aaaa", "max_tokens": 20, "presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.3},
    {"prompt": "x", "max_tokens": 4, "logprobs": 3},
    {"prompt": "x", "max_tokens": 6, "temperature": 1e-4},  # B5
    {"messages": USER, "max_tokens": 10},
    {"messages": [{"role": "system", "content": "Be."}, *USER], "max_tokens": 10, "n": 2, "seed": 1},
    {"messages": [*USER, {"role": "assistant", "content": "Yo"}], "continue_final_message": True, "max_tokens": 5},
    {"messages": [{"role": "user", "content": ""}], "max_tokens": 5, "cache_salt": "s", "priority": 3},
    {"messages": USER, "max_tokens": 6, "logprobs": True, "top_logprobs": 4},
    {"messages": USER, "max_tokens": 6, "seed": 2, "temperature": 1.0, "logprobs": True, "n": 2, "top_k": 5},
    {"messages": USER, "max_tokens": 12, "temperature": 0.7, "seed": 9, "frequency_penalty": -1, "min_p": 0.2},
    {"messages": USER, "max_tokens": 9, "stop": ["~" * 40]},  # A7
    {"prompt": "x", "max_tokens": 6, "logit_bias": {"65": 100, "66": 99}, "logprobs": 2},
    {"prompt": "x", "structured_outputs": {"regex": "(ab){2}c"}},
    {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}, "logprobs": 5},  # A11
    {"prompt": "x", "structured_outputs": {"json": {"enum": [1, "zwei", None]}}, "temperature": 1.0, "seed": 5},
    {"prompt": "x", "structured_outputs": {"grammar": 'start: "a" /[bc]{3}/'}, "max_tokens": 3},
    {"messages": USER, "structured_outputs": {"regex": "[0-9]{4}"}, "n": 2, "seed": 1, "temperature": 1.0},
]
# What is wrong is told alike: the field, and that it is the client's fault.
WRONG = [
    {"prompt": ""},
    {"prompt": [1, 264], "max_tokens": 1},
    {"prompt": [1] * (CONTEXT - 1), "max_tokens": 2},
    {"prompt": [1] * CONTEXT, "max_tokens": 1},
    {"prompt": [1] * CONTEXT},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "top_p": 0},
    {"prompt": "x", "n": 0},
    {"prompt": "x", "n": 1000},
    {"prompt": "x", "max_tokens": 10**12},
    {"prompt": "x", "stop": [""]},
    {"prompt": "x", "stop": ["y"] * 100},
    {"prompt": "x", "logprobs": 1000},
    {"prompt": "x", "logit_bias": {"264": 1}},
    {"prompt": "x", "logit_bias": {"5": 1000}},
    {"prompt": "x", "stop_token_ids": [264]},
    {"prompt": "x", "min_tokens": 5, "max_tokens": 3},
    {"prompt": "x", "seed": -1},
    {"prompt": "x", "structured_outputs": {"regex": "(a"}},  # E1
    {"prompt": "x", "structured_outputs": {"json": {"type": "yaml"}}},
    {"prompt": "x", "structured_outputs": {"grammar": 'root ::= "a"\nroot ::= "b"'}},  # E2
    {"prompt": "x", "structured_outputs": {"regex": "a"}, "ignore_eos": True},
    {"prompt": "x", "cache_salt": "s" * 5000},
    {"prompt": "x", "frequency_penalty": 3},
    {"prompt": "x", "min_p": 2},
    {"prompt": "x", "top_k": -3},
    {"prompt": "x", "repetition_penalty": 0},
    {"prompt": "x", "max_tokens": 0},
    {"messages": []},
    {"messages": [{"role": "jester", "content": "x"}]},
]


def test_parity_of_all_doors(line, http):
    """The same request through gRPC, the Python client, HTTP and its streams: tokens, text, finish and stop reason,
    log-probabilities, usage; or what kind of error it is, and about which field."""
    ways = line.doors
    for fields in [*TABLE, *WRONG]:
        expected = ways["grpc"](fields)
        assert isinstance(expected, Refused) == (fields in WRONG), (fields, expected)
        for name, door in ways.items():
            assert door(fields) == expected, (name, fields)


# --- cases ----------------------------------------------------------------------------------------


def test_a1_a2_no_delta_has_half_a_character(http):
    """A1: texts of several bytes a character, each its own token, echoed; A2: the rest of a cut one is one U+FFFD."""
    text = "\U0001f600\u9f9c\uac00\U0001f1e9\U0001f1ea\U0001f468\u200d\U0001f469\u200d\U0001f467"
    body = {"prompt": list(text.encode()), "echo": True, "max_tokens": 0}
    assert post(http, COMPLETIONS, body).json()["choices"][0]["text"] == text
    for count in (1, 2):
        body = {"prompt": "x", "max_tokens": count, "logit_bias": {"240": 100}}
        whole = post(http, COMPLETIONS, body).json()
        parts = post(http, COMPLETIONS, body | {"stream": True}).events()
        assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
        assert set(whole["choices"][0]["text"]) <= {"\ufffd"} and whole["usage"]["completion_tokens"] == count


def test_a11_b12_scoring_a_prompt(http):
    """A11: no -inf with top_k 1; B12: log-probabilities of a prompt without a token more, in one step or several."""
    body = {"prompt": "score me", "echo": True, "logprobs": 5, "max_tokens": 0, "top_k": 1, "temperature": 1}
    (choice,) = post(http, COMPLETIONS, body).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None and all(-9999 <= p <= 0 for p in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == 9 and "".join(logprobs["tokens"][1:]) == "score me"
    one_more = post(http, COMPLETIONS, body | {"max_tokens": 1}).json()["choices"][0]["logprobs"]
    assert one_more["token_logprobs"][1:9] == pytest.approx(logprobs["token_logprobs"][1:], abs=1e-3)
    assert one_more["tokens"][:9] == logprobs["tokens"] and one_more["text_offset"][:9] == logprobs["text_offset"]
    events = post(http, COMPLETIONS, body | {"max_tokens": 3, "stream": True, "prompt": "long " * 200}).events()
    assert events[0]["choices"][0]["text"] == "long " * 200
    assert sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in events if e["choices"][0]["logprobs"]) == 1004


def test_b2_seeded_choices_differ_and_come_again(http):
    body = {"prompt": "x", "n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 10}
    texts = [[c["text"] for c in post(http, COMPLETIONS, body).json()["choices"]] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
    unseeded = {post(http, COMPLETIONS, body | {"seed": None, "n": 1}).json()["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) == 3  # B4


def test_d1_parts_are_the_same_tokens(http):
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    counts = [
        post(http, "/tokenize", {"messages": [{"role": "user", "content": content}]}).json()["tokens"]
        for content in ("hi\nthere", parts)
    ]
    assert counts[0] == counts[1]
    text = post(http, "/detokenize", {"tokens": counts[0][1:]}).json()["prompt"]
    assert text == "user: hi\nthere\nassistant: "


def test_f6_a_prompt_that_cannot_fit_tells_both_counts_unless_it_may_be_cut(http):
    for path, prompt in (
        (COMPLETIONS, {"prompt": "x" * 5000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}),
    ):
        reply = post(http, path, prompt | {"max_tokens": 4})
        assert reply.status == 400 and "50" in reply.error["message"] and "4096" in reply.error["message"]
        answer = post(http, path, prompt | {"max_tokens": 4, "truncate_prompt_tokens": -1}).json()
        assert answer["usage"]["prompt_tokens"] == 4092 and answer["usage"]["completion_tokens"] == 4
    begin = time.monotonic()
    assert post(http, COMPLETIONS, {"prompt": "x" * 5_000_000}).status == 400
    assert post(http, COMPLETIONS, {"prompt": "x" * 50_000_000}).status == 413
    assert time.monotonic() - begin < 20
    (bad,) = [post(http, COMPLETIONS, {"prompt": ["ok", "x" * 5000], "max_tokens": 4})]
    assert bad.status == 400 and bad.error["param"] == "prompt[1]"


def test_g6_an_answer_of_more_than_four_megabytes_comes_whole(http):
    body = {"prompt": [97, 98] * 2000, "prompt_logprobs": 20, "max_tokens": 0}
    reply = post(http, COMPLETIONS, body)
    (choice,) = reply.json()["choices"]
    assert len(reply.body) > 4 << 20 and len(choice["prompt_logprobs"]) == 4000
    assert all(20 <= len(entry) <= 21 for entry in choice["prompt_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_c12_a_client_that_leaves_ends_its_work_in_every_phase(line, http, phase, stream):
    eventually(line.client.at_rest, 10.0)
    blockers = [connect(http) for _ in range(4 if phase == "queue" else 0)]
    for blocker in blockers:
        blocker.sendall(request_bytes("POST", CHAT, {"messages": USER, "stream": True, **LONG}))
    if blockers:
        eventually(lambda: line.client.loads().num_running == 4, 10.0)
    prompt = "x" * (4000 if phase == "prefill" else 1)
    options = {"max_tokens": 50, "ignore_eos": True} if phase == "prefill" else LONG
    with connect(http) as connection:
        connection.sendall(request_bytes("POST", COMPLETIONS, {"prompt": prompt, "stream": stream, **options}))
        if phase == "queue":
            eventually(lambda: line.client.loads().num_waiting == 1, 10.0)
        else:
            eventually(lambda: line.client.loads().num_running == 1, 10.0)
        if phase == "decode":
            time.sleep(0.2)
    begin = time.monotonic()
    eventually(lambda: line.client.loads().num_waiting == 0, 5.0)
    if not blockers:
        eventually(line.client.at_rest, 5.0)
    assert time.monotonic() - begin < 1.5
    for blocker in blockers:
        blocker.close()
    eventually(line.client.at_rest, 5.0)


def test_g2_readiness_follows_the_executor_and_streams_go_on(line, http):
    """G2: killed or frozen, /ready is 503 with a reason and /health 200; an open stream waits, and ends the same."""
    body = {"messages": USER, "stream": True, "temperature": 0.0, "ignore_eos": True, "max_tokens": 1500}
    whole = post(http, CHAT, body).body
    texts = []
    reader = threading.Thread(target=lambda: texts.append(post(http, CHAT, body)))
    reader.start()
    eventually(lambda: line.client.loads().num_running == 1, 10.0)
    line.kill("executor")
    eventually(lambda: call(http, "GET", "/ready").status == 503, 8.0)
    assert "executor" in call(http, "GET", "/ready").json()["reason"] and call(http, "GET", "/health").status == 200
    line.start("executor")
    eventually(lambda: call(http, "GET", "/ready").status == 200, 60.0)
    reader.join(60.0)
    assert _text(texts[0].body) == _text(whole)
    line.signal("executor", signal.SIGSTOP)
    eventually(lambda: call(http, "GET", "/ready").status == 503, 15.0)
    line.signal("executor", signal.SIGCONT)
    eventually(lambda: call(http, "GET", "/ready").status == 200, 30.0)


def _text(data):
    events = [json.loads(part[6:]) for part in data.split(b"\n\n") if part.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def test_i4_health_is_quick_under_load(line, http):
    streams = [connect(http) for _ in range(40)]
    for stream in streams:
        stream.sendall(request_bytes("POST", COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 40, **GREEDY}))
    worst = 0.0
    for _ in range(20):
        begin = time.monotonic()
        assert call(http, "GET", "/health").status == 200
        worst = max(worst, time.monotonic() - begin)
    for stream in streams:
        assert read_all(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        stream.close()
    assert worst < 2.0


def test_httpx_speaks_it_too(http):
    """Keep-alive and HTTP's own words, by a client that is not ours."""
    with httpx2.Client(base_url=f"http://{http}") as client:
        for _ in range(3):
            assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert client.head("/health").status_code == 200
        with client.stream("POST", CHAT, json={"messages": USER, "stream": True, "max_tokens": 3}) as response:
            assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]
