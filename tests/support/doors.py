"""The same request through every door: gRPC, HTTP whole and streamed, and the Python client. Fields are HTTP's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
from support.client import Client, Result
from support.http import post

from quartet.shared.client import Client as OurClient
from quartet.shared.client import InferenceError
from quartet.shared.pb import inference_pb2 as pb

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# gRPC's names of what HTTP calls otherwise.
NAMES = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat.messages": "messages",
    "structured": "structured_outputs",
    "sampling.structured": "structured_outputs",
}


@dataclass
class Said:
    """A choice. `logprobs` are those of its tokens, `top` those of each one's alternatives, from the likeliest on."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[list[float]] = field(default_factory=list)


@dataclass
class Answer:
    choices: dict[int, Said]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def said(self) -> Said:
        return self.choices[0]

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text


class Refused(NamedTuple):
    """What is wrong, by gRPC's name of the status, and the field."""

    code: str
    field: str
    message: str

    def __eq__(self, other: object) -> bool:
        """Messages are each door's own."""
        return isinstance(other, Refused) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[:2])


Door = Callable[[dict[str, Any]], "Answer | Refused"]


def doors(client: Client, http_address: str) -> dict[str, Door]:
    """By name. Without a temperature they are greedy."""
    ours = OurClient(client.address)
    return {
        "grpc": lambda fields: by_grpc(client, fields),
        "client": lambda fields: by_our_client(ours, fields),
        "http": lambda fields: by_http(http_address, fields, stream=False),
        "http-stream": lambda fields: by_http(http_address, fields, stream=True),
    }


def by_grpc(client: Client, fields: dict[str, Any]) -> Answer | Refused:
    prompt, options, chat = _proto_fields(fields)
    continued = options.pop("continue_final_message", False)
    request = client.request(prompt, **options)
    if chat:
        request.chat.SetInParent()
        request.chat.continue_final_message = continued
    try:
        result = Result()
        for response in client.stub.Generate(request, timeout=120):
            result.add(response)
    except grpc.RpcError as error:
        return _refused(error)
    choices = {
        index: Said(
            choice.token_ids,
            choice.text,
            choice.finish_reason.lower(),
            choice.stop_reason,
            [_rounded(entry.token.logprob) for entry in choice.logprobs],
            [[_rounded(top.logprob) for top in entry.top] for entry in choice.logprobs],
        )
        for index, choice in sorted(result.choices.items())
    }
    usage = result.usage
    return Answer(choices, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def by_our_client(client: OurClient, fields: dict[str, Any]) -> Answer | Refused:
    prompt, options, chat = _proto_fields(fields)
    if "structured" in options:
        options["structured"] = pb.StructuredOutput(**options["structured"])
    source = {"messages" if chat else "prompt" if isinstance(prompt, str) else "token_ids": prompt}
    choices: dict[int, Said] = {}
    generation = client.generate(timeout=120, **source, **options)
    try:
        for chunk in generation:
            said = choices.setdefault(chunk.index, Said())
            assert not said.finish_reason and chunk.start == len(said.token_ids)
            said.token_ids += chunk.token_ids
            said.text += chunk.text
            said.logprobs += [_rounded(entry.token.logprob) for entry in chunk.logprobs]
            said.top += [[_rounded(top.logprob) for top in entry.top] for entry in chunk.logprobs]
            if chunk.finish_reason:
                said.finish_reason, said.stop_reason = chunk.finish_reason, chunk.stop_reason
    except InferenceError as error:
        return _refused(error)
    assert generation.usage is not None
    return Answer(dict(sorted(choices.items())), *generation.usage)


def by_http(address: str, fields: dict[str, Any], *, stream: bool) -> Answer | Refused:
    fields = {"temperature": 0.0, "return_token_ids": True, **fields}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    chat = "messages" in fields
    reply = post(address, CHAT if chat else COMPLETIONS, fields, timeout=120)
    if reply.status != 200:
        code = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}[reply.status]
        return Refused(code, (reply.error["param"] or "").partition("[")[0], reply.error["message"])
    choices: dict[int, Said] = {}
    usage = None
    for event in reply.events() if stream else [reply.json()]:
        for choice in event["choices"]:
            said = choices.setdefault(choice["index"], Said())
            assert not said.finish_reason, "a chunk after the choice's end"
            said.token_ids += choice.get("token_ids", [])
            said.text += (choice["delta" if stream else "message"].get("content") or "") if chat else choice["text"]
            _add_logprobs(said, choice["logprobs"])
            if choice["finish_reason"]:
                said.finish_reason, said.stop_reason = choice["finish_reason"], choice["stop_reason"]
        usage = event.get("usage") or usage
    assert usage is not None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(dict(sorted(choices.items())), usage["prompt_tokens"], usage["completion_tokens"], cached)


def _add_logprobs(said: Said, given: dict[str, Any] | None) -> None:
    if given is None:
        return
    if "content" in given:
        said.logprobs += [_rounded(entry["logprob"]) for entry in given["content"]]
        said.top += [[_rounded(top["logprob"]) for top in entry["top_logprobs"]] for entry in given["content"]]
    else:
        said.logprobs += [_rounded(value) for value in given["token_logprobs"]]
        said.top += [[_rounded(value) for value in (top or {}).values()] for top in given["top_logprobs"]]


def _proto_fields(fields: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """The prompt, what else gRPC has of it, and whether it is a chat."""
    options = {"temperature": 0.0, **fields}
    chat = "messages" in options
    prompt = options.pop("messages") if chat else options.pop("prompt", None)
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    if "logit_bias" in options:
        options["logit_bias"] = {int(key): value for key, value in options["logit_bias"].items()}
    if options.pop("logprobs", None) is True:
        options["logprobs"] = options.pop("top_logprobs", 0)
    elif isinstance(fields.get("logprobs"), int):
        options["logprobs"] = fields["logprobs"]
    if "user" in options:
        options["tenant"] = options.pop("user")
    if "structured_outputs" in options:
        ((kind, value),) = options.pop("structured_outputs").items()
        value = {"json": json.dumps(value), "choice": {"texts": value}}.get(kind, value)
        options["structured"] = {"json_schema" if kind == "json" else kind: value}
    return prompt, options, chat


def _refused(error: Any) -> Refused:
    name = error.details().partition(":")[0]
    return Refused(error.code().name, NAMES.get(name, name), error.details())


def _rounded(value: float) -> float:
    return round(value, 4)
