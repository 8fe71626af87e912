"""What the tokenizer counts for Prometheus, and how it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.shared.metrics import TTFT_BUCKETS, Families, Histogram

if TYPE_CHECKING:
    from quartet.services.tokenizer.core import TokenizerCore


class TokenizerMetrics:
    """A few additions a request, none a token."""

    def __init__(self) -> None:
        self.encode_time = Histogram(TTFT_BUCKETS)
        self.encoded_tokens = 0
        self.submits = 0
        self.accepted = 0
        self.refused = 0
        self.attaches = 0
        self.takeovers = 0
        self.added_to_scheduler = 0
        self.added_again = 0


def tell(core: TokenizerCore, encoding: int, families: Families) -> None:
    metrics = core.metrics
    requests = list(core.requests.values())
    num_unfinished = sum(request.finished_at is None for request in requests)
    for name, about, value in (
        ("tokenizer_requests", "Unfinished requests in the tokenizer's ledger.", num_unfinished),
        ("tokenizer_requests_retained", "Finished ones that wait for their release.", len(requests) - num_unfinished),
        (
            "tokenizer_requests_orphaned",
            "Those whose gateway is gone.",
            sum(request.orphaned_at is not None for request in requests),
        ),
        ("tokenizer_encoding", "Prompts that are being encoded.", encoding),
    ):
        families.gauge(name, about, value)
    for name, about, value in (
        ("tokenizer_submits", "Submits of gateways, resubmits included.", metrics.submits),
        ("tokenizer_accepted", "Submits that were accepted.", metrics.accepted),
        ("tokenizer_refused", "Submits that were refused.", metrics.refused),
        ("tokenizer_attaches", "Attaches of gateways to requests of an earlier one.", metrics.attaches),
        ("tokenizer_takeovers", "Requests taken over by a later attempt.", metrics.takeovers),
        ("tokenizer_added", "Requests told to a scheduler.", metrics.added_to_scheduler),
        ("tokenizer_resubmits", "Those of them that an earlier scheduler, or this one, had had.", metrics.added_again),
        ("tokenizer_encoded_tokens", "Prompt tokens of encoded texts.", metrics.encoded_tokens),
    ):
        families.counter(name, about, value)
    families.histogram("tokenizer_encode_time_seconds", "Waiting for a thread included.", metrics.encode_time)
