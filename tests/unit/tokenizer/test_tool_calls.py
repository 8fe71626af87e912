"""Tool calls found in text: the formats, however the text is cut, and all that is no call (case D9)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.services.tokenizer.tool_calls import ToolCallParser, call_ids
from quartet.services.tokenizer.tool_formats import FORMATS, HERMES, LLAMA3_JSON, MISTRAL, SMOLLM2, ToolFormat
from quartet.shared.messages import ToolCallDelta
from quartet.shared.sampling_params import Tool, ToolParams
from quartet.shared.tool_calls import joined

TOOLS = [Tool("f"), Tool("get_weather"), Tool("a.b-c")]


def parse(form: ToolFormat, pieces: list[str], *, parallel: bool = True) -> tuple[str, list[ToolCallDelta]]:
    parser = ToolCallParser(form, ToolParams(TOOLS, parallel=parallel), str)
    text, parts = "", list[ToolCallDelta]()
    for piece in pieces:
        parsed = parser.feed(piece)
        text += parsed.text
        parts += parsed.tool_calls
    parsed = parser.finish()
    return text + parsed.text, joined([*parts, *parsed.tool_calls])


def calls(*named: tuple[str, str]) -> list[ToolCallDelta]:
    return [ToolCallDelta(i, str(i), name, arguments) for i, (name, arguments) in enumerate(named)]


WEATHER = '{"city": "Zürich \\"]}</tool_call>\\"", "days": [1, {"a": {}}], "x": null}'
CASES: list[tuple[ToolFormat, str, str, list[ToolCallDelta]]] = [
    (HERMES, "no call at all <tool", "no call at all <tool", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", calls(("f", '{"x": 1}'))),
    (HERMES, f'<tool_call>{{"name":"get_weather","arguments":{WEATHER}}}', "", calls(("get_weather", WEATHER))),
    (
        HERMES,
        'I see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"q": "}"}, "name": "a.b-c"}\n</tool_call>\n',
        "I see.\n",
        calls(("f", "{}"), ("a.b-c", '{"q": "}"}')),
    ),
    # A call without arguments is a call.
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", calls(("f", "{}"))),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", calls(("f", "{}"))),
    (HERMES, '<tool_call>{"id": [1, "x"], "name": "f", "arguments": {}}', "", calls(("f", "{}"))),
    # What is no call is text, all of it.
    (HERMES, '<tool_call>{"name": "g", "arguments": {}}', '<tool_call>{"name": "g", "arguments": {}}', []),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}', []),
    (HERMES, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    (HERMES, "<tool_call> what?", "<tool_call> what?", []),
    (HERMES, "<<tool_call>{]<tool_call>", "<<tool_call>{]<tool_call>", []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call> and now', " and now", calls(("f", "{}"))),
    # Cut in the middle: of what has been told, what there is; of what has not, the text.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1', "", calls(("f", '{"x": 1'))),
    (HERMES, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool', "", calls(("f", "{}"))),
    (SMOLLM2, '<tool_call>[{"name": "f", "arguments": {"x": 1}}]</tool_call>', "", calls(("f", '{"x": 1}'))),
    (
        SMOLLM2,
        '<tool_call>[\n{"name": "f", "arguments": {}},\n{"name": "f", "arguments": {"x": []}}\n]</tool_call>',
        "",
        calls(("f", "{}"), ("f", '{"x": []}')),
    ),
    (SMOLLM2, "<tool_call>[]</tool_call>", "", []),
    (SMOLLM2, "The answer is 5 < 6.", "The answer is 5 < 6.", []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {}}]',
        "",
        calls(("f", '{"x": 1}'), ("f", "{}")),
    ),
    (MISTRAL, '[TOOL_CALLS]get_weather[ARGS]{"city": {"a": "}"}}', "", calls(("get_weather", '{"city": {"a": "}"}}'))),
    (
        MISTRAL,
        '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]f[ARGS]{"x":2}',
        "",
        calls(("f", "{}"), ("f", '{"x":2}')),
    ),
    (MISTRAL, "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", []),
    (MISTRAL, "[TOOL", "[TOOL", []),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"x": 1}}', "", calls(("f", '{"x": 1}'))),
    (
        LLAMA3_JSON,
        ' {"name": "f", "parameters": {}}; {"name": "f", "parameters": {"y": 2}}',
        "",
        calls(("f", "{}"), ("f", '{"y": 2}')),
    ),
    (LLAMA3_JSON, '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    (LLAMA3_JSON, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    (LLAMA3_JSON, "Say {x}", "Say {x}", []),
    (LLAMA3_JSON, 'x {"name": "f", "parameters": {}}', 'x {"name": "f", "parameters": {}}', []),
]


@pytest.mark.parametrize(("form", "output", "text", "found"), CASES)
def test_what_is_found_in_an_output_does_not_depend_on_its_pieces(
    form: ToolFormat, output: str, text: str, found: list[ToolCallDelta]
) -> None:
    assert parse(form, [output]) == (text, found)
    assert parse(form, list(output)) == (text, found)
    for size in (2, 3, 7):
        assert parse(form, [output[i : i + size] for i in range(0, len(output), size)]) == (text, found)


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from([HERMES, SMOLLM2, MISTRAL]),
    st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=3),
    st.data(),
)
def test_any_arguments_come_through(form: ToolFormat, arguments: list[dict[str, Any]], data: st.DataObject) -> None:
    told = [json.dumps(a, ensure_ascii=False) for a in arguments]
    objects = [f'{{"name": "f", "arguments": {a}}}' for a in told]
    output = (
        f"{form.start}[{', '.join(objects)}]{form.end}"
        if form.listed
        else "\n".join(f"{form.start}\n{o}\n{form.end}" for o in objects)
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=6)))
    pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    assert parse(form, pieces) == ("", calls(*(("f", a) for a in told)))


@given(st.sampled_from(list(FORMATS.values())), st.text(alphabet='<tool_call>/[]{}":,; \nfTOLCAS', max_size=60))
def test_nothing_is_lost_of_what_is_no_call(form: ToolFormat, output: str) -> None:
    text, found = parse(form, [output])
    assert (text, found) == parse(form, list(output))
    if not found and "[]" not in output.replace(" ", "").replace("\n", ""):
        assert text.split() == output.split() or form.end in output


def test_without_parallel_calls_there_is_one() -> None:
    output = '<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]</tool_call>'
    assert parse(SMOLLM2, [output], parallel=False) == ("", calls(("f", '{"x": 1}')))


def test_arguments_are_let_out_while_they_are_written() -> None:
    parser = ToolCallParser(HERMES, ToolParams(TOOLS), call_ids(HERMES, 7, 0))
    assert parser.feed('Hm. <tool_call>{"name": "f", ') == ("Hm. ", [])
    (head,) = parser.feed('"arguments": {"x').tool_calls
    assert head == ToolCallDelta(0, call_ids(HERMES, 7, 0)(0), "f", '{"x')
    assert parser.feed('": 1').tool_calls == [ToolCallDelta(0, arguments='": 1')]


def test_ids_are_the_same_whenever_a_choice_is_read_and_differ_otherwise() -> None:
    ids = [call_ids(HERMES, request, choice)(n) for request in (1, 2) for choice in (0, 1) for n in (0, 1)]
    assert len(set(ids)) == 8 and ids[0] == call_ids(HERMES, 1, 0)(0)
    short = call_ids(MISTRAL, 1, 0)(0)
    assert len(short) == 9 and short.isalnum()
