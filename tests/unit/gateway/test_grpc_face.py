"""The public API over real gRPC, with a fake tokenizer behind the gateway."""

import asyncio
import math
import socket

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.gateway_fakes import gateway, in_loop, until

from quartet.services.gateway.grpc_face import BindError
from quartet.shared import messages as m
from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb.inference_pb2_grpc import InferenceServiceStub
from quartet.shared.sampling_params import StructuredKind, StructuredOutput, Tool, ToolChoice, ToolParams

Code = grpc.StatusCode
SERVICE = "inference.v1.InferenceService"


def text_request(text="hi", **sampling):
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


@in_loop
async def test_a_stream():
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        request = text_request(seed=11, temperature=0.5)
        request.client_request_id, request.tenant = "mine", "acme"
        events = [event async for event in InferenceServiceStub(channel).Generate(request)]
        started, chunks, completion = events[0].started, [e.chunk for e in events[1:-1]], events[-1].completion
        assert len(started.request_id) == 16 and started.client_request_id == "mine"
        assert list(started.prompt_token_ids) == [5, 6, 7] and started.seed == 11
        assert "".join(chunk.text for chunk in chunks) == "abc"
        assert [i for chunk in chunks for i in chunk.token_ids] == [100, 101, 102]
        assert chunks[-1].finished.reason == pb.FINISH_REASON_LENGTH and chunks[-1].next_index == 3
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 3)
        submit = peer.last(m.Submit)
        assert submit.prompt == m.TextPrompt("hi", True) and submit.sampling.temperature == 0.5
        assert submit.sampling.max_tokens is None and submit.sampling.logprobs is None
        assert submit.tenant == "acme"


@in_loop
async def test_seeds_are_drawn_anew_for_each_request():
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        seeds = set()
        for _ in range(5):
            events = [event async for event in stub.Generate(text_request())]
            seeds.add(events[0].started.seed)
        assert len(seeds) == 5
        assert {submit.sampling.seed for submit in peer.all(m.Submit)} == seeds


@in_loop
async def test_every_sampling_field_arrives():
    given = {
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "logit_bias": {4: -3.0},
        "min_tokens": 2,
        "max_tokens": 9,
        "stop_token_ids": [8],
        "ignore_eos": True,
        "seed": 5,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "stop": ["x", "y"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    # What goes not together with these has a test of its own.
    assert {*given, "structured"} == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        async for _ in InferenceServiceStub(channel).Generate(text_request(**given)):
            pass
        submit = peer.last(m.Submit)
    for name, value in given.items():
        assert getattr(submit.text if hasattr(submit.text, name) else submit.sampling, name) == value


@in_loop
@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_schema": '{"type": "object"}'}, StructuredKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"json_object": True}, StructuredKind.JSON_OBJECT, ""),
        ({"regex": "a+"}, StructuredKind.REGEX, "a+"),
        ({"grammar": 'start: "a"'}, StructuredKind.GRAMMAR, 'start: "a"'),
        ({"choice": {"texts": ["yes", "no"]}}, StructuredKind.CHOICE, '["yes", "no"]'),
    ],
)
async def test_structured_output_tools_and_the_use_of_the_cache_arrive(given, kind, text):
    request = text_request(structured=given)
    request.tools.CopyFrom(
        pb.ToolParams(tools=[pb.Tool(name="f", parameters="{}", strict=True)], choice=pb.TOOL_CHOICE_REQUIRED, name="f")
    )
    request.read_prefix_cache = request.write_prefix_cache = False
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        async for _ in InferenceServiceStub(channel).Generate(request):
            pass
        submit = peer.last(m.Submit)
    assert submit.sampling.structured == StructuredOutput(kind, text)
    assert submit.tools == ToolParams([Tool("f", "", "{}", True)], ToolChoice.REQUIRED, "f", True)
    assert not submit.read_prefix_cache and not submit.write_prefix_cache


@in_loop
async def test_zero_is_not_the_same_as_absent():
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        async for _ in InferenceServiceStub(channel).Generate(text_request(temperature=0.0, logprobs=0)):
            pass
        assert peer.last(m.Submit).sampling.temperature == 0.0 and peer.last(m.Submit).sampling.logprobs == 0


