"""Cases of chat templates, tools, structured output and stopping, over HTTP and gRPC, on a model of the test's own:
its tokens are bytes, of which one is missing, and its template refuses what templates refuse."""

import json
import signal
import threading

import pytest
from support.doors import CHAT, COMPLETIONS, Refused
from support.http import call, post
from support.lines import line_of
from support.stack import eventually
from support.tiny_model import make_tiny_llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quartet.services.tokenizer.loaded import byte_level_alphabet
from quartet.shared.pb import inference_pb2 as pb

BOS, EOS = "<s>", "</s>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "[{{ m.role }}]{{ m.content or '' }}{% endfor %}{% if tools %}<tool_call>{% endif %}[assistant]"
)
USER = {"role": "user", "content": "Hi"}
GREEDY = {"temperature": 0.0, "max_tokens": 12}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
DOORS = ("grpc", "client", "http", "http-stream")


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(folder, 2048)
    # No token has a capital Z in it, so that a text that needs one leads nowhere.
    vocab = {"zz" if piece == "Z" else piece: byte for piece, byte in byte_level_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (BOS, EOS)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    settings = {"tokenizer_chat_template": TEMPLATE, "executor_num_blocks": 512, "gateway_drain_timeout": 200}
    with line_of(tmp_path_factory.mktemp("stack"), folder, **settings) as running:
        yield running


@pytest.fixture
def http(line):
    return line.http_address


def chat(http, messages=(USER,), **fields):
    """The choice, whole; and, streamed, its text, calls and finish reason, which have to be the same."""
    body = {"messages": list(messages), **GREEDY, **fields}
    (choice,) = post(http, CHAT, body).json()["choices"]
    text, calls, reason = "", [], None
    for event in post(http, CHAT, body | {"stream": True}).events():
        (part,) = event["choices"]
        assert reason is None
        text += part["delta"].get("content") or ""
        for delta in part["delta"].get("tool_calls", ()):
            if "id" in delta:
                calls.append(["", ""])
            calls[delta["index"]][0] += delta["function"].get("name") or ""
            calls[delta["index"]][1] += delta["function"].get("arguments") or ""
        reason = part["finish_reason"]
    message = choice["message"]
    assert text == (message["content"] or "") and reason == choice["finish_reason"]
    whole = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    assert calls == whole
    return text, calls, reason


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOORS)
def test_d3_what_the_template_refuses_is_a_400_in_its_own_words(line, name):
    door = line.doors[name]
    for messages, words in (
        ([{"role": "system", "content": "Be brief."}, USER], "System role not supported"),
        ([USER, USER], "Conversation roles must alternate"),
    ):
        refused = door({"messages": messages, **GREEDY})
        assert refused == Refused("INVALID_ARGUMENT", "messages", "") and words in refused.message
    answered = door({"messages": [USER, {"role": "assistant", "content": "Yo"}, USER], **GREEDY})
    assert answered.completion_tokens > 0


def test_d3_other_apis_say_it_too(http):
    reply = post(http, "/v1/messages", {"messages": [USER], "system": "Be brief.", "max_tokens": 3})
    assert reply.status == 400 and "System role not supported" in reply.json()["error"]["message"]
    reply = post(http, "/v1/responses", {"input": "Hi", "instructions": "Be brief."})
    assert reply.status == 400 and "System role not supported" in reply.error["message"]


def test_d4_without_a_template_completions_work_and_chats_say_what_to_configure(line, http):
    line.kill("tokenizer")
    line.start("tokenizer", tokenizer_chat_template="")
    try:
        eventually(lambda: call(http, "GET", "/ready").status == 200, 30.0)
        for door in line.doors.values():
            assert door({"prompt": "Once", **GREEDY}).completion_tokens > 0
            refused = door({"messages": [USER], **GREEDY})
            assert refused.code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
            assert "--chat-template" in refused.message
    finally:
        line.restart("tokenizer")
        eventually(lambda: call(http, "GET", "/ready").status == 200, 30.0)
    assert post(http, CHAT, {"messages": [USER], **GREEDY}).status == 200


