"""The gateway's settings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from quartet.shared.address import DEFAULT_ADDRESS
from quartet.shared.config import CommonSettings

_MIB = 2**20


class GatewaySettings(CommonSettings, frozen=True, kw_only=True):
    grpc_address: Annotated[
        str, Meta(description="where clients connect: host:port, [v6 address]:port or unix:path", min_length=1)
    ] = DEFAULT_ADDRESS
    tokenizer_link: Annotated[
        str, Meta(description="where tokenizers connect: ipc://path or tcp://host:port; empty: a socket in run_dir")
    ] = ""
    # Twice as long on the link at most, whose frames have 64 MiB.
    max_receive_message_bytes: Annotated[
        int, Meta(description="the largest request, in bytes", ge=1024, le=32 * _MIB)
    ] = 16 * _MIB
    max_send_message_bytes: Annotated[int, Meta(description="the largest response, in bytes", ge=1024)] = 16 * _MIB
    max_concurrent_requests: Annotated[
        int, Meta(description="requests worked on at once; more are refused with RESOURCE_EXHAUSTED", ge=1)
    ] = 1024
    max_unread_bytes: Annotated[
        int, Meta(description="output that a client may leave unread before its stream ends", ge=1024)
    ] = _MIB
    attach_grace: Annotated[
        float, Meta(description="seconds that a finished stream is kept for a client that attaches again", ge=0)
    ] = 30.0
    max_retained_bytes: Annotated[int, Meta(description="memory for finished streams; the oldest go first", ge=0)] = (
        64 * _MIB
    )
    attach_timeout: Annotated[
        float, Meta(description="seconds to look for a request of an earlier gateway among the tokenizers", gt=0)
    ] = 3.0
    recovery_deadline: Annotated[
        float, Meta(description="seconds that a request waits for a tokenizer before it ends", gt=0)
    ] = 60.0
    max_detach_grace: Annotated[
        float, Meta(description="the most seconds that a client may ask for in detach_grace_ms", ge=0)
    ] = 600.0
    call_timeout: Annotated[float, Meta(description="seconds to wait for an answer to Tokenize and the like", gt=0)] = (
        30.0
    )
    drain_timeout: Annotated[
        float, Meta(description="seconds that running streams have to end after SIGTERM", ge=0)
    ] = 30.0
    max_n: Annotated[int, Meta(description="the most choices of a request", ge=1)] = 16
    max_logprobs: Annotated[int, Meta(description="the most alternatives in logprobs and prompt_logprobs", ge=0)] = 20
    max_stop: Annotated[int, Meta(description="the most stop strings", ge=0)] = 16
    max_stop_bytes: Annotated[int, Meta(description="the longest stop string, in bytes", ge=1)] = 1024
    max_stop_token_ids: Annotated[int, Meta(description="the most stop_token_ids", ge=0)] = 128
    max_logit_bias: Annotated[int, Meta(description="the most entries in logit_bias", ge=0)] = 1024

    def __post_init__(self) -> None:
        if self.grpc_address.startswith("unix:"):
            return
        host, _, port = self.grpc_address.rpartition(":")
        # gRPC itself would take port 99999 as 34463.
        if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
            raise ValueError(
                f"--grpc-address must be host:port, [v6 address]:port or unix:path, got {self.grpc_address!r}"
            )
