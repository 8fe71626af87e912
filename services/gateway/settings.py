"""The gateway's settings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from quartet.services.gateway.api_keys import ApiKeys, read_key_file
from quartet.services.gateway.tls import Tls, read_tls
from quartet.shared.address import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS, check_metrics_address
from quartet.shared.config import CommonSettings
from quartet.shared.sampling_params import RequestLimits

_MIB = 2**20


class GatewaySettings(CommonSettings, frozen=True, kw_only=True):
    grpc_address: Annotated[
        str, Meta(description="where clients connect: host:port, [v6 address]:port or unix:path", min_length=1)
    ] = DEFAULT_ADDRESS
    http_address: Annotated[
        str, Meta(description="where OpenAI's clients connect: host:port or [v6 address]:port; empty: nowhere")
    ] = DEFAULT_HTTP_ADDRESS
    metrics_address: Annotated[
        str,
        Meta(
            description="host:port where Prometheus may scrape without an API key, beside /metrics on http_address; "
            "one of the next nine ports where it is taken; empty: nowhere"
        ),
    ] = ""
    tls_cert: Annotated[
        str, Meta(description="PEM file of this server's certificate chain, for gRPC and HTTP; empty: without TLS")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file of its private key, without a password")] = ""
    tls_client_ca: Annotated[
        str, Meta(description="PEM file of who signs clients' certificates, without which nobody is let in; empty: all")
    ] = ""
    tokenizer_link: Annotated[
        str, Meta(description="where tokenizers connect: ipc://path or tcp://host:port; empty: a socket in run_dir")
    ] = ""
    # Twice as long on the link at most, whose frames have 64 MiB.
    max_receive_message_bytes: Annotated[
        int, Meta(description="the largest request, in bytes", ge=1024, le=32 * _MIB)
    ] = 16 * _MIB
    max_send_message_bytes: Annotated[int, Meta(description="the largest response, in bytes", ge=1024)] = 16 * _MIB
    max_body_bytes: Annotated[
        int, Meta(description="the largest body of an HTTP request, in bytes", ge=1024, le=32 * _MIB)
    ] = 8 * _MIB
    tls_handshake_timeout: Annotated[
        float, Meta(description="seconds that a TLS handshake may take, on either protocol", gt=0)
    ] = 10.0
    header_timeout: Annotated[
        float, Meta(description="seconds that an HTTP request's head may take to arrive", gt=0)
    ] = 10.0
    body_timeout: Annotated[float, Meta(description="seconds that an HTTP request's body may take to arrive", gt=0)] = (
        60.0
    )
    keep_alive_timeout: Annotated[
        float, Meta(description="seconds that an HTTP connection may be idle between requests", gt=0)
    ] = 75.0
    send_timeout: Annotated[
        float, Meta(description="seconds that an HTTP client may take nothing of what waits for it to be read", gt=0)
    ] = 60.0
    sse_keep_alive_interval: Annotated[
        float, Meta(description="seconds of silence after which a stream over HTTP says that it lives; 0: never", ge=0)
    ] = 15.0
    max_connections: Annotated[
        int, Meta(description="the most HTTP connections; for a further one the longest idle is closed", ge=1)
    ] = 4096
    max_prompts_per_request: Annotated[int, Meta(description="the most prompts of a completion request", ge=1)] = 128
    max_messages: Annotated[int, Meta(description="the most messages of a chat over HTTP", ge=1)] = 4096
    served_model_names: Annotated[
        list[str], Meta(description="what HTTP clients may call the model; empty: its own name")
    ] = []
    cors_allow_origins: Annotated[
        list[str], Meta(description="origins whose web pages may call the HTTP API; * is all")
    ] = []
    api_key_hashes: Annotated[
        list[str],
        Meta(description="sha256 of each key that is let in, as SHA256 or NAME=SHA256 (quartet keys api); empty: all"),
    ] = []
    api_key_file: Annotated[str, Meta(description="a file with further api_key_hashes, one a line")] = ""
    max_requests_per_key: Annotated[
        int, Meta(description="prompts of one API key worked on at once; 0: as many as there may be", ge=0)
    ] = 0
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
    max_structured_bytes: Annotated[
        int, Meta(description="the longest schema, regex or grammar of structured output, in bytes", ge=0)
    ] = 128 << 10
    max_tools: Annotated[int, Meta(description="the most tools of a request", ge=0)] = 128
    max_tools_bytes: Annotated[
        int, Meta(description="the longest descriptions and parameters of a request's tools together, in bytes", ge=0)
    ] = 256 << 10

    def __post_init__(self) -> None:
        if not self.grpc_address.startswith("unix:"):
            _check_address("--grpc-address", self.grpc_address, " or unix:path")
        if self.http_address:
            _check_address("--http-address", self.http_address)
        check_metrics_address(self.metrics_address)
        self.read_api_keys()
        if self.read_tls() is not None and self.grpc_address.startswith("unix:"):
            raise ValueError(
                "--tls-cert: a unix socket has no TLS; give --grpc-address a port, or take the certificate away"
            )

    @property
    def request_limits(self) -> RequestLimits:
        names = RequestLimits.__struct_fields__
        return RequestLimits(**{name: getattr(self, name) for name in names if hasattr(self, name)})

    def read_tls(self) -> Tls | None:
        """Raises ValueError."""
        return read_tls(self.tls_cert, self.tls_key, self.tls_client_ca)

    def read_api_keys(self) -> ApiKeys:
        """Raises ValueError."""
        return ApiKeys(self.read_key_entries(), self.max_requests_per_key)

    def read_key_entries(self) -> list[str]:
        """Of the setting and of the file. Raises ValueError."""
        entries = list(self.api_key_hashes)
        if self.api_key_file:
            try:
                of_file = read_key_file(self.api_key_file)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--api-key-file: cannot read {self.api_key_file}: {error}") from None
            if not of_file and not entries:
                raise ValueError(f"--api-key-file: there is no key in {self.api_key_file}, so nobody could come in")
            if not of_file:
                raise ValueError(f"--api-key-file: there is no key in {self.api_key_file}")
            entries += of_file
        try:
            ApiKeys(entries)
        except ValueError as error:
            raise ValueError(f"--api-key-hashes: {error}") from None
        return entries


def _check_address(flag: str, address: str, more: str = "") -> None:
    host, _, port = address.rpartition(":")
    # gRPC itself would take port 99999 as 34463.
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{flag} must be host:port, [v6 address]:port{more}, got {address!r}")