@in_loop
async def test_cancel_ends_the_work_at_once():
    async with gateway() as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        peer.silent = True
        call = InferenceServiceStub(channel).Generate(text_request())
        assert (await anext(aiter(call))).WhichOneof("event") == "started"
        call.cancel()
        await until(lambda: peer.all(m.Abort))
        assert table.num_open_streams == 0


@in_loop
async def test_requests_that_are_cancelled_at_once_leave_nothing():
    async with gateway() as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        peer.silent = True
        stub = InferenceServiceStub(channel)
        for i in range(200):
            call = stub.Generate(text_request())
            if i % 2:
                await anext(aiter(call))
            call.cancel()
        await until(lambda: table.num_open_streams == 0 and len(peer.all(m.Abort)) == len(peer.all(m.Submit)))
        assert len(peer.all(m.Submit)) >= 100 and table.num_retained_streams == 0
        peer.silent = False
        events = [event async for event in stub.Generate(text_request())]
        assert events[-1].WhichOneof("event") == "completion"


@in_loop
async def test_a_deadline_ends_the_work():
    async with gateway() as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        peer.silent = True
        error = await refused(InferenceServiceStub(channel).Generate(text_request(), timeout=0.2))
        assert error.code() == Code.DEADLINE_EXCEEDED
        await until(lambda: peer.all(m.Abort))
        error = await refused(InferenceServiceStub(channel).Generate(text_request(), timeout=-1))
        assert error.code() == Code.DEADLINE_EXCEEDED
        assert table.num_open_streams == 0


@in_loop
async def test_abort_by_another_call():
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        peer.silent = True
        stub = InferenceServiceStub(channel)
        stream = aiter(stub.Generate(text_request()))
        request_id = (await anext(stream)).started.request_id
        await stub.Abort(pb.AbortRequest(request_id=request_id))
        events = [event async for event in stream]
        assert events[0].chunk.finished.reason == pb.FINISH_REASON_ABORT
        assert events[-1].WhichOneof("event") == "completion"
        await stub.Abort(pb.AbortRequest(request_id=request_id))
        await stub.Abort(pb.AbortRequest(request_id="0123456789abcdef"))


@in_loop
async def test_attach_follows_from_where_it_was():
    async with gateway(words="abcdef") as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        peer.silent = True
        stub = InferenceServiceStub(channel)
        request = text_request()
        request.detach_grace_ms = 10_000
        call = stub.Generate(request)
        stream = aiter(call)
        request_id = (await anext(stream)).started.request_id
        submit = peer.last(m.Submit)
        peer.speak(submit, upto=3)
        chunk = (await anext(stream)).chunk
        assert chunk.text == "abc"
        call.cancel()
        await until(lambda: table.num_attached_streams == 0)
        position = pb.ChoicePosition(index=0, next_index=chunk.next_index)
        again = aiter(stub.Attach(pb.AttachRequest(request_id=request_id, positions=[position])))
        assert (await anext(again)).started.request_id == request_id
        submit.choices = [m.ChoicePast(0, [100, 101, 102], 3)]
        peer.speak(submit)
        assert "".join([event.chunk.text async for event in again]) == "def"
        assert not peer.all(m.Abort)
        bad = pb.AttachRequest(request_id=request_id, positions=[pb.ChoicePosition(index=0, next_index=9)])
        error = await refused(stub.Attach(bad))
        assert error.code() == Code.INVALID_ARGUMENT and error.details().startswith("positions: ")
        error = await refused(stub.Attach(pb.AttachRequest(request_id="xyz")))
        assert error.details().startswith("request_id: ")


# --- what is refused (F2, F3, F8, D1) -------------------------------------------------------------

