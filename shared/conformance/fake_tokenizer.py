"""A tokenizer without text: it asks a scheduler for tokens and judges what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quartet.shared.conformance.fake_executor import (
    FakeExecutor,
    chain_on,
    chain_start,
    next_token,
    salted_root,
)
from quartet.shared.conformance.wire import Dialled, Loop
from quartet.shared.messages import (
    Abort,
    AnyMessage,
    CallFailed,
    ChoicePast,
    Failed,
    Finish,
    FinishReason,
    GetLoads,
    Loads,
    ModelInfo,
    NewRequest,
    Output,
    Outputs,
    PromptLogprobs,
    Release,
    Role,
    TokenLogprobs,
    WatchEvents,
)
from quartet.shared.sampling_params import SamplingParams

EOS = 2


@dataclass
class Asked:
    """A request, and what of it has come. `received` holds every Output as it came."""

    message: NewRequest
    outputs: dict[int, list[int]]
    finished: dict[int, tuple[FinishReason, int | None]] = field(default_factory=dict)
    failed: Failed | None = None
    aborted: bool = False
    received: list[Output] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_logprobs: dict[int, int] = field(default_factory=dict)

    @property
    def request_id(self) -> int:
        return self.message.request_id

    @property
    def seed(self) -> int:
        return self.message.sampling.seed

    @property
    def done(self) -> bool:
        return self.failed is not None or len(self.finished) == len(self.outputs)


def continuation(
    message: NewRequest, choice: int, forced: dict[int, int], past: list[int], model: ModelInfo
) -> tuple[list[int], tuple[FinishReason, int | None]]:
    """All outputs of a choice after this past, and how it ends: what the fake executor must lead to."""
    sampling = message.sampling
    eos = [] if sampling.ignore_eos else message.eos_token_ids
    chain = chain_start(salted_root(message.cache_salt))
    for token_id in [*message.prompt_token_ids, *past]:
        chain = chain_on(chain, token_id)
    outputs = list(past)
    limit = model.max_model_len - len(message.prompt_token_ids)
    limit = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
    while True:
        if outputs and len(outputs) >= sampling.min_tokens:
            if outputs[-1] in eos:
                return outputs, (FinishReason.STOP, None)
            if outputs[-1] in sampling.stop_token_ids:
                return outputs, (FinishReason.STOP, outputs[-1])
        if len(outputs) >= limit:
            return outputs, (FinishReason.LENGTH, None)
        token_id = forced.get(len(outputs), next_token(chain, sampling.seed, choice, model.vocab_size))
        outputs.append(token_id)
        chain = chain_on(chain, token_id)


class FakeTokenizer:
    """`executor` tells what the outputs have to be."""

    _next_id = 1000

    def __init__(self, loop: Loop, address: str, executor: FakeExecutor, name: str = "conformance-tokenizer") -> None:
        self.link = Dialled(loop, address, Role.TOKENIZER, name)
        self.link.on_message = self._on_message
        self.loop = loop
        self.report = loop.report
        self.executor = executor
        self.asked: dict[int, Asked] = {}
        self.loads: dict[int, Loads | CallFailed] = {}
        self.watched: list[WatchEvents] = []
        self._next_call = 1

    def ask(
        self,
        prompt: list[int],
        *,
        n: int = 1,
        pasts: dict[int, list[int]] | None = None,
        forced: dict[int, int] | None = None,
        salt: str = "",
        priority: int = 0,
        attempt: int = 1,
        vocabulary: str = "",
        **sampling: Any,
    ) -> Asked:
        """Greedy-like by the fake model; `forced` are tokens by output index."""
        FakeTokenizer._next_id += 1
        request_id = FakeTokenizer._next_id
        sampling = {"max_tokens": 8, "ignore_eos": True, "seed": request_id} | sampling
        message = NewRequest(
            request_id=request_id,
            attempt=attempt,
            prompt_token_ids=prompt,
            sampling=SamplingParams(**sampling),
            eos_token_ids=[EOS],
            choices=[],
            priority=priority,
            cache_salt=salt,
            vocabulary=vocabulary,
        )
        self.executor.forced[request_id] = forced or {}
        asked = Asked(message, {i: list((pasts or {}).get(i, [])) for i in range(n)})
        self.asked[request_id] = asked
        self.add(asked)
        return asked

    def add(self, asked: Asked) -> None:
        """Submits what is unfinished, with all that is known here."""
        message = asked.message
        message.choices = [ChoicePast(i, list(ids)) for i, ids in asked.outputs.items() if i not in asked.finished]
        message.prompt_logprobs_start = len(asked.prompt_logprobs)
        self.asked[asked.request_id] = asked
        self.executor.asked[asked.seed] = message
        self.link.send(message)

    def add_again(self, asked: Asked, pasts: dict[int, list[int]]) -> None:
        """As a tokenizer does that has these outputs, under a higher attempt."""
        asked.message.attempt += 1
        asked.outputs = {i: list(ids) for i, ids in pasts.items()}
        asked.finished.clear()
        asked.received.clear()
        asked.num_logprobs.clear()
        self.add(asked)

    def abort(self, asked: Asked) -> None:
        asked.aborted = True
        self.link.send(Abort(asked.request_id, asked.message.attempt))

    def release(self, asked: Asked) -> None:
        self.link.send(Release(asked.request_id, asked.message.attempt))

    def finish(self, asked: Asked, num_output_tokens: int, index: int = 0) -> None:
        self.link.send(Finish(asked.request_id, asked.message.attempt, index, num_output_tokens))

    def get_loads(self) -> Loads:
        """Answered in order, so whatever was sent before it has been handled."""
        call_id, self._next_call = self._next_call, self._next_call + 1
        self.link.send(GetLoads(call_id))
        self.loop.expect("loads.answered", lambda: call_id in self.loads, "no Loads came for a GetLoads")
        loads = self.loads[call_id]
        assert isinstance(loads, Loads)
        return loads

    def settle(self) -> None:
        """All that was sent is handled, and what it led to has arrived."""
        for _ in range(2):
            self.get_loads()
        self.loop.run_for(0.05)

    def wait(self, *asked: Asked, rule: str = "output.complete") -> None:
        """Until they have ended as they must."""
        self.loop.expect(
            rule,
            lambda: all(a.done for a in asked),
            f"{sum(not a.done for a in asked)} of {len(asked)} requests have not ended",
        )
        for a in asked:
            self.report.check("output.complete", a.failed is None, f"a request failed: {a.failed and a.failed.message}")
            for index in a.outputs:
                self.check_end(a, index)

    def failure(self, asked: Asked, rule: str, what: str) -> Failed:
        self.loop.expect(rule, lambda: asked.failed, what)
        assert asked.failed is not None
        return asked.failed

    def check_end(self, asked: Asked, index: int) -> None:
        past = list(asked.outputs[index][: self._num_past(asked, index)])
        ids, finish = continuation(asked.message, index, self.executor.forced[asked.seed], past, self.executor.model)
        told = asked.finished[index]
        self.report.check(
            "output.finish",
            len(asked.outputs[index]) == len(ids) and told == finish,
            f"ended after {len(asked.outputs[index])} tokens with {told[0].name.lower()} (stop_reason {told[1]}); "
            f"right is {len(ids)} tokens, {finish[0].name.lower()} ({finish[1]})",
        )
        if asked.message.sampling.logprobs is not None:
            num_new = len(ids) - len(past)
            self.report.check(
                "output.logprobs",
                asked.num_logprobs.get(index, 0) == num_new,
                f"{asked.num_logprobs.get(index, 0)} log-probabilities came for {num_new} tokens",
            )

    # --- what comes back --------------------------------------------------------------------------

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Outputs):
            for output in message.items:
                self._output(output)
        elif isinstance(message, (Loads, CallFailed)):
            self.loads[message.call_id] = message
        elif isinstance(message, Failed):
            asked = self.asked.get(message.request_id)
            if asked is not None and message.attempt == asked.message.attempt:
                asked.failed = message
        elif isinstance(message, PromptLogprobs):
            self._prompt_logprobs(message)
        elif isinstance(message, WatchEvents):
            self.watched.append(message)
        else:
            self.report.check("link.frames", False, f"a {type(message).__name__} came to a tokenizer")

    def _num_past(self, asked: Asked, index: int) -> int:
        return next((len(p.output_token_ids) for p in asked.message.choices if p.index == index), 0)

    def _output(self, output: Output) -> None:
        check = self.report.check
        asked = self.asked.get(output.request_id)
        if asked is None:
            check("output.owner", False, "an output of a request that another session asked for")
            return
        if output.attempt < asked.message.attempt or asked.aborted:
            return  # sent before the scheduler knew better
        check("output.owner", output.attempt == asked.message.attempt, f"attempt {output.attempt} was never made")
        check("output.owner", output.index in asked.outputs, f"choice {output.index} was not asked for")
        known = asked.outputs[output.index]
        check(
            "output.contiguous",
            output.start <= len(known),
            f"tokens from {output.start} on came where {len(known)} are known: a gap",
        )
        asked.received.append(output)
        overlap = len(known) - output.start
        check(
            "output.unchanged",
            output.token_ids[:overlap] == known[output.start : output.start + len(output.token_ids)],
            f"output tokens from {output.start} on were told again, and differently",
        )
        fresh = output.token_ids[overlap:]
        known += fresh
        past = known[: self._num_past(asked, output.index)]
        ids, _ = continuation(asked.message, output.index, self.executor.forced[asked.seed], past, self.executor.model)
        check("request.ended-past", ids != past or not fresh, "a token came after a past that had met its end")
        check(
            "output.tokens",
            known == ids[: len(known)],
            f"output token {len(known) - len(fresh)} is not what the executor sampled for it",
        )
        if asked.message.sampling.logprobs is not None and fresh:
            check(
                "output.logprobs",
                output.logprobs is not None and [entry.token_id for entry in output.logprobs[overlap:]] == fresh,
                "the log-probabilities are not those of the tokens they come with",
            )
            asked.num_logprobs[output.index] = asked.num_logprobs.get(output.index, 0) + len(fresh)
        runs = [run for run in self.executor.runs if (run.seed, run.choice) == (asked.seed, output.index)]
        if len(runs) == 1 and output.token_ids:
            cached = min(runs[0].num_skipped, runs[0].num_prompt_tokens)
            check(
                "output.cached",
                output.num_cached_tokens == cached,
                f"num_cached_tokens is {output.num_cached_tokens}, and {cached} prompt tokens were not computed",
            )
        if output.finish_reason is not None:
            asked.finished[output.index] = (output.finish_reason, output.stop_reason)

    def _prompt_logprobs(self, message: PromptLogprobs) -> None:
        asked = self.asked.get(message.request_id)
        if asked is None or message.attempt != asked.message.attempt:
            return
        known = asked.prompt_logprobs
        self.report.check(
            "output.prompt-logprobs",
            message.start <= len(known),
            f"prompt log-probabilities from {message.start} on came where {len(known)} are known",
        )
        known += message.entries[len(known) - message.start :]
