"""A client that stops reading, and a queue that is full."""

import time
from typing import Any

import grpc
import pytest

from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb import inference_pb2_grpc as pb_grpc

# Else the client's side of the connection would take in megabytes by itself.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]


@pytest.mark.slow
def test_a_client_that_stops_reading_loses_its_stream_and_nobody_else_notices(line: Any, streams: Any) -> None:
    stack = line(gateway_max_unread_bytes=1024)
    # How much the connection itself takes in is gRPC's affair; choices with many alternatives fill it soon.
    with grpc.insecure_channel(stack.address, options=SMALL_WINDOW) as channel:
        request = stack.client.request(
            "Once upon a time", temperature=1.0, seed=1, max_tokens=900, ignore_eos=True, n=16, logprobs=20
        )
        stream = pb_grpc.InferenceServiceStub(channel).Generate(request, timeout=280)
        assert next(stream).WhichOneof("event") == "started"
        running = streams(stack, 2, max_tokens=120)
        info = pb.GetServerInfoRequest()
        for i in range(1200):
            if stack.client.stub.GetServerInfo(info, timeout=10).num_open_streams <= 2 and i > 20:
                break
            time.sleep(0.05)
        with pytest.raises(grpc.RpcError) as error:
            for _ in stream:
                pass
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_unread_bytes" in error.value.details()
    running.check()


@pytest.mark.slow
def test_a_full_queue_says_when_to_come_again(line: Any) -> None:
    stack = line(scheduler_max_waiting=1, executor_max_num_seqs=1)
    held = [stack.client.stream(f"Story {i}", temperature=0.0, max_tokens=300, ignore_eos=True) for i in range(2)]
    next(held[0])
    next(held[1])
    with pytest.raises(grpc.RpcError) as error:
        stack.client.generate("One too many", max_tokens=5)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.value.trailing_metadata())["retry-after-ms"]) > 0
    for stream in held:
        stream.cancel()