BAD_SAMPLING = [
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": -1.0}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": -math.inf}, "presence_penalty"),
    ({"frequency_penalty": 3.0}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"logit_bias": {2**32 - 1: 1.0}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x" * 5000]}, "stop"),
    ({"stop_token_ids": [1] * 1000}, "stop_token_ids"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"seed": -1}, "seed"),
]
BAD_REQUESTS = [
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(text=""), "text"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2**31])), "token_ids"),
    (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages"),
    (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="x")])), "chat.messages[0].role"),
    (
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=[pb.ContentPart()])])),
        "chat.messages[0].parts[0]",
    ),
    (
        pb.GenerateRequest(
            chat=pb.ChatPrompt(
                messages=[pb.ChatMessage(role="user", content="x")],
                add_generation_prompt=True,
                continue_final_message=True,
            )
        ),
        "chat.continue_final_message",
    ),
    (pb.GenerateRequest(text="x", n=0), "n"),
    (pb.GenerateRequest(text="x", n=-1), "n"),
    (pb.GenerateRequest(text="x", n=10**6), "n"),
    (pb.GenerateRequest(text="x", cache_salt="x" * 5000), "cache_salt"),
    (pb.GenerateRequest(text="x", tenant="é" * 513), "tenant"),
    (pb.GenerateRequest(text="x", detach_grace_ms=2**31), "detach_grace_ms"),
    (text_request(structured={}), "structured"),
    (text_request(structured={"json_object": False}), "structured"),
    (text_request(structured={"json_schema": "{"}), "structured"),
    (text_request(structured={"json_schema": "[1]"}), "structured"),
    (text_request(structured={"regex": ""}), "structured"),
    (text_request(structured={"regex": "a" * (1 << 18)}), "structured"),
    (text_request(structured={"choice": {}}), "structured"),
    (text_request(structured={"choice": {"texts": ["a", ""]}}), "structured"),
    (text_request(structured={"regex": "a"}, ignore_eos=True), "ignore_eos"),
    (text_request(structured={"regex": "a"}, min_tokens=1), "min_tokens"),
    (pb.GenerateRequest(text="x", tools={}), "tools"),
    (pb.GenerateRequest(text="x", tools={"tools": [{"name": "a b"}]}), "tools"),
    (pb.GenerateRequest(text="x", tools={"tools": [{"name": "a"}, {"name": "a"}]}), "tools"),
    (pb.GenerateRequest(text="x", tools={"tools": [{"name": "a", "parameters": "[]"}]}), "tools"),
    (pb.GenerateRequest(text="x", tools={"tools": [{"name": "a"}], "name": "a"}), "tool_choice"),
    (pb.GenerateRequest(text="x", tools={"tools": [{"name": "a"}], "name": "b", "choice": 3}), "tool_choice"),
    (pb.GenerateRequest(text="x", past=[pb.ChoicePast(index=0, past_token_ids=[1])]), "past"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), past=[pb.ChoicePast(index=1)]), "past"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), past=[pb.ChoicePast(), pb.ChoicePast()]), "past"),
    (
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1]), past=[pb.ChoicePast(past_token_ids=[1], past_text_bytes=2**64 - 1)]
        ),
        "past.past_text_bytes",
    ),
]


@in_loop
async def test_what_is_wrong_is_named():
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        requests = [(text_request(**sampling), field) for sampling, field in BAD_SAMPLING] + BAD_REQUESTS
        for request, field in requests:
            error = await refused(stub.Generate(request))
            assert error.code() == Code.INVALID_ARGUMENT, request
            assert error.details().startswith(f"{field}: "), error.details()
        assert not peer.all(m.Submit), "nothing wrong goes any further"
        events = [event async for event in stub.Generate(text_request())]
        assert events[-1].WhichOneof("event") == "completion", "the connection lives on"


@in_loop
async def test_scoring_a_prompt_may_generate_nothing():
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        async for _ in InferenceServiceStub(channel).Generate(text_request(max_tokens=0, prompt_logprobs=0)):
            pass
        assert peer.last(m.Submit).sampling.max_tokens == 0


@in_loop
async def test_parts_of_content_are_joined():
    def request(*messages):
        return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages))

    def parts(role, *texts):
        return pb.ChatMessage(role=role, parts=[pb.ContentPart(text=text) for text in texts])

    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        for role in ("system", "user", "assistant", "tool", "critic"):
            for built in (parts(role, "hi", "there"), pb.ChatMessage(role=role, content="hi\nthere")):
                async for _ in stub.Generate(request(built)):
                    pass
                assert peer.last(m.Submit).prompt == m.ChatPrompt([m.ChatMessage(role, "hi\nthere")], True)
        async for _ in stub.Generate(request(parts("user"))):
            pass
        assert peer.last(m.Submit).prompt.messages == [m.ChatMessage("user", "")]


