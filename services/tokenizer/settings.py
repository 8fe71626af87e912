"""The tokenizer's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from quartet.shared.address import DEFAULT_TOKENIZER_METRICS, check_metrics_address
from quartet.shared.config import CommonSettings
from quartet.shared.transport import ipc_address


class TokenizerSettings(CommonSettings, frozen=True, kw_only=True):
    gateway_links: Annotated[
        list[str], Meta(description="addresses of the gateways to serve; empty: the one in run_dir")
    ] = []
    scheduler_link: Annotated[str, Meta(description="address of the scheduler; empty: the one in run_dir")] = ""
    tokenizer: Annotated[
        Literal["auto", "byte"],
        Meta(description="auto: the model's own; byte: every byte is a token (for tests and study, needs no files)"),
    ] = "auto"
    chat_template: Annotated[
        str, Meta(description="jinja2 chat template, or a file with one, in place of the model's own")
    ] = ""
    tool_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "smollm2", "none"],
        Meta(description="how the model writes tool calls; auto: by its chat template; none: tools are refused"),
    ] = "auto"
    grammar_timeout: Annotated[
        float, Meta(description="seconds that a request's schema, regex or grammar may take to compile", gt=0)
    ] = 10.0
    max_prompt_bytes: Annotated[int, Meta(description="longest prompt text that is accepted, in bytes", ge=1)] = 8 << 20
    attach_grace: Annotated[
        float, Meta(description="seconds that a request outlives its gateway, and a finished one its end", ge=0)
    ] = 30.0
    recovery_deadline: Annotated[
        float, Meta(description="seconds that requests wait for a scheduler before they end", gt=0)
    ] = 60.0
    drain_timeout: Annotated[
        float, Meta(description="seconds that running streams are given to end on SIGTERM", ge=0)
    ] = 30.0
    encode_threads: Annotated[int, Meta(description="threads that encode prompts", ge=1, le=256)] = 2
    metrics_address: Annotated[
        str,
        Meta(description="host:port where Prometheus scrapes; the next free one of ten ports; empty: nowhere"),
    ] = DEFAULT_TOKENIZER_METRICS

    def __post_init__(self) -> None:
        check_metrics_address(self.metrics_address)

    @property
    def gateway_addresses(self) -> list[str]:
        return self.gateway_links or [ipc_address(self.run_dir, "gateway")]

    @property
    def scheduler_address(self) -> str:
        return self.scheduler_link or ipc_address(self.run_dir, "scheduler-tokenizer")
