"""Structured output through each service: kept to by the executor, passed on by the scheduler, checked by the
tokenizer. The text is always a regular expression or a choice, which need no knowledge of anybody's notation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quartet.shared.conformance.columns import unpack_u32
from quartet.shared.conformance.fake_executor import MODEL
from quartet.shared.messages import FAILED_TOKEN_ID, AnyMessage, ErrorCode, NewRequest, Vocabulary
from quartet.shared.sampling_params import StructuredKind, StructuredOutput

if TYPE_CHECKING:
    from quartet.shared.conformance.executor import ExecutorKit
    from quartet.shared.conformance.scheduler import SchedulerKit
    from quartet.shared.conformance.tokenizer import TokenizerKit

EXECUTOR_RULES = {
    "structured.kept": "a row with structured output samples what leads to a complete output, whatever its logits say",
    "structured.end": "its end-of-sequence tokens are sampled where the output is complete, and nowhere else",
    "structured.resumed": "a row that is entered with outputs goes on in its text from there",
    "structured.fails": "a row fails alone that leads nowhere, does not compile, or names an unknown vocabulary",
    "structured.invalid": "of those the ones whose text is to blame are invalid_rows, and only they",
}
SCHEDULER_RULES = {
    "structured.passed": "structured output and its vocabulary's name travel with the row, after the whole vocabulary",
    "structured.refused": "where the executor has no structured output, such a request fails with UNIMPLEMENTED",
    "structured.invalid": "a row of invalid_rows fails its request alone, with INVALID_ARGUMENT about structured",
}
TOKENIZER_RULES = {
    "structured.passed": "the scheduler gets the whole vocabulary, then the request that names it",
    "structured.refused": "what does not compile is refused with INVALID_ARGUMENT about structured",
}

A, B, C, AB, END, FREE = range(6)
TOKENS = [b"a", b"b", b"c", b"ab", b"<end>", b"free"]
PLAIN = 40


def _regex(text: str) -> StructuredOutput:
    return StructuredOutput(StructuredKind.REGEX, text)


# --- the executor ---------------------------------------------------------------------------------


def structured_rows(kit: ExecutorKit) -> None:
    """Rows that are to spell abc, with a vocabulary of the kit's own, beside one that is free."""
    if not kit.start().structured_output:
        return
    check, count = kit.report.check, len(TOKENS)
    kit.link.send(Vocabulary("kit", count, 0, TOKENS[:2]))
    kit.link.send(Vocabulary("kit", count, 2, TOKENS[2:], [END]))
    kit.link.send(Vocabulary("small", 3, 0, [b"a", b"b", b"<end>"], [2]))

    abc = _regex("abc|abcc")
    # What the logits want most is never allowed but where the text is complete.
    pushed = kit.row(0, kit.tokens(5), kit.blocks(1, 1), eos=[END], structured=abc, logit_bias={END: 100, FREE: 50})
    pushed.vocabulary = "kit"
    free = kit.row(1, kit.tokens(5), kit.blocks(2, 1), logit_bias={PLAIN: 100})
    tokens = kit.run(2, new=[pushed, free], prefill=[(0, 5), (1, 5)])
    said = []
    for _ in range(4):
        check("structured.fails", tokens[1] == PLAIN, f"a free row beside it sampled {tokens[1]}, forced was {PLAIN}")
        said.append(tokens[0])
        if tokens[0] in (END, FREE):
            break
        tokens = kit.run(2, decode=[0, 1])
    *text, end = said
    check("structured.kept", all(token < END for token in text), f"{said} was sampled, of which {FREE} leads nowhere")
    spelt = b"".join(TOKENS[token] for token in text)
    check("structured.kept", spelt == b"abc", f"{spelt!r} was sampled, where abc is the shortest that may come")
    check("structured.end", end == END, f"{end} came after abc, where the end-of-sequence was forced and allowed")

    resumed = kit.row(0, [*kit.tokens(5), A], kit.blocks(1, 1), num_prompt=5, structured=abc, logit_bias={AB: 100})
    resumed.vocabulary = "kit"
    tokens = kit.run(2, removed=[0], new=[resumed], decode=[1], prefill=[(0, 6)])
    check("structured.resumed", tokens[-1] == B, f"{tokens[-1]} came after the past a, where only b leads on")

    bad = {
        0: (_regex("abc"), "small", [A, B]),
        2: (_regex("(a"), "kit", []),
        3: (_regex("a"), "unknown", []),
    }
    rows = []
    for req_index, (structured, vocabulary, past) in bad.items():
        prompt = kit.tokens(5)
        row = kit.row(req_index, [*prompt, *past], kit.blocks(3 + req_index, 1), num_prompt=5, structured=structured)
        row.vocabulary = vocabulary
        rows.append(row)
    prefill = [(row.req_index, len(unpack_u32(row.token_ids))) for row in rows]
    result = kit.result(kit.send(removed=[0], new=rows, decode=[1], prefill=prefill), 4)
    tokens = unpack_u32(result.token_ids)
    named = sorted(req_index for req_index, _ in result.errors)
    check("structured.fails", tokens == [PLAIN] + [FAILED_TOKEN_ID] * 3, f"{tokens} was sampled, three rows must fail")
    check("structured.fails", named == [0, 2, 3], f"errors names the rows {named}, right is [0, 2, 3]")
    check(
        "structured.invalid",
        sorted(result.invalid_rows) == [0, 2],
        f"invalid_rows are {sorted(result.invalid_rows)}, right is [0, 2]: 3 has an unknown vocabulary",
    )
    tokens = kit.run(1, removed=[0, 2, 3], decode=[1])
    check("structured.fails", tokens == [PLAIN], "the free row did not go on")