def test_d6_a_template_that_writes_bos_gets_no_second_one(line, http):
    by_hand = f"{BOS}[user]Hi[assistant]"
    tokens = post(http, "/tokenize", {"messages": [USER]}).json()["tokens"]
    assert tokens[0] == 256 and tokens.count(256) == 1
    assert tokens == post(http, "/tokenize", {"prompt": by_hand, "add_special_tokens": False}).json()["tokens"]
    assert post(http, "/tokenize", {"prompt": "Hi"}).json()["tokens"][0] == 256
    for door in line.doors.values():
        whole = door({"messages": [USER], **GREEDY})
        assert whole.prompt_tokens == len(tokens)
        assert door({"prompt": by_hand, "add_special_tokens": False, **GREEDY}).token_ids == whole.token_ids
    # A prompt that begins with the text of BOS has it once more only if that is asked for.
    twice = post(http, "/tokenize", {"prompt": by_hand}).json()["tokens"]
    assert twice.count(256) in (1, 2)
    assert post(http, COMPLETIONS, {"prompt": by_hand, **GREEDY}).json()["usage"]["prompt_tokens"] == len(twice)


# --- tools ----------------------------------------------------------------------------------------


def test_d9_text_passes_where_tools_are_offered_and_unused(http):
    text, calls, reason = chat(http, tools=[NOW], logit_bias={"97": 100}, ignore_eos=True)
    assert text == "a" * 12 and calls == [] and reason == "length"
    text, calls, _ = chat(http, tools=[NOW], structured_outputs={"regex": "no{3}"}, logit_bias={"110": 5})
    assert text == "nooo" and calls == []


