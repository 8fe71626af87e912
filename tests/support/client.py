"""A plain gRPC client for tests, on the generated stubs alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb import inference_pb2_grpc as pb_grpc

SAMPLING_LISTS = {"stop", "stop_token_ids"}


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    times: list[float] = field(default_factory=list)
    tool_calls: list[Any] = field(default_factory=list)


@dataclass
class Result:
    started: Any = None
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    usage: Any = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    def add(self, response: Any) -> None:
        """Takes one event of the stream; fails on a gap, a repetition, or anything after the end."""
        kind = response.WhichOneof("event")
        assert self.usage is None, "an event after the completion"
        if kind == "started":
            assert self.started is None
            self.started = response.started
        elif kind == "prompt_logprobs":
            for i, entry in enumerate(response.prompt_logprobs.entries):
                position = response.prompt_logprobs.start + i
                assert position not in self.prompt_logprobs
                self.prompt_logprobs[position] = entry
        elif kind == "chunk":
            chunk = response.chunk
            choice = self.choices.setdefault(chunk.index, Choice())
            assert not choice.finish_reason, "a chunk after the choice's end"
            assert chunk.start == len(choice.token_ids), (chunk.start, len(choice.token_ids))
            choice.token_ids += chunk.token_ids
            assert chunk.next_index == len(choice.token_ids)
            choice.text += chunk.text
            choice.pieces.append(chunk.text)
            choice.logprobs += chunk.logprobs
            choice.tool_calls += chunk.tool_calls
            choice.times.append(time.monotonic())
            if chunk.HasField("finished"):
                choice.finish_reason = pb.FinishReason.Name(chunk.finished.reason).removeprefix("FINISH_REASON_")
                which = chunk.finished.WhichOneof("stop_reason")
                choice.stop_reason = getattr(chunk.finished, which) if which else None
        elif kind == "completion":
            self.usage = response.completion.usage
            assert all(c.finish_reason for c in self.choices.values())


class Client:
    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address)
        self.stub = pb_grpc.InferenceServiceStub(self.channel)

    def request(self, prompt: str | list[int] | list[dict[str, str]], **options: Any) -> pb.GenerateRequest:
        """`options`: fields of GenerateRequest, and of SamplingParams."""
        request = pb.GenerateRequest()
        if isinstance(prompt, str):
            request.text = prompt
        elif prompt and isinstance(prompt[0], dict):
            for message in prompt:
                request.chat.messages.add(**message)
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
        for name, value in options.items():
            target = request.sampling if name in pb.SamplingParams.DESCRIPTOR.fields_by_name else request
            if name in SAMPLING_LISTS:
                getattr(target, name).extend(value)
            elif name == "logit_bias":
                target.logit_bias.update(value)
            elif name == "past":
                target.past.extend(value)
            elif name == "structured":
                target.structured.CopyFrom(pb.StructuredOutput(**value))
            elif name == "tools":
                target.tools.CopyFrom(value)
            else:
                setattr(target, name, value)
        return request

    def stream(self, prompt: str | list[int] | list[dict[str, str]], *, timeout: float = 120.0, **options: Any) -> Any:
        return self.stub.Generate(self.request(prompt, **options), timeout=timeout)

    def generate(
        self, prompt: str | list[int] | list[dict[str, str]], *, timeout: float = 120.0, **options: Any
    ) -> Result:
        result = Result()
        for response in self.stream(prompt, timeout=timeout, **options):
            result.add(response)
        assert result.usage is not None, "no completion"
        return result

    def refused(self, prompt: Any, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT, **options: Any) -> str:
        """The message with which the request is refused; fails when it is not, or with another code."""
        try:
            self.generate(prompt, **options)
        except grpc.RpcError as error:
            assert error.code() == code, (error.code(), error.details())
            return error.details()
        raise AssertionError(f"not refused: {options}")

    def loads(self) -> Any:
        return self.stub.GetLoads(pb.GetLoadsRequest(), timeout=10)

    def server_info(self) -> Any:
        return self.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30)

    def wait_ready(self, timeout: float = 180.0) -> None:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        health = health_pb2_grpc.HealthStub(self.channel)
        deadline = time.monotonic() + timeout
        last = ""
        while time.monotonic() < deadline:
            try:
                answer = health.Check(
                    health_pb2.HealthCheckRequest(service="inference.v1.InferenceService"),
                    timeout=2,
                    wait_for_ready=True,
                )
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                last = str(answer)
            except grpc.RpcError as error:
                last = str(error.details())
            time.sleep(0.05)
        raise AssertionError(f"not ready within {timeout} s: {last}")

    def at_rest(self) -> bool:
        """Nothing runs or waits and every block is free."""
        loads = self.loads()
        return loads.num_running == loads.num_waiting == 0 and loads.num_free_blocks == loads.num_blocks

    def close(self) -> None:
        self.channel.close()
