import itertools
import json
import statistics

import pytest

from quartet.services.cli.bench.mixes import MIXES, DatasetError, Mix, Source, cycle, read_dataset
from quartet.services.cli.bench.record import Record


def take(mix, number, **options):
    return list(itertools.islice(Source(mix, **options).conversations(), number))


def test_a_seed_says_everything_and_another_one_nothing_of_it():
    for mix in MIXES.values():
        assert take(mix, 5, seed="a") == take(mix, 5, seed="a")
        assert take(mix, 5, seed="a") != take(mix, 5, seed="b")
    # Whatever was asked before: requests are numbered.
    assert Source(MIXES["chat"]).conversation(7) == take(MIXES["chat"], 8)[7]


def test_the_chat_mix_has_the_means_of_the_paper():
    turns = [conversation.turns[0] for conversation in take(MIXES["chat"], 4000, max_model_len=8192)]
    assert statistics.fmean(len(turn.said) for turn in turns) == pytest.approx(161, rel=0.05)
    assert statistics.fmean(turn.output_tokens for turn in turns) == pytest.approx(338, rel=0.05)
    assert len({tuple(turn.said[:8]) for turn in turns if len(turn.said) >= 8}) > 3900


def test_what_is_asked_for_fits_the_context():
    for mix in (*MIXES.values(), Mix(sigma=2.5), Mix(input_len=9000)):
        for conversation in take(mix, 200, max_model_len=700):
            total = len(conversation.opening) + sum(len(t.said) + t.output_tokens for t in conversation.turns)
            assert total <= 700 and all(t.said and t.output_tokens > 0 for t in conversation.turns)


def test_prefixes_are_in_common():
    conversations = take(Mix(prefix_len=20, num_prefixes=3), 60)
    assert len({tuple(conversation.opening) for conversation in conversations}) == 3
    assert all(len(conversation.opening) == 20 for conversation in conversations)


def test_so_many_requests_whatever_the_turns():
    source = Source(Mix(num_turns=4, input_len=5, output_len=5))
    assert [len(c.turns) for c in source.conversations(10)] == [4, 4, 2]
    assert not list(source.conversations(0))


def test_a_conversation_pauses_between_its_turns_only():
    turns = take(Mix(num_turns=4, think_time=2.0, input_len=5, output_len=5), 300)
    assert all(c.turns[0].think_seconds == 0 for c in turns)
    pauses = [turn.think_seconds for c in turns for turn in c.turns[1:]]
    assert statistics.fmean(pauses) == pytest.approx(2.0, rel=0.15)


def test_ids_are_drawn_from_the_range():
    ids = [i for c in take(Mix(), 50, low=10, high=14) for i in c.turns[0].said]
    assert set(ids) == {10, 11, 12, 13}


@pytest.mark.parametrize(
    ("form", "answered"),
    [("ids", [7, 8]), ("text", " yes"), ("chat", [{"role": "assistant", "content": " yes"}])],
)
def test_every_form_of_a_prompt_is_put_together_alike(form, answered):
    conversation = take(Mix(prefix_len=5, num_turns=2, input_len=3), 1, form=form)[0]
    prompt = conversation.opening + conversation.turns[0].said
    told = conversation.answered(Record(0.0, answer_ids=[7, 8], answer_text=" yes"))
    assert told == answered
    whole = prompt + told + conversation.turns[1].said
    if form == "chat":
        assert [m["role"] for m in whole] == ["system", "user", "assistant", "user"]
        assert [len(m["content"].split()) for m in whole] == [5, 3, 1, 3]
    elif form == "text":
        assert len(whole.split()) == 5 + 3 + 1 + 3
    else:
        assert len(whole) == 5 + 3 + 2 + 3


def write(tmp_path, *entries):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def test_a_data_set(tmp_path):
    path = write(tmp_path, {"prompt": "Hello", "max_tokens": 5}, "", {"prompt": "Bye", "output_tokens": 6, "x": 1})
    texts = read_dataset(path, "text", 99)
    assert [(c.turns[0].said, c.turns[0].output_tokens) for c in texts] == [("Hello", 5), ("Bye", 6)]
    chats = read_dataset(path, "chat", 99)
    assert chats[0].opening + chats[0].turns[0].said == [{"role": "user", "content": "Hello"}]
    messages = [{"role": "user", "content": "x"}]
    path = write(tmp_path, {"messages": messages, "prompt_token_ids": [1, 2]})
    assert read_dataset(path, "chat", 99)[0].turns[0] == (messages, 99, 0.0)
    assert read_dataset(path, "ids", 99)[0].turns[0].said == [1, 2]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "has no lines"),
        ([{"prompt": "x"}, {"text": "y"}], ":2: prompt is missing"),
        (["{"], ":1: "),
        ([[1]], ":1: "),
        ([{"prompt": 5}], "prompt is missing, or not"),
        ([{"prompt": "x", "max_tokens": "many"}], ":1: "),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, entries, said):
    with pytest.raises(DatasetError, match=said):
        read_dataset(write(tmp_path, *entries), "text", 9)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DatasetError, match="cannot read"):
        read_dataset(tmp_path / "none", "text", 9)


def test_a_data_set_that_is_too_short_begins_again(tmp_path):
    found = read_dataset(write(tmp_path, *({"prompt": str(i)} for i in range(3))), "text", 9)
    said = [c.turns[0].said for c in cycle(found, 7, "s")]
    assert len(said) == 7 and sorted(said[:3]) == ["0", "1", "2"] and said[3:6] == said[:3]
    assert said == [c.turns[0].said for c in cycle(found, 7, "s")]
