"""A choice's text: ends, stops, special tokens, and going on from any point of the past."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.stream import OutputStream
from quartet.shared.sampling_params import SamplingParams, TextParams

EMOJI_START = "\N{GRINNING FACE}".encode()[:2]


def new(loaded: LoadedTokenizer, sampling: SamplingParams | None = None, **text: object) -> OutputStream:
    return OutputStream(loaded, sampling or SamplingParams(), TextParams(**text))  # type: ignore[arg-type]


def run(stream: OutputStream, ids: list[int]) -> tuple[str, int]:
    """All text of `ids` given one by one, and how many were used."""
    text, used = "", 0
    for token_id in ids:
        piece = stream.feed([token_id])
        text += piece.text
        used += piece.num_tokens
        if stream.stop is not None:
            break
    return text + stream.finish().text, used


def test_forced_def_stops_before_de(smollm: LoadedTokenizer) -> None:
    stream = new(smollm, stop=["DE"])
    assert stream.feed([33203, 33203]) == ("", 1, [])
    assert stream.stop == "DE" and stream.finish().text == ""
    stream = new(smollm, stop=["EF", "DE"])
    stream.feed([33203])
    assert stream.stop == "DE"


def test_stop_across_tokens_names_the_token_that_completed_it(smollm: LoadedTokenizer) -> None:
    ids = smollm.encode("The quick brown fox jumps", False)
    stream = new(smollm, stop=["wn fo"])
    text, used = run(stream, ids)
    assert (text, used) == ("The quick bro", len(smollm.encode("The quick brown fox", False)))
    assert stream.num_text_bytes == len("The quick bro")
    bulk = new(smollm, stop=["wn fo"])
    assert bulk.feed(ids) == (text, used, [])


def test_eos_and_stop_tokens_have_no_text(tiny: LoadedTokenizer) -> None:
    a = tiny.encode("a", False)
    tool = [2]
    assert run(new(tiny), [*a, 1])[0] == "a"
    assert run(new(tiny, skip_special_tokens=False), [*a, 1])[0] == "a"
    assert run(new(tiny, SamplingParams(stop_token_ids=tool)), a + tool)[0] == "a"
    assert (
        run(new(tiny, SamplingParams(stop_token_ids=tool), include_stop_str_in_output=True), a + tool)[0] == "a<tool>"
    )
    assert run(new(tiny, SamplingParams(ignore_eos=True), skip_special_tokens=False), [*a, 1, *a])[0] == "a</s>a"
    assert run(new(tiny), a + tool)[0] == "a<tool>"


def test_stop_strings_wait_for_min_tokens(tiny: LoadedTokenizer) -> None:
    x, y = tiny.encode("x", False)[0], tiny.encode("y", False)[0]
    sampling = SamplingParams(min_tokens=2)
    assert run(new(tiny, sampling, stop=["x"]), [x, x, x, x]) == ("xx", 3)
    # A match that only began before counts, one that ended before does not.
    assert run(new(tiny, sampling, stop=["xy"]), [y, x, y, y]) == ("y", 3)
    assert run(new(tiny, sampling, stop=["xy"]), [x, y, y, y]) == ("xyyy", 4)


def test_the_final_flush_goes_through_the_stops(tiny: LoadedTokenizer) -> None:
    first = tiny.encode("\N{GRINNING FACE}", False)
    dangling = [3 + EMOJI_START[0]]
    assert len(first) == 1
    assert run(new(tiny), dangling) == ("\ufffd", 1)
    assert run(new(tiny, stop=["zz"]), [*tiny.encode("z", False), *dangling]) == ("z\ufffd", 2)
    stream = new(tiny, stop=["\ufffd"])
    assert run(stream, [*tiny.encode("z", False), *dangling]) == ("z", 2)
    assert stream.stop == "\ufffd"


def test_missing_text_comes_with_the_first_piece(tiny: LoadedTokenizer) -> None:
    past = tiny.encode("h\u00e9llo", False)
    stream = new(tiny)
    stream.resume(past, 3)
    assert stream.feed(tiny.encode("!", False)).text == "llo!"
    assert stream.num_text_bytes == len("h\u00e9llo!".encode())
    assert stream.feed(tiny.encode("?", False)).text == "?"


def test_text_the_client_has_already_is_not_sent_again(tiny: LoadedTokenizer) -> None:
    stream = new(tiny)
    stream.resume(tiny.encode("ab", False), 4)
    assert stream.num_text_bytes == 4
    assert stream.feed(tiny.encode("cd", False)).text == ""
    assert stream.feed(tiny.encode("ef", False)).text == "ef"
    assert stream.num_text_bytes == 6


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_going_on_from_any_point_gives_the_same_text(tiny: LoadedTokenizer, data: st.DataObject) -> None:
    token = st.one_of(st.sampled_from([100, 101, 3 + 0xF0, 3 + 0x9F, 3 + 0x98, 3 + 0x80]), st.integers(0, 275))
    ids = data.draw(st.lists(token, max_size=25))
    stop = data.draw(st.lists(st.text("abDE\ufffd", min_size=1, max_size=3), max_size=2))
    include = data.draw(st.booleans())
    sampling = SamplingParams(min_tokens=data.draw(st.integers(0, 6)), stop_token_ids=[2])

    def fresh() -> OutputStream:
        return new(tiny, sampling, stop=stop, include_stop_str_in_output=include)

    whole = fresh()
    text, used = run(whole, ids)
    assert whole.num_text_bytes == len(text.encode())

    # The first server gives out some tokens, its client gets only part of their text, another goes on.
    at = data.draw(st.integers(0, used))
    first = fresh()
    had = first.feed(ids[:at]).text
    kept = had[: data.draw(st.integers(0, len(had)))]
    second = fresh()
    second.resume(ids[:at], len(kept.encode()))
    rest, more = run(second, ids[at:used])
    assert kept + rest == text
    assert second.stop == whole.stop
    assert second.num_text_bytes == whole.num_text_bytes
    assert at + more == used or first.stop is not None