# --- the scheduler --------------------------------------------------------------------------------


def structured_requests(kit: SchedulerKit) -> None:
    """One structured request that goes through, one whose row is invalid, and a plain one."""
    tokenizer, executor = kit.start(msgspec.structs.replace(MODEL, structured_output=True))
    check = kit.report.check
    parts = [Vocabulary("kit", 3, 0, TOKENS[:2]), Vocabulary("kit", 3, 2, [b"<end>"], [2])]
    for part in parts:
        tokenizer.link.send(part)
    good, bad = (
        tokenizer.ask(kit.prompt(6), ignore_eos=False, structured=_regex("a|b"), vocabulary="kit") for _ in range(2)
    )
    plain = tokenizer.ask(kit.prompt(6))
    executor.fail_seeds.add(bad.seed)
    executor.invalid_seeds.add(bad.seed)
    kit.loop.expect("structured.invalid", lambda: bad.failed is not None, "the end of a request whose row is invalid")
    assert bad.failed is not None
    told = (bad.failed.code, bad.failed.field)
    check(
        "structured.invalid",
        told == (ErrorCode.INVALID_ARGUMENT, "structured"),
        f"it failed with {told[0].name} about {told[1]!r}",
    )
    tokenizer.wait(good, plain)
    check("structured.passed", executor.vocabularies == parts, "the executor was not sent the vocabulary as it came")
    names = {run.vocabulary for run in executor.runs if run.seed in (good.seed, bad.seed)}
    check("structured.passed", names == {"kit"}, f"its rows name the vocabularies {sorted(names)}, right is kit")
    kit.idle(tokenizer)
    executor.close()
    _without(kit)


def _without(kit: SchedulerKit) -> None:
    tokenizer, _ = kit.start(msgspec.structs.replace(MODEL, model_fingerprint="other"))
    asked = tokenizer.ask(kit.prompt(6), ignore_eos=False, structured=_regex("a"), vocabulary="kit")
    failed = tokenizer.failure(asked, "structured.refused", "a refusal of structured output")
    kit.report.check("structured.refused", failed.code is ErrorCode.UNIMPLEMENTED, f"it failed with {failed.code.name}")


# --- the tokenizer --------------------------------------------------------------------------------


def structured_submits(kit: TokenizerKit) -> None:
    """One text that compiles, and one that does not."""
    kit.start()
    check = kit.report.check
    stream = kit.stream(structured=_regex("a|b"))
    asked = _until_asked(kit, stream.request_id)
    came = kit.scheduler.inbox
    parts = [message for message in came[: came.index(asked)] if isinstance(message, Vocabulary)]
    mine = [part for part in parts if part.fingerprint == asked.vocabulary]
    size = mine[0].num_tokens if mine else 0
    starts = [sum(len(part.tokens) for part in mine[:i]) for i in range(len(mine) + 1)]
    check(
        "structured.passed",
        mine and [part.start for part in mine] == starts[:-1] and starts[-1] == size,
        f"the vocabulary {asked.vocabulary!r} came in parts at {[part.start for part in mine]} of {size} tokens",
    )
    check("structured.passed", asked.sampling.structured is not None, "the request came without its structured output")
    again = kit.stream(structured=_regex("c"))
    _until_asked(kit, again.request_id)
    later = [m for m in came[came.index(asked) :] if isinstance(m, Vocabulary) and m.fingerprint == asked.vocabulary]
    check("structured.passed", not later, "the vocabulary came twice in one session")
    failed = kit.failure(kit.stream(structured=_regex("(a")), "structured.refused", "a refusal of an open bracket")
    check(
        "structured.refused",
        (failed.code, failed.field) == (ErrorCode.INVALID_ARGUMENT, "structured"),
        f"{failed.code.name} with field {failed.field!r}, right is INVALID_ARGUMENT and 'structured'",
    )


def _until_asked(kit: TokenizerKit, request_id: int) -> NewRequest:
    def found(message: AnyMessage) -> bool:
        return isinstance(message, NewRequest) and message.request_id == request_id

    kit.loop.expect("structured.passed", lambda: any(map(found, kit.scheduler.inbox)), "a NewRequest to the scheduler")
    asked = next(filter(found, kit.scheduler.inbox))
    assert isinstance(asked, NewRequest)
    return asked
