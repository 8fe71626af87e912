"""One request of the ledger: what was asked, and what has come of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.services.gateway.choice import LOGPROB_BYTES, TOKEN_BYTES, Choice, Gap
from quartet.services.gateway.events import StreamError
from quartet.shared.messages import Prompt, PromptLogprobs, Submit, TokenLogprobs, TokensPrompt
from quartet.shared.received import are_logprobs, are_token_ids
from quartet.shared.sampling_params import SamplingParams, TextParams, ToolParams

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from quartet.services.gateway.subscription import Subscription
    from quartet.services.gateway.tokenizer import Peer, Tokenizer
    from quartet.shared.messages import Abort


class Stream:
    """One request of the ledger, in resubmittable form. Owned by the stream table."""

    def __init__(
        self,
        request_id: int,
        prompt: Prompt,
        sampling: SamplingParams,
        text: TextParams,
        choices: list[Choice],
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        detach_grace: float = 0.0,
        prompt_logprobs_start: int = 0,
        tools: ToolParams | None = None,
        read_prefix_cache: bool = True,
        write_prefix_cache: bool = True,
        trace_context: str = "",
    ) -> None:
        self.request_id = request_id
        self.attempt = 0
        self.prompt = prompt
        self.sampling = sampling
        self.text = text
        self.choices = {choice.index: choice for choice in choices}
        self.unfinished = sum(not choice.finished for choice in choices)
        self.first_index = next((choice.index for choice in choices if not choice.finished), -1)
        self.priority = priority
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.tools = tools
        self.read_prefix_cache = read_prefix_cache
        self.write_prefix_cache = write_prefix_cache
        self.trace_context = trace_context
        self.detach_grace = detach_grace
        self.prompt_logprobs_base = prompt_logprobs_start
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.num_cached_tokens: int | None = None
        self.accepted = False
        # Ids mean something only to the model and the tokenizer that made them.
        self.fingerprints: tuple[str, str] | None = None
        self.tokenizer: Tokenizer | None = None
        # Live tokenizers that have worked on it before, and what makes them forget it.
        self.left: dict[Peer, Abort] = {}
        self.waiting_since: float | None = None
        self.refused_by: set[Tokenizer] = set()
        self.gaps = 0
        self.subscription: Subscription | None = None
        self.detached_at: float | None = None
        # For metrics and traces.
        self.adopted = False
        self.opened_at = 0.0
        self.first_token_at: float | None = None
        self.num_submits = 0
        self.span: Span | None = None
        self.finished = False
        self.error: StreamError | None = None

    @property
    def prompt_token_ids(self) -> list[int] | None:
        return self.prompt.token_ids if isinstance(self.prompt, TokensPrompt) else None

    @property
    def over(self) -> bool:
        return self.finished or self.error is not None

    def submit(self, attempt: int) -> Submit:
        self.attempt = attempt
        self.num_submits += 1
        return Submit(
            self.request_id,
            attempt,
            self.prompt,
            self.sampling,
            self.text,
            [choice.past for choice in self.choices.values() if not choice.finished],
            self.priority,
            self.cache_salt,
            self.tenant,
            self.prompt_logprobs_base + len(self.prompt_logprobs),
            self.tools,
            self.read_prefix_cache,
            self.write_prefix_cache,
            self.trace_context,
        )

    def accept(self, prompt_token_ids: list[int], fingerprints: tuple[str, str] | None) -> None:
        """From now on the prompt is these ids: a template may tell the time. Raises Gap when they cannot be,
        or are others than those that were sent."""
        known = self.prompt_token_ids
        if not prompt_token_ids or not are_token_ids(prompt_token_ids) or known not in (None, prompt_token_ids):
            raise Gap
        self.accepted = True
        self.fingerprints = fingerprints
        self.prompt = TokensPrompt(prompt_token_ids)

    def add_prompt_logprobs(self, message: PromptLogprobs) -> None:
        """Raises Gap when entries before these are missing, or when these cannot be."""
        known = self.prompt_logprobs_base + len(self.prompt_logprobs) - message.start
        end = message.start + len(message.entries)
        if (
            known < 0
            or message.start < 0
            or end > len(self.prompt_token_ids or ())
            or not are_logprobs(message.entries)
        ):
            raise Gap
        self.prompt_logprobs += message.entries[known:]

    def size(self) -> int:
        prompt = TOKEN_BYTES * len(self.prompt_token_ids or ())
        logprobs = sum(LOGPROB_BYTES * (1 + len(entry.top)) for entry in self.prompt_logprobs if entry is not None)
        return 512 + prompt + logprobs + sum(choice.size() for choice in self.choices.values())
