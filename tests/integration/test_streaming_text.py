"""Text as a client sees it: whole characters, stop strings across and inside tokens."""

import time

import pytest

from quartet.shared.pb import inference_pb2 as pb

REPEAT = [
    {"role": "user", "content": "Repeat exactly: 😀 龜 가 🇫🇷 👨‍👩‍👧"},
]
EMOJI = 10813  # the first piece of an emoji, not a character of its own
DEF = 33203


def force(*token_ids):
    return dict.fromkeys(token_ids, 100.0)


def test_a1_no_piece_holds_half_a_character(client):
    result = client.generate(REPEAT, temperature=0.0, max_tokens=60)
    whole = client.stub.Detokenize(pb.DetokenizeRequest(token_ids=result.token_ids, skip_special_tokens=True)).text
    assert result.text == whole and any(ord(character) > 0xFFFF for character in whole)
    # The length limit may cut the last character, nothing else may.
    assert "\ufffd" not in result.text[:-1]


def test_a1_the_pieces_of_an_emoji_are_told_but_held(client):
    """The past ends inside U+1F600; its last byte is forced, and the character comes out whole."""
    past = pb.ChoicePast(index=0, past_token_ids=[10813, 242], past_text_bytes=0)
    result = [
        r.chunk
        for r in client.stream([9690], past=[past], logit_bias=force(218), temperature=0.0, max_tokens=3)
        if r.WhichOneof("event") == "chunk"
    ]
    assert [t for chunk in result for t in chunk.token_ids] == [218]
    assert "".join(chunk.text for chunk in result) == "\U0001f600"


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a2_a_cut_character_is_flushed_as_one_replacement(client, max_tokens):
    result = client.generate("Smile:", logit_bias=force(EMOJI), max_tokens=max_tokens, temperature=0.0)
    assert result.finish_reason == "LENGTH"
    assert len(result.token_ids) == result.usage.completion_tokens == max_tokens
    assert result.token_ids == [EMOJI] * max_tokens
    whole = client.stub.Detokenize(pb.DetokenizeRequest(token_ids=result.token_ids)).text
    assert result.text == whole and whole.endswith("\ufffd") and len(whole) <= max_tokens


def test_a4_a_stop_string_across_tokens_never_shows(client):
    prompt = "The quick brown fox The quick brown fox The quick brown fox The quick"
    free = client.generate(prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
    assert " brown fox" in free.text
    result = client.generate(prompt, temperature=0.0, max_tokens=12, ignore_eos=True, stop=["wn fo"])
    assert result.text == free.text[: free.text.index("wn fo")]
    assert result.finish_reason == "STOP" and result.choices[0].stop_reason == "wn fo"
    assert client.at_rest()


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [(["DE"], "", "DE"), (["EF"], "D", "EF"), (["F", "E"], "D", "E"), (["DEF"], "", "DEF"), (["EFD"], "D", "EFD")],
)
def test_a5_a_stop_string_inside_a_token(client, stop, text, reason):
    result = client.generate("abc", logit_bias=force(DEF), max_tokens=2, temperature=0.0, stop=stop)
    assert (result.text, result.finish_reason, result.choices[0].stop_reason) == (text, "STOP", reason)


def test_a5_the_stop_string_may_be_included(client):
    result = client.generate(
        "abc", logit_bias=force(DEF), max_tokens=2, temperature=0.0, stop=["DE"], include_stop_str_in_output=True
    )
    assert result.text == "DE"


def test_a7_a_stop_that_never_comes_holds_nothing_back(client):
    options = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    free = client.generate("The weather today is", **options)
    held = client.generate("The weather today is", stop=["~" * 40], **options)
    assert held.text == free.text
    first_text = [next(i for i, piece in enumerate(r.choices[0].pieces) if piece) for r in (free, held)]
    assert first_text[0] == first_text[1]


def test_a7_a_partial_match_is_held_and_released(client):
    options = {"temperature": 0.0, "max_tokens": 3, "logit_bias": force(DEF)}
    result = client.generate("abc", stop=["FX"], **options)
    assert result.text == "DEFDEFDEF" and result.finish_reason == "LENGTH"


def test_stop_token_ids_end_a_choice_and_are_told(client):
    result = client.generate("abc", logit_bias=force(DEF), max_tokens=5, temperature=0.0, stop_token_ids=[DEF])
    assert (result.token_ids, result.text, result.finish_reason) == ([DEF], "", "STOP")
    assert result.choices[0].stop_reason == DEF


def test_special_tokens_are_skipped_or_kept(client):
    options = {"logit_bias": force(2), "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    assert client.generate("abc", **options).text == ""
    assert client.generate("abc", skip_special_tokens=False, **options).text == "<|im_end|><|im_end|>"


def test_a_long_prompt_does_not_stall_a_stream(client):
    """A 5 MB text is refused fast, and meanwhile a stream's gaps stay small."""
    stream = client.stream("Once upon a time", max_tokens=60, ignore_eos=True, temperature=0.0)
    arrivals = []
    refused_in = None
    for _ in stream:
        arrivals.append(time.monotonic())
        if len(arrivals) == 20:
            begin = time.monotonic()
            message = client.refused("word " * 1_000_000)
            refused_in = time.monotonic() - begin
            assert "2048" in message
    assert refused_in is not None and refused_in < 5.0


def test_a11_log_probabilities_are_finite(client):
    result = client.generate("The sky is", max_tokens=3, temperature=1.0, top_k=1, logprobs=5, prompt_logprobs=1)
    assert len(result.choices[0].logprobs) == 3
    for entry in result.choices[0].logprobs:
        assert len(entry.top) == 5 and -9999.0 <= entry.token.logprob <= 0.0 and entry.rank == 1
        assert [t.logprob for t in entry.top] == sorted((t.logprob for t in entry.top), reverse=True)
    assert sorted(result.prompt_logprobs) == list(range(result.usage.prompt_tokens))
    assert not result.prompt_logprobs[0].HasField("logprobs")
    assert all(
        -9999.0 <= result.prompt_logprobs[i].logprobs.token.logprob <= 0 for i in range(1, result.usage.prompt_tokens)
    )