def test_d9_a_call_without_arguments_is_there_and_one_that_is_cut_is_none_of_tool_calls(http):
    text, calls, reason = chat(http, tools=[NOW], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    assert (text, reason) == ("", "tool_calls")
    assert [[name, json.loads(arguments or "{}")] for name, arguments in calls] == [["now", {}]]
    for limit in (3, 20, 30):
        text, calls, reason = chat(http, tools=[NOW], tool_choice="required", max_tokens=limit)
        assert reason == "length" and all(name == "now" for name, _ in calls)


def test_d9_over_grpc(line):
    tools = pb.ToolParams(tools=[pb.Tool(name="now")], choice=pb.TOOL_CHOICE_REQUIRED, parallel=False)
    for limit, reason in ((120, "STOP"), (3, "LENGTH")):
        result = line.client.generate([USER], tools=tools, max_tokens=limit, temperature=0.0)
        names = [part.name for part in result.choices[0].tool_calls if part.name]
        assert result.finish_reason == reason and names == (["now"] if reason == "STOP" else [])


# --- structured output ----------------------------------------------------------------------------


def test_e1_what_is_no_regex_is_that_requests_alone(line, http):
    bad = ["(a", "a)", "(?<=a)b", "[", "a{2,1}"]
    plain = {"prompt": "Once", **GREEDY}
    expected = line.doors["http"](plain).token_ids
    for regex in bad:
        for door in line.doors.values():
            refused = door({"prompt": "x", "structured_outputs": {"regex": regex}, **GREEDY})
            assert refused == Refused("INVALID_ARGUMENT", "structured_outputs", ""), (regex, refused)
        assert line.doors["http-stream"](plain).token_ids == expected
    # An empty branch, and one that is only long, are none of these.
    for door in line.doors.values():
        assert door({"prompt": "x", "structured_outputs": {"regex": "(a|)b"}, **GREEDY}).text in ("ab", "b")
        long = door({"prompt": "x", "structured_outputs": {"regex": "a" * 100_000}, **GREEDY})
        assert long.text == "a" * 12 and long.said.finish_reason == "length"
        over = door({"prompt": "x", "structured_outputs": {"regex": "a" * 200_000}, **GREEDY})
        assert over.code == "INVALID_ARGUMENT"


def test_e2_a_bad_grammar_between_good_ones(line, http):
    for door in line.doors.values():
        good = {"prompt": "x", "structured_outputs": {"grammar": 'root ::= "yes" | "no"'}, **GREEDY}
        bad = {"prompt": "x", "structured_outputs": {"grammar": 'root ::= "yes"\nroot ::= "no"'}, **GREEDY}
        assert door(good).text in ("yes", "no")
        assert door(bad) == Refused("INVALID_ARGUMENT", "structured_outputs", "")
        assert door(good).text in ("yes", "no") and door({"messages": [USER], **GREEDY}).completion_tokens
        assert call(http, "GET", "/ready").status == 200


def test_e4_json_of_a_model_that_knows_none_parses_or_is_cut(http):
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    blanks = {"32": 5, "10": 5, "9": 5}  # as models that circle in blanks
    text, _, reason = chat(http, response_format=form, max_tokens=400, logit_bias=blanks)
    assert reason == "stop" and set(json.loads(text)) == {"a"}
    text, _, reason = chat(http, response_format={"type": "json_object"}, max_tokens=60, logit_bias=blanks)
    assert "\n\n" not in text and "\n" + " " * 17 not in text
    assert reason == "length" or isinstance(json.loads(text), dict)


def test_e6_every_form_of_response_format(http):
    plain = chat(http)
    assert chat(http, response_format={"type": "text"}) == chat(http, response_format=None) == plain
    for form in (
        {"type": "json_schema"},
        {"type": "yaml"},
        {},
        "json_object",
        {"type": "json_schema", "json_schema": 1},
    ):
        reply = post(http, CHAT, {"messages": [USER], "response_format": form})
        assert reply.status == 400 and reply.error["param"].startswith("response_format"), (form, reply)


@pytest.mark.parametrize("name", DOORS)
def test_a11_log_probabilities_where_one_token_is_allowed(line, name):
    answer = line.doors[name]({"prompt": "x", "structured_outputs": {"choice": ["abc"]}, "logprobs": 5, **GREEDY})
    assert answer.text == "abc" and answer.said.logprobs[0] == 0.0
    tops = answer.said.top[0]
    assert tops[0] == 0.0 and set(tops[1:]) == {-9999.0}


def test_a_structure_that_leads_nowhere_is_the_requests_own_fault(line, http):
    """Half of it can be written: what has come stays, and the error says whose it is."""
    body = {"prompt": "x", "structured_outputs": {"regex": "abZ"}, **GREEDY}
    reply = post(http, COMPLETIONS, body)
    assert reply.status == 400 and reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == "structured_outputs" and "no token" in reply.error["message"]
    stream = post(http, COMPLETIONS, body | {"stream": True})
    *events, last = [json.loads(part[6:]) for part in stream.body.split(b"\n\n") if part]
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    assert last["error"]["type"] == "invalid_request_error" and last["error"]["param"] == "structured_outputs"
    for name in ("grpc", "client"):
        assert line.doors[name](body).code == "INVALID_ARGUMENT"
    neighbours = [threading.Thread(target=post, args=(http, COMPLETIONS, body)) for _ in range(4)]
    for thread in neighbours:
        thread.start()
    assert line.doors["http"]({"prompt": "Once", **GREEDY}).completion_tokens == 12
    for thread in neighbours:
        thread.join()
    eventually(line.client.at_rest, 10.0)


# --- stopping -------------------------------------------------------------------------------------


def test_g4_sigterm_lets_http_streams_end_and_takes_nothing_new(line, http):
    body = {"prompt": "Once", "temperature": 0.0, "max_tokens": 400, "ignore_eos": True, "stream": True}
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(post(http, COMPLETIONS, body))) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: line.client.loads().num_running == 3, 20.0)
    line.signal("gateway", signal.SIGTERM)
    eventually(lambda: _refused(http), 10.0)
    for thread in threads:
        thread.join(200)
    code = line.wait("gateway", 200)
    line.start("gateway")
    for reply in replies:
        assert sum(event["choices"][0]["finish_reason"] == "length" for event in reply.events()) == 1
    assert len(replies) == 3 and code == 0
    eventually(lambda: not _refused(http), 30.0)


def _refused(http):
    try:
        return call(http, "GET", "/ready").status == 503
    except OSError:
        return True
