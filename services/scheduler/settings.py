"""Settings of the scheduler."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quartet.shared.address import DEFAULT_SCHEDULER_METRICS, check_metrics_address
from quartet.shared.config import CommonSettings
from quartet.shared.transport import ipc_address


class SchedulerSettings(CommonSettings, frozen=True, kw_only=True):
    tokenizer_link: Annotated[
        str, msgspec.Meta(description="address to bind for tokenizers; empty: a socket in run_dir")
    ] = ""
    executor_link: Annotated[
        str, msgspec.Meta(description="address to bind for the executor; empty: a socket in run_dir")
    ] = ""
    max_num_seqs: Annotated[
        int, msgspec.Meta(description="most requests in a step; 0: as many as the executor", ge=0)
    ] = 0
    max_num_batched_tokens: Annotated[
        int, msgspec.Meta(description="token budget of a step; 0: as many as the executor", ge=0)
    ] = 0
    policy: Annotated[
        str,
        msgspec.Meta(
            description="whose turn it is: fcfs, priority (lowest value first), fair (equal share for each tenant), "
            "srf (shortest remaining first), or a class of your own as package.module:Class"
        ),
    ] = "fcfs"
    policy_options: Annotated[
        list[str],
        msgspec.Meta(
            description="the policy's options as name=number; fair: input_cost, output_cost, weight.TENANT; srf: ageing"
        ),
    ] = []
    max_waiting: Annotated[int, msgspec.Meta(description="most requests that may wait for a place", ge=0)] = 4096
    enable_prefix_caching: Annotated[
        bool, msgspec.Meta(description="share KV blocks between requests with the same beginning")
    ] = True
    short_prompt_share: Annotated[
        float,
        msgspec.Meta(
            description="share of a step's prefill tokens kept for short prompts behind long ones", ge=0, le=1
        ),
    ] = 0.25
    mixed_step_share: Annotated[
        float,
        msgspec.Meta(
            description="share of a step's token budget that is used while requests decode: less makes the gaps "
            "between their tokens shorter and first tokens later",
            gt=0,
            le=1,
        ),
    ] = 0.75
    owner_grace: Annotated[
        float, msgspec.Meta(description="seconds that requests outlive the tokenizer they came from", ge=0)
    ] = 30.0
    recovery_deadline: Annotated[
        float, msgspec.Meta(description="seconds that requests wait for an executor before they end", gt=0)
    ] = 60.0
    drain_timeout: Annotated[
        float, msgspec.Meta(description="seconds that running requests have to end after SIGTERM", ge=0)
    ] = 30.0
    metrics_address: Annotated[
        str,
        msgspec.Meta(description="host:port where Prometheus scrapes; the next free one of ten ports; empty: nowhere"),
    ] = DEFAULT_SCHEDULER_METRICS

    def __post_init__(self) -> None:
        check_metrics_address(self.metrics_address)

    @property
    def tokenizer_address(self) -> str:
        return self.tokenizer_link or ipc_address(self.run_dir, "scheduler-tokenizer")

    @property
    def executor_address(self) -> str:
        return self.executor_link or ipc_address(self.run_dir, "scheduler-executor")
