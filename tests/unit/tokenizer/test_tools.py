"""Tools from the prompt to the deltas: what the template is told, what the output must be, and going on anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quartet.services.tokenizer.chat_template import ChatTemplate
from quartet.services.tokenizer.core import TokenizerCore
from quartet.services.tokenizer.grammar_check import GrammarChecker
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.prompt_encoder import Refusal
from quartet.services.tokenizer.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    SMOLLM2,
    ToolFormat,
    pick_format,
)
from quartet.shared.messages import (
    Attach,
    Attached,
    ChatMessage,
    ChatPrompt,
    ChoicePast,
    Delta,
    Deltas,
    ErrorCode,
    Failed,
    FinishReason,
    ModelInfo,
    NewRequest,
    Output,
    Outputs,
    PrefixCacheReset,
    ResetPrefixCache,
    Submit,
    TokensPrompt,
    ToolCall,
    ToolCallDelta,
    Vocabulary,
)
from quartet.shared.sampling_params import (
    InvalidField,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
    TextParams,
    Tool,
    ToolChoice,
    ToolParams,
)
from quartet.shared.structured_output import build_vocabulary, compile_grammar
from quartet.shared.tool_calls import joined

MakeModel = Callable[..., ModelInfo]
CITY = '{"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "required": ["city"], "$defs": {"c": {"enum": ["Oslo", "Bern"]}}}'  # noqa: E501
WEATHER, NOW = Tool("get_weather", "The weather.", CITY), Tool("now")
AUTO = ToolParams([WEATHER, NOW])
REQUIRED = ToolParams([WEATHER, NOW], ToolChoice.REQUIRED)
RID = 0xABC
OUTPUT = 'Hä?<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


# --- the prompt -----------------------------------------------------------------------------------


def test_a_template_is_told_of_tools_as_such_templates_are_written() -> None:
    template = ChatTemplate("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}", {})
    call = ToolCall("c1", "now", "")
    prompt = ChatPrompt(
        [
            ChatMessage("assistant", "", tool_calls=[call, ToolCall("c2", "get_weather", '{"city": "Oslo"}')]),
            ChatMessage("tool", "noon", tool_call_id="c1"),
        ]
    )
    text = template.render(prompt, AUTO)
    tools, end = json.JSONDecoder().raw_decode(text)
    assert [t["function"]["name"] for t in tools] == ["get_weather", "now"] and tools[0]["type"] == "function"
    assert tools[0]["function"]["parameters"]["required"] == ["city"] and tools[0]["function"]["description"]
    assistant, tool = json.loads(text[end:])
    assert assistant["tool_calls"][1] == {
        "id": "c2",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
    }
    assert assistant["tool_calls"][0]["function"]["arguments"] == {} and tool["tool_call_id"] == "c1"
    assert "get_weather" not in template.render(
        ChatPrompt([ChatMessage("user", "x")]), ToolParams([WEATHER], ToolChoice.NONE)
    )


def test_a_template_that_says_nothing_of_tools_has_them_told_by_a_system_message(smollm: LoadedTokenizer) -> None:
    template = ChatTemplate(smollm.chat_template, smollm.special_tokens)
    assert pick_format("auto", template.source) is SMOLLM2
    question = ChatMessage("user", "Weather?")
    called = ChatMessage("assistant", "", tool_calls=[ToolCall("c", "now", "{}")])
    text = template.render(ChatPrompt([question, called, ChatMessage("tool", "noon", tool_call_id="c")]), AUTO)
    assert text.startswith("<|im_start|>system\nYou are an expert in composing functions.")
    assert '<tools>[{"type": "function", "function": {"name": "get_weather"' in text
    assert '<|im_start|>assistant\n<tool_call>[{"name": "now", "arguments": {}}]</tool_call><|im_end|>' in text
    text = template.render(ChatPrompt([ChatMessage("system", "Be nice."), question]), AUTO)
    assert text.startswith("<|im_start|>system\nBe nice.\n\nYou are an expert") and text.count("system") == 1


@pytest.mark.parametrize("arguments", ["[1]", "{", '"x"'])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    prompt = ChatPrompt([ChatMessage("assistant", "", tool_calls=[ToolCall("c", "now", arguments)])])
    with pytest.raises(InvalidField, match="arguments of now"):
        ChatTemplate("{{ tools }}", {}).render(prompt)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", SMOLLM2),
        ("{{ tools }}<tool_call>", HERMES),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }}<|start_header_id|>", LLAMA3_JSON),
        ("{{ tools }} in a form of its own", None),
    ],
)
def test_the_format_is_picked_by_the_template(template: str | None, form: ToolFormat | None) -> None:
    assert pick_format("auto", template) is form
    assert pick_format("mistral", template) is MISTRAL and pick_format("none", template) is None


# --- what the output must be ----------------------------------------------------------------------


def submit(tools: ToolParams | None = None, structured: StructuredOutput | None = None, **sampling: Any) -> Submit:
    params = SamplingParams(max_tokens=100, structured=structured, **sampling)
    return Submit(RID, 1, TokensPrompt([5]), params, TextParams(), [ChoicePast(0)], tools=tools)


def accepts(loaded: LoadedTokenizer, structured: StructuredOutput, text: str) -> bool:
    """Whether the text is a whole output."""
    matcher = compile_grammar(structured, build_vocabulary(loaded.token_bytes, sorted(loaded.special_ids)))
    return bool(matcher.consume_tokens(loaded.encode(text, False)) and matcher.is_accepting())


def call_text(form: ToolFormat, *calls: tuple[str, str]) -> str:
    objects = [f'{{"name": "{name}", "{form.arguments_key}": {arguments}}}' for name, arguments in calls]
    if form.listed:
        return f"{form.start}[{', '.join(objects)}]{form.end}"
    return form.separator.join(f"{form.start}\n{o}\n{form.end}" if form.start else o for o in objects)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_required_call_is_a_call_of_a_tool_with_its_arguments(tiny: LoadedTokenizer, form: ToolFormat) -> None:
    checker = GrammarChecker(tiny, form)
    required = checker.check(submit(REQUIRED))
    assert required is not None
    oslo, now = ("get_weather", '{"city": "Oslo"}'), ("now", "{}")
    for good in ([oslo], [now], [oslo, now, oslo]):
        assert accepts(tiny, required, call_text(form, *good))
    for bad in (
        [("get_weather", "{}")],
        [("now", '{"x": 1}')],
        [("other", "{}")],
        [("get_weather", '{"city": "Rome"}')],
    ):
        assert not accepts(tiny, required, call_text(form, *bad))
    assert not accepts(tiny, required, "No.")
    named = checker.check(submit(ToolParams([WEATHER, NOW], ToolChoice.REQUIRED, "now", parallel=False)))
    assert named is not None and accepts(tiny, named, call_text(form, now))
    assert not accepts(tiny, named, call_text(form, oslo)) and not accepts(tiny, named, call_text(form, now, now))


def test_where_calls_may_be_made_the_answer_has_its_own_form(tiny: LoadedTokenizer) -> None:
    checker = GrammarChecker(tiny, HERMES)
    assert checker.check(submit(AUTO)) is None
    schema = StructuredOutput(
        StructuredKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    )
    either = checker.check(submit(AUTO, schema))
    assert either is not None
    assert accepts(tiny, either, '{"a": 1}') and accepts(tiny, either, call_text(HERMES, ("now", "{}")))
    assert not accepts(tiny, either, "No.")
    none = ToolParams([WEATHER], ToolChoice.NONE)
    assert checker.check(submit(none)) is None and checker.check(submit(none, schema)) == schema


def test_gbnf_is_turned_into_lark(tiny: LoadedTokenizer) -> None:
    gbnf = StructuredOutput(StructuredKind.GRAMMAR, 'root ::= "yes" | "no" other\nother ::= [a-c]+')
    lark = GrammarChecker(tiny, None).check(submit(structured=gbnf))
    assert lark is not None and lark != gbnf and lark.kind is StructuredKind.GRAMMAR
    assert accepts(tiny, lark, "yes") and accepts(tiny, lark, "noabc") and not accepts(tiny, lark, "no")


REGEX, GRAMMAR, SCHEMA = StructuredKind.REGEX, StructuredKind.GRAMMAR, StructuredKind.JSON_SCHEMA


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (REGEX, "(abc"),
        (REGEX, "(?<=a)b"),
        (REGEX, r"(a)\1"),
        (REGEX, "(a|b|c)*" * 2000),
        (GRAMMAR, 'root ::= "yes"\nroot ::= "no"'),
        (GRAMMAR, 'start: "yes"\nstart: "no"'),
        (GRAMMAR, "start: missing"),
        (GRAMMAR, "nonsense"),
        (GRAMMAR, 'root ::= "a' + "(" * 5000),
        (GRAMMAR, 'root ::= "a"\n' * 5000),
        (SCHEMA, "false"),
        (SCHEMA, '{"type": "yaml"}'),
        (SCHEMA, '{"$ref": "#/$defs/x"}'),
        (SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000),
    ],
)
def test_what_does_not_compile_is_that_requests_error(tiny: LoadedTokenizer, kind: StructuredKind, text: str) -> None:
    checker = GrammarChecker(tiny, HERMES)
    with pytest.raises(Refusal) as caught:
        checker.check(submit(structured=StructuredOutput(kind, text)))
    assert caught.value.field == "structured" and str(caught.value).startswith("structured: ")
    assert len(str(caught.value)) < 700
    fine = StructuredOutput(REGEX, "a|")
    assert checker.check(submit(structured=fine)) == fine == checker.check(submit(structured=fine))


def test_what_cannot_be_asked_together_is_refused(tiny: LoadedTokenizer, tiny_factory: Callable[..., Any]) -> None:
    answer = StructuredOutput(REGEX, "a")
    bad = ToolParams([Tool("f", "", '{"type": "yaml"}')], ToolChoice.REQUIRED)
    endless = tiny_factory(eos_token_ids=())
    for checker, asked, field in (
        (GrammarChecker(tiny, HERMES), submit(REQUIRED, answer), "tool_choice"),
        (GrammarChecker(tiny, None), submit(AUTO), "tools"),
        (GrammarChecker(tiny, HERMES), submit(bad), "tools"),
        (GrammarChecker(endless, HERMES), submit(structured=answer), "structured"),
    ):
        with pytest.raises(Refusal) as caught:
            checker.check(asked)
        assert caught.value.field == field
    assert GrammarChecker(endless, HERMES).check(submit(structured=answer, stop_token_ids=[2])) == answer


def test_a_past_that_the_output_cannot_have_begun_with_is_refused_before_any_step(tiny: LoadedTokenizer) -> None:
    checker = GrammarChecker(tiny, HERMES)
    (eos,) = tiny.eos_token_ids
    ids = {text: next(i for i in range(tiny.vocab_size) if tiny.bytes_of(i) == text.encode()) for text in "abcx"}

    def check(spelt: str, *more: int, **options: Any) -> None:
        asked = submit(structured=StructuredOutput(REGEX, "ab*c"), **options)
        asked.choices = [ChoicePast(0, []), ChoicePast(1, [*(ids[c] for c in spelt), *more])]
        assert checker.check(asked) == StructuredOutput(REGEX, "ab*c")

    for fine, more in (("", ()), ("a", ()), ("abb", ()), ("abc", ()), ("abc", (eos,)), ("a", (tiny.vocab_size,))):
        check(fine, *more)
    check("ac", ids["x"], stop_token_ids=[ids["x"]])
    bad = (("x", (), 0), ("abx", (), 2), ("ab", (eos,), 2), ("abc", (eos, eos), 3), ("ac", (0,), 2))
    for spelt, more, place in bad:
        with pytest.raises(Refusal) as caught:
            check(spelt, *more)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT and caught.value.field == "past_token_ids"
        assert str(caught.value).startswith(f"past_token_ids: token {place} of choice 1")
    with pytest.raises(Refusal, match="token 1 of choice 1"):
        check("abc", stop_token_ids=[ids["b"]])


# --- the ledger -----------------------------------------------------------------------------------


class Bench:
    def __init__(self, loaded: LoadedTokenizer, model: ModelInfo, form: ToolFormat | None = HERMES) -> None:
        self.core = TokenizerCore(loaded, lambda: 100.0, tool_format=form)
        for gateway in ("g", "h"):
            self.core.gateway_up(gateway)
        self.core.scheduler_up()
        self.core.model_changed(model)
        self.start = self.take(None)

    def take(self, to: str | None) -> list[Any]:
        return [message for receiver, message in self.core.take() if receiver == to]

    def add(self, asked: Submit, structured: StructuredOutput | None = None, gateway: str = "g") -> list[Any]:
        self.core.submit(gateway, asked)
        self.core.encoded(asked.request_id, asked.attempt, [5], structured)
        return self.core.take()

    def output(self, start: int, text: str, finish: FinishReason | None = None, attempt: int = 1) -> list[Delta]:
        ids = [3 + byte for byte in text.encode()]
        self.core.outputs(Outputs([Output(RID, attempt, 0, start, ids, finish_reason=finish)]))
        return [delta for message in self.take("g") if isinstance(message, Deltas) for delta in message.items]


@pytest.fixture
def bench(tiny: LoadedTokenizer, model_info: MakeModel) -> Bench:
    return Bench(tiny, model_info())


def test_calls_are_told_beside_the_text(bench: Bench) -> None:
    bench.add(submit(AUTO))
    deltas = []
    for i, byte in enumerate(OUTPUT.encode()):
        bench.core.outputs(Outputs([Output(RID, 1, 0, i, [3 + byte])]))
        deltas += [d for m in bench.take("g") if isinstance(m, Deltas) for d in m.items]
    (last,) = bench.output(len(OUTPUT.encode()), "", FinishReason.STOP)
    assert "".join(d.text for d in deltas) == "Hä?" and last.text == "" and last.num_text_bytes == 4
    (call,) = joined(part for d in deltas for part in d.tool_calls)
    assert (call.index, call.name, call.arguments) == (0, "get_weather", '{"city": "Zürich"}')
    assert last.num_call_bytes == 1 + len('{"city": "Zürich"}'.encode())
    assert last.finish_reason is FinishReason.STOP


def test_d9_a_call_that_is_cut_ends_with_length(bench: Bench) -> None:
    bench.add(submit(AUTO))
    (delta,) = bench.output(0, '<tool_call>{"name": "now", "arg', FinishReason.LENGTH)
    assert (delta.text, delta.tool_calls) == ('<tool_call>{"name": "now", "arg', [])
    assert delta.finish_reason is FinishReason.LENGTH


def test_d9_tools_that_are_offered_and_not_used_let_the_text_pass(bench: Bench) -> None:
    bench.add(submit(AUTO))
    (delta,) = bench.output(0, "Just <text>.", FinishReason.STOP)
    assert (delta.text, delta.tool_calls) == ("Just <text>.", [])


def test_without_tools_a_call_is_text(bench: Bench) -> None:
    bench.add(submit(ToolParams([WEATHER], ToolChoice.NONE)))
    (delta,) = bench.output(0, OUTPUT, FinishReason.STOP)
    assert delta.text == OUTPUT and not delta.tool_calls


@pytest.mark.parametrize("at", range(0, len(OUTPUT.encode()) + 1, 3))
def test_a_stream_that_moves_repeats_and_loses_nothing(tiny: LoadedTokenizer, model_info: MakeModel, at: int) -> None:
    data = OUTPUT.encode()
    whole = Bench(tiny, model_info())
    whole.add(submit(AUTO))
    (all_of_it,) = whole.output(0, OUTPUT, FinishReason.STOP)

    first = Bench(tiny, model_info())
    first.add(submit(AUTO))
    first.core.outputs(Outputs([Output(RID, 1, 0, 0, [3 + byte for byte in data[:at]])]))
    known = [d for m in first.take("g") if isinstance(m, Deltas) for d in m.items]
    text, parts = "".join(d.text for d in known), [part for d in known for part in d.tool_calls]
    call_bytes = known[-1].num_call_bytes if known else 0

    # Another tokenizer is told what the client has; later, the one that has it is asked by another gateway.
    second = Bench(tiny, model_info())
    moved = submit(AUTO)
    moved.choices = [ChoicePast(0, [3 + byte for byte in data[:at]], len(text.encode()), call_bytes)]
    second.add(moved)
    second.core.outputs(
        Outputs([Output(RID, 1, 0, at, [3 + byte for byte in data[at:]], finish_reason=FinishReason.STOP)])
    )
    (rest,) = [d for m in second.take("g") if isinstance(m, Deltas) for d in m.items]
    assert text + rest.text == all_of_it.text and rest.num_text_bytes == all_of_it.num_text_bytes
    assert joined([*parts, *rest.tool_calls]) == joined(all_of_it.tool_calls)
    assert rest.num_call_bytes == all_of_it.num_call_bytes

    second.core.attach("h", Attach(RID, 7, {0: at}))
    sent = second.take("h")
    (attached,) = [m for m in sent if isinstance(m, Attached)]
    assert attached.submit.tools == AUTO
    (past,) = attached.submit.choices
    assert (past.sent_bytes, past.sent_call_bytes) == (len(text.encode()), call_bytes)
    (again,) = [d for m in sent if isinstance(m, Deltas) for d in m.items]
    assert text + again.text == all_of_it.text and joined([*parts, *again.tool_calls]) == joined(all_of_it.tool_calls)


def test_special_tokens_that_open_calls_are_not_skipped(
    tiny_factory: Callable[..., LoadedTokenizer], model_info: MakeModel
) -> None:
    from tokenizers import AddedToken

    loaded = tiny_factory()
    loaded.tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", normalized=False, special=True)])
    marker = loaded.tokenizer.token_to_id("[TOOL_CALLS]")
    loaded.token_bytes.append(b"[TOOL_CALLS]")
    object.__setattr__(loaded, "special_ids", loaded.special_ids | {marker})
    bench = Bench(loaded, model_info(), MISTRAL)
    bench.add(submit(AUTO))
    bench.core.outputs(Outputs([Output(RID, 1, 0, 0, [marker])]))
    bench.take("g")
    (delta,) = bench.output(1, '[{"name": "now", "arguments": {}}]', FinishReason.STOP)
    assert delta.text == "" and [part.name for part in delta.tool_calls] == ["now"]
    required = GrammarChecker(loaded, MISTRAL).check(submit(REQUIRED))
    assert required is not None and f"<[{marker}]>" in required.text


# --- structured output ----------------------------------------------------------------------------


def test_the_vocabulary_goes_before_what_needs_it_and_once(tiny: LoadedTokenizer, model_info: MakeModel) -> None:
    model = model_info()
    model.structured_output = True
    bench = Bench(tiny, model)
    (part,) = bench.start
    assert part == Vocabulary("tiny", tiny.vocab_size, 0, tiny.token_bytes, [0, 1])
    answer = StructuredOutput(REGEX, "a+")
    sent = [m for to, m in bench.add(submit(structured=answer), answer) if to is None]
    assert [type(m) for m in sent] == [NewRequest]
    assert sent[0].vocabulary == "tiny" and sent[0].sampling.structured == answer
    bench.core.scheduler_down()
    bench.core.scheduler_up()
    assert [type(m) for m in bench.take(None)] == [Vocabulary, NewRequest]


def test_the_ledger_keeps_what_was_asked_and_the_scheduler_is_told_what_it_means(
    tiny: LoadedTokenizer, model_info: MakeModel
) -> None:
    model = model_info()
    model.structured_output = True
    bench = Bench(tiny, model)
    derived = StructuredOutput(GRAMMAR, "start: x")
    (request,) = [m for to, m in bench.add(submit(REQUIRED), derived) if isinstance(m, NewRequest)]
    assert request.sampling.structured == derived and request.sampling.max_tokens == 100
    bench.core.attach("h", Attach(RID, 2, {}))
    sent = bench.core.take()
    (attached,) = [m for _, m in sent if isinstance(m, Attached)]
    assert attached.submit.sampling.structured is None and attached.submit.tools == REQUIRED
    (request,) = [m for _, m in sent if isinstance(m, NewRequest)]
    assert request.sampling.structured == derived


def test_an_executor_that_cannot_is_not_asked(bench: Bench) -> None:
    answer = StructuredOutput(REGEX, "a+")
    ((_, failed),) = bench.add(submit(structured=answer), answer)
    assert isinstance(failed, Failed) and failed.field == "structured"
    assert bench.start == []


def test_the_use_of_the_prefix_cache_and_its_reset_go_right(bench: Bench) -> None:
    asked = submit()
    asked.read_prefix_cache = asked.write_prefix_cache = False
    (request,) = [m for _, m in bench.add(asked) if isinstance(m, NewRequest)]
    assert not request.read_prefix_cache and not request.write_prefix_cache
    bench.core.call_scheduler("g", ResetPrefixCache(9))
    (call,) = bench.take(None)
    bench.core.call_answered(PrefixCacheReset(call.call_id, 3))
    assert bench.take("g") == [PrefixCacheReset(9, 3)]


def test_parts_of_calls_have_no_texts_of_their_own(bench: Bench) -> None:
    bench.add(submit(AUTO))
    (delta,) = bench.output(0, '<tool_call>{"name": "now"}</tool_call>')
    assert delta.tool_calls == [ToolCallDelta(0, delta.tool_calls[0].id, "now", "{}")]
    assert delta.tool_calls[0].id.startswith("call_") and delta.num_call_bytes == 3
