"""Structured output by llguidance: the same grammar of the same text in tokenizer and executor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from quartet.shared.sampling_params import StructuredKind, StructuredOutput

# Between two tokens of JSON: one blank, or a new line and its indentation. A model that may write any number of
# blanks can go on writing them.
WHITESPACE = r" |\n[ \t]{0,16}"
# The library's own notation of Lark's is parsed by it; GBNF is translated in Python first.
MAX_GBNF_BYTES = 16 << 10
# Of text that must come, so much is encoded at a time: the next token is what counts.
MAX_FORCED = 256
NO_TOKEN = "no token can go on from here"
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "coerce_one_of": True}
_GBNF_RULE = re.compile(r"^\s*([A-Za-z][\w-]*)\s*::=", re.M)


class GrammarError(ValueError):
    """The text does not compile, or allows nothing; the message is for whoever wrote it."""


def in_lark(structured: StructuredOutput) -> StructuredOutput:
    """The same with a grammar in GBNF turned into Lark. Raises GrammarError."""
    if structured.kind is not StructuredKind.GRAMMAR or is_lark_syntax(structured.text):
        return structured
    if len(structured.text) > MAX_GBNF_BYTES:
        raise GrammarError(f"a grammar in GBNF has at most {MAX_GBNF_BYTES} characters, got {len(structured.text)}")
    rules = _GBNF_RULE.findall(structured.text)
    twice = next((name for i, name in enumerate(rules) if name in rules[:i]), None)
    if twice is not None:
        raise GrammarError(f"the rule {twice} is defined twice")
    try:
        return StructuredOutput(structured.kind, any_to_lark(structured.text))
    except Exception as error:  # the translation raises whatever it stumbles on
        raise GrammarError(f"it is no grammar in Lark's or GBNF's notation: {error}") from error


def build_vocabulary(tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> LLTokenizer:
    """For compiling against, with one token more than `tokens`: it stands for the end of a complete output. Takes
    most of a second, and holds the GIL."""
    wrapped = _Wrapped(tokens, special_token_ids)
    vocabulary = LLTokenizer(wrapped)  # type: ignore[arg-type]
    wrapped.encode = lambda text: vocabulary.greedy_tokenize(text[:MAX_FORCED])
    return vocabulary


def compile_grammar(structured: StructuredOutput, vocabulary: LLTokenizer) -> LLMatcher:
    """At the beginning of an output. A grammar must be Lark's. Raises GrammarError. Releases the GIL."""
    try:
        grammar = _grammar(structured)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from error
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(why(matcher))
    return matcher


def why(matcher: LLMatcher) -> str:
    """What is wrong with it, in a few lines at most."""
    text = matcher.get_error().partition("<non-verbose/>")[0].strip()
    if text.startswith("NoExtension"):
        return NO_TOKEN
    return text[:500] or "it is too complex"


def _grammar(structured: StructuredOutput) -> str:
    text = structured.text
    match structured.kind:
        case StructuredKind.JSON_SCHEMA:
            schema = msgspec.json.decode(text)
            if schema is False:
                raise GrammarError("no value is valid by the schema false")
            return LLMatcher.grammar_from_json_schema("{}" if schema is True else text, overrides=JSON_OPTIONS)
        case StructuredKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
        case StructuredKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case StructuredKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(text)
        case StructuredKind.CHOICE:
            return grammar_from("choice", text)


class _Wrapped:
    """What LLTokenizer wants of a tokenizer. It asks how text that must come would be encoded, and goes wrong where
    the answer is nothing; any tokens that spell the text will do."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<end>"]
        self.special_token_ids = [*special_token_ids, len(tokens)]
        self.encode: Callable[[str], list[int]] = lambda text: []

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)
