"""Bad input is refused with the name of the field and the limit, and nothing else notices."""

import grpc
import pytest

from quartet.shared.pb import inference_pb2 as pb

CONTEXT = 2048


def words(count):
    return "one" + " one" * (count - 1)


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user", "content": ""}][:0]])
def test_f2_an_empty_prompt_is_refused(client, prompt):
    request = client.request(prompt) if prompt != [] else pb.GenerateRequest(token_ids=pb.TokenIds())
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Generate(request, timeout=10))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    client.generate("still here", max_tokens=1)


def test_no_prompt_at_all_is_refused(client):
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Generate(pb.GenerateRequest(), timeout=10))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "prompt" in caught.value.details()


@pytest.mark.parametrize("token_id", [49152, 2**31, 2**32 - 1])
def test_f3_an_id_outside_the_vocabulary_is_named(client, token_id):
    message = client.refused([1, token_id], max_tokens=1)
    assert str(token_id) in message and "vocabulary" in message


def test_f6_a_prompt_that_cannot_fit_tells_both_counts(client):
    assert client.generate(words(CONTEXT - 1), max_tokens=1).usage.completion_tokens == 1
    left = client.generate(words(CONTEXT - 1), ignore_eos=True)
    assert left.usage.completion_tokens == 1 and left.finish_reason == "LENGTH"
    for length, max_tokens in ((CONTEXT - 1, 2), (CONTEXT, 1), (CONTEXT + 1, 1)):
        message = client.refused(words(length), max_tokens=max_tokens)
        assert str(length) in message and str(CONTEXT) in message
    assert str(CONTEXT) in client.refused(words(CONTEXT))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 10**12),
        ("max_tokens", -1),
        ("n", 0),
        ("n", -1),
        ("n", 10**6),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", -1.0),
        ("temperature", -1.0),
        ("temperature", 1e308),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("min_p", -0.1),
        ("top_k", -2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("min_tokens", -1),
        ("stop", ["x"] * 1000),
        ("stop", [""]),
        ("logprobs", 10**6),
        ("logprobs", -1),
        ("prompt_logprobs", 10**6),
        ("seed", -1),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {49152: 1.0}),
        ("stop_token_ids", [49152]),
    ],
)
def test_f8_odd_parameters_are_refused_by_name(client, field, value):
    assert field in client.refused("hello", **{field: value})


def test_f10_large_chats_are_refused_and_the_server_lives(client):
    for size in (50_000, 500_000, 5_000_000):
        client.refused([{"role": "user", "content": "hello " * (size // 6)}], max_tokens=1)
    client.refused([{"role": "user", "content": "hi"}] * 10_000, max_tokens=1)
    assert client.generate("hello", max_tokens=1).usage.completion_tokens == 1


def test_g6_the_message_limit_is_named_and_the_connection_lives(client):
    message = client.refused("x" * 40_000_000, code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert any(character.isdigit() for character in message)
    message = client.refused([1] * 2_000_000)
    assert "2000000" in message
    assert client.generate("hello", max_tokens=1).usage.completion_tokens == 1


def test_d1_text_parts_are_the_string_form(client):
    def count(*parts, content=None):
        request = pb.GenerateRequest()
        message = request.chat.messages.add(role="user")
        if content is not None:
            message.content = content
        for part in parts:
            message.parts.add(text=part)
        request.sampling.max_tokens = 1
        started = next(r.started for r in client.stub.Generate(request, timeout=20) if r.HasField("started"))
        return list(started.prompt_token_ids)

    assert count("hi", "there") == count(content="hi\nthere")
    assert count() == count(content="")


def test_d6_chat_is_the_template_by_hand(client):
    by_hand = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = client.generate([{"role": "user", "content": "hi"}], max_tokens=1)
    plain = client.generate(by_hand, max_tokens=1, add_special_tokens=False)
    assert chat.started.prompt_token_ids == plain.started.prompt_token_ids


def test_calls_beside_generate(client):
    tokens = client.stub.Tokenize(pb.TokenizeRequest(text="hello 😀"))
    assert client.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids)).text == "hello 😀"
    assert b"".join(tokens.tokens) == "hello 😀".encode()
    info = client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.vocab_size, info.max_model_len, info.block_size) == (49152, CONTEXT, 16)
    assert info.dtype == "float32"
    server = client.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert len(server.tokenizers) == 1 and server.tokenizers[0].ready
    assert client.loads().num_blocks == 1024


def test_reflection_tells_the_service(client):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    names = [s.name for r in stub.ServerReflectionInfo(iter([request])) for s in r.list_services_response.service]
    assert "inference.v1.InferenceService" in names and "grpc.health.v1.Health" in names