@in_loop
async def test_template_kwargs_are_scalars():
    async with gateway() as (address, _table, peer), grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")], continue_final_message=True)
        chat.template_kwargs["enable_thinking"].bool_value = False
        chat.template_kwargs["budget"].number_value = 3
        chat.template_kwargs["nothing"].null_value = 0
        async for _ in stub.Generate(pb.GenerateRequest(chat=chat)):
            pass
        prompt = peer.last(m.Submit).prompt
        assert prompt.template_kwargs == {"enable_thinking": False, "budget": 3, "nothing": None}
        assert prompt.continue_final_message and not prompt.add_generation_prompt
        chat.template_kwargs["tools"].list_value.values.add(number_value=1)
        error = await refused(stub.Generate(pb.GenerateRequest(chat=chat)))
        assert error.details().startswith("chat.template_kwargs.tools: ")


@in_loop
async def test_a_failure_of_the_tokenizer_keeps_its_field_and_says_when_to_try_again():
    async with gateway() as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        peer.accepting = False
        call = InferenceServiceStub(channel).Generate(text_request())
        await until(lambda: peer.all(m.Submit))
        submit = peer.last(m.Submit)
        table.on_message(
            peer,
            m.Failed(submit.request_id, submit.attempt, m.ErrorCode.RESOURCE_EXHAUSTED, "full", "queue", 1500),
        )
        error = await refused(call)
        assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "queue: full")
        assert dict(error.trailing_metadata())["retry-after-ms"] == "1500"


@pytest.mark.parametrize(
    "field, public", [("prompt", "text"), ("prompt_token_ids", "token_ids"), ("messages", "chat.messages"), ("n", "n")]
)
@in_loop
async def test_fields_are_named_as_this_api_has_them(field, public):
    async with gateway() as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        peer.accepting = False
        call = InferenceServiceStub(channel).Generate(text_request())
        await until(lambda: peer.all(m.Submit))
        submit = peer.last(m.Submit)
        code = m.ErrorCode.INVALID_ARGUMENT
        table.on_message(peer, m.Failed(submit.request_id, submit.attempt, code, f"{field}: is wrong", field))
        assert (await refused(call)).details() == f"{public}: is wrong"


@in_loop
async def test_message_sizes_are_bounded_and_the_connection_lives_on():
    async with (
        gateway(max_receive_message_bytes=100_000) as (address, _, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = InferenceServiceStub(channel)
        for request in (text_request("x" * 200_000), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 200_000))):
            error = await refused(stub.Generate(request))
            assert error.code() == Code.RESOURCE_EXHAUSTED and "100000" in error.details()
        events = [event async for event in stub.Generate(text_request("x" * 90_000))]
        assert events[-1].WhichOneof("event") == "completion"


