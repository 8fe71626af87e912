"""What is asked: conversations of one or more turns, the same ones for a seed, whatever serves them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quartet.services.cli.bench.record import Prompt, Record

Form = Literal["ids", "text", "chat"]
# Common words, of which most vocabularies have each, with the blank before it, as one token.
COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college"
)
WORDS = COMMON.split()
# Of a text's length in tokens, which only the server knows.
TEXT_MARGIN = 1.15
TEMPLATE_TOKENS = 32


class Turn(NamedTuple):
    """What is added to the conversation, how many tokens are asked for, and how long its user thinks before."""

    said: Prompt
    output_tokens: int
    think_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Each turn is sent with everything before it, answers included, behind `opening`."""

    opening: Prompt
    turns: list[Turn]
    form: Form

    def answered(self, record: Record) -> Prompt:
        if self.form == "ids":
            return record.answer_ids
        if self.form == "text":
            return record.answer_text
        return [{"role": "assistant", "content": record.answer_text}]


@dataclasses.dataclass(frozen=True)
class Mix:
    """Lengths in tokens are log-normal with these means and `sigma` (0: all alike). A conversation begins with one of
    `num_prefixes` prefixes of `prefix_len` tokens, has `num_turns`, and pauses between them for `think_time` seconds
    on average (exponential). A text has as many words as it should have tokens, which is near."""

    name: str = "fixed"
    input_len: int = 128
    output_len: int = 128
    sigma: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    think_time: float = 0.0


MIXES = {
    mix.name: mix
    for mix in (
        Mix("fixed"),
        # The means of ShareGPT's conversations as the paper on paged attention gives them.
        Mix("chat", input_len=161, output_len=338, sigma=0.8),
        Mix("shared-prefix", input_len=64, output_len=128, sigma=0.8, prefix_len=512),
        Mix("multi-turn", input_len=64, output_len=128, sigma=0.8, num_turns=4, think_time=1.0),
    )
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Makes a mix's prompts. Token ids are drawn from [low, high); what is asked for fits `max_model_len`."""

    mix: Mix
    form: Form = "ids"
    seed: str = "0"
    low: int = 1000
    high: int = 30000
    max_model_len: int = 2048

    def conversations(self, num_requests: int | None = None) -> Iterator[Conversation]:
        """So many turns in all, or without an end."""
        left = math.inf if num_requests is None else num_requests
        for number in itertools.count():
            if left <= 0:
                return
            conversation = self.conversation(number)
            if len(conversation.turns) > left:
                del conversation.turns[int(left) :]
            left -= len(conversation.turns)
            yield conversation

    def conversation(self, number: int) -> Conversation:
        mix = self.mix
        rng = random.Random(f"{self.seed} {number}")
        opening: Prompt = [] if self.form != "text" else ""
        if mix.prefix_len:
            which = rng.randrange(mix.num_prefixes)
            prefix_rng = random.Random(f"{self.seed} prefix {which}")
            opening = self._said(prefix_rng, mix.prefix_len, "system")
        turns: list[Turn] = []
        left = self._room() - mix.prefix_len
        for index in range(mix.num_turns):
            input_len, output_len = self._length(rng, mix.input_len), self._length(rng, mix.output_len)
            if index and input_len + output_len > left:
                break
            input_len = max(1, min(input_len, left - 1))
            output_len = max(1, min(output_len, left - input_len))
            left -= input_len + output_len
            think = rng.expovariate(1 / mix.think_time) if index and mix.think_time else 0.0
            turns.append(Turn(self._said(rng, input_len, "user"), output_len, think))
        return Conversation(opening, turns, self.form)

    def _room(self) -> int:
        if self.form == "ids":
            return self.max_model_len
        return int((self.max_model_len - TEMPLATE_TOKENS * self.mix.num_turns) / TEXT_MARGIN)

    def _length(self, rng: random.Random, mean: int) -> int:
        sigma = self.mix.sigma
        if not sigma:
            return mean
        return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    def _said(self, rng: random.Random, length: int, role: str) -> Prompt:
        if self.form == "ids":
            return rng.choices(range(self.low, self.high), k=length)
        text = " " + " ".join(rng.choices(WORDS, k=length))
        return text if self.form == "text" else [{"role": role, "content": text.lstrip()}]


class DatasetError(ValueError):
    """A line of a data set that cannot be used."""


def read_dataset(path: Path, form: Form, output_len: int) -> list[Conversation]:
    """JSON lines with `prompt` (a text), `messages` or `prompt_token_ids`, and `max_tokens` or `output_tokens` where
    it is not `output_len`. Raises DatasetError."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entry = json.loads(line)
                tokens = entry.get("max_tokens") or entry.get("output_tokens") or output_len
                turn = Turn(_entry_prompt(entry, form), int(tokens))
            except (ValueError, TypeError, AttributeError) as error:
                raise DatasetError(f"{path}:{number}: {error}") from None
            found.append(Conversation("" if form == "text" else [], [turn], form))
    if not found:
        raise DatasetError(f"{path} has no lines")
    return found


def _entry_prompt(entry: dict[str, Any], form: Form) -> Prompt:
    names = {"ids": "prompt_token_ids", "text": "prompt", "chat": "messages"}
    prompt = entry.get(names[form])
    if prompt is None and form == "chat" and isinstance(entry.get("prompt"), str):
        return [{"role": "user", "content": entry["prompt"]}]
    kind = str if form == "text" else list
    if not isinstance(prompt, kind) or not prompt:
        raise ValueError(f"{names[form]} is missing, or not what it should be")
    return prompt


def cycle(dataset: list[Conversation], num_requests: int | None, seed: str) -> Iterator[Conversation]:
    """The data set in a shuffled order, from its beginning again where it is too short."""
    order = dataset.copy()
    random.Random(f"{seed} order").shuffle(order)
    return itertools.islice(itertools.cycle(order), num_requests)