@in_loop
async def test_a_client_that_does_not_read_is_cut_off():
    words = ["x" * 1000] * 400
    async with (
        gateway(words=words, max_unread_bytes=50_000) as (address, table, peer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        peer.silent = True
        stream = aiter(InferenceServiceStub(channel).Generate(text_request()))
        await anext(stream)
        submit = peer.last(m.Submit)
        peer.speak(submit)
        assert peer.all(m.Abort) and table.num_open_streams == 0
        error = await refused(stream)
        assert error.code() == Code.RESOURCE_EXHAUSTED and "max_unread_bytes" in error.details()


@in_loop
async def test_a_client_that_stops_reading_is_cut_off_while_a_write_waits_for_it():
    text = "x" * 10_000
    async with (
        gateway(max_unread_bytes=200_000) as (address, table, peer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        peer.silent = True
        stream = aiter(InferenceServiceStub(channel).Generate(text_request()))
        await anext(stream)
        submit = peer.last(m.Submit)
        # How much the connection itself takes in is gRPC's affair; it is far less than this.
        for i in range(10_000):
            if peer.all(m.Abort):
                break
            item = m.Delta(submit.request_id, submit.attempt, 0, i, [i], text, len(text) * (i + 1))
            table.on_message(peer, m.Deltas([item]))
            await asyncio.sleep(0)
        assert peer.all(m.Abort) and table.num_open_streams == 0
        error = await refused(stream)
        assert error.code() == Code.RESOURCE_EXHAUSTED and "max_unread_bytes" in error.details()


# --- the rest of the API --------------------------------------------------------------------------


@in_loop
async def test_small_calls():
    async with gateway() as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        tokens = await stub.Tokenize(pb.TokenizeRequest(text="x", add_special_tokens=False))
        assert list(tokens.token_ids) == [1, 2] and list(tokens.tokens) == [b"a", b"\xc3"]
        assert peer.last(m.Encode).prompt == m.TextPrompt("x", False)
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[4, 5]))).text == "4 5"
        loads = await stub.GetLoads(pb.GetLoadsRequest())
        assert (loads.num_running, loads.num_free_blocks, loads.max_num_batched_tokens) == (1, 5, 256)
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.name, model.vocab_size, model.tokenizer_fingerprint) == ("tiny", 1000, "tok")
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.version == "1.2.3" and info.tokenizers[0].ready and not info.draining
        peer.alive = False
        table.on_down(peer, "gone")
        for call in (stub.GetLoads(pb.GetLoadsRequest()), stub.GetModelInfo(pb.GetModelInfoRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == Code.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest())
        assert caught.value.details().startswith("prompt: ")


@in_loop
async def test_health_follows_the_tokenizers():
    async with gateway() as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service):
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status("") == serving and await status(SERVICE) == serving
        call = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        watch = aiter(call)
        assert (await anext(watch)).status == serving
        for field in ("stalled", "ready", "draining"):
            setattr(peer, field, not getattr(peer, field))
            await table_changed(table, peer)
            assert (await anext(watch)).status == not_serving and await status(SERVICE) == not_serving
            assert await status("") == serving, "the process itself lives"
            setattr(peer, field, not getattr(peer, field))
            await table_changed(table, peer)
            assert (await anext(watch)).status == serving
        call.cancel()


async def table_changed(table, peer):
    table.on_status(peer)
    await table.face.update_health()


@in_loop
async def test_a_client_without_generated_code_can_use_reflection():
    async with gateway() as (address, _table, _peer):
        await asyncio.to_thread(_generate_by_reflection, address)


def _generate_by_reflection(address):
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream(f"/{SERVICE}/Generate", request_type.SerializeToString, response_type.FromString)
        events = list(call(request_type(text="hi")))
        assert "".join(event.chunk.text for event in events) == "abc"


# --- addresses (G9) -------------------------------------------------------------------------------


@in_loop
async def test_a_second_server_on_the_port_fails_at_once():
    async with gateway() as (address, _, _):
        with pytest.raises(BindError, match=f"cannot bind {address}: address already in use"):
            async with gateway(address):
                pass


@pytest.mark.parametrize("address", ["no.such.host.invalid:50051", "192.0.2.1:50051"])
@in_loop
async def test_an_address_that_is_not_ours_is_named(address):
    with pytest.raises(BindError, match=f"grpc_address: cannot bind {address}: ."):
        async with gateway(address):
            pass


@in_loop
async def test_unix_sockets(tmp_path):
    address = f"unix:{tmp_path}/g.sock"
    async with gateway(address), grpc.aio.insecure_channel(address) as channel:
        events = [event async for event in InferenceServiceStub(channel).Generate(text_request())]
        assert events[-1].WhichOneof("event") == "completion"
        with pytest.raises(BindError, match="another server"):
            async with gateway(address):
                pass
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(f"{tmp_path}/old.sock")
    left_over.close()
    async with gateway(f"unix:{tmp_path}/old.sock"):
        pass


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@in_loop
async def test_ipv6():
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 loopback here")
    async with gateway("[::1]:0") as (address, _, _):
        port = address.rpartition(":")[2]
        async with grpc.aio.insecure_channel(f"[::1]:{port}") as channel:
            events = [event async for event in InferenceServiceStub(channel).Generate(text_request())]
            assert events[-1].WhichOneof("event") == "completion"
