"""Cases of sampling, scheduling and memory at every door: gRPC, the Python client, HTTP and its streams.

One line of four processes with a tiny model, whose pool holds about two long requests and whose steps compute few
tokens. transformers judges the texts, on the same weights.
"""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.doors import CHAT, COMPLETIONS, Refused
from support.http import connect, post, request_bytes
from support.lines import line_of
from support.oracle import assert_greedy
from support.stack import eventually
from support.tiny_model import make_tiny_llama

CONTEXT, BLOCK, BUDGET, NUM_BLOCKS = 640, 16, 64, 40
DOORS = ("grpc", "client", "http", "http-stream")
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# For costly tests: at streams over HTTP always, at the other doors in the long run.
QUICK_AT_STREAMS = pytest.mark.parametrize(
    "door",
    ["http-stream", *(pytest.param(name, marks=pytest.mark.slow) for name in DOORS if name != "http-stream")],
    indirect=True,
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_llama(folder, CONTEXT)
    model.folder = folder
    return model


@pytest.fixture(scope="module")
def line(tmp_path_factory, reference):
    settings = {
        "tokenizer_tokenizer": "byte",
        "executor_num_blocks": NUM_BLOCKS,
        "executor_block_size": BLOCK,
        "executor_max_num_batched_tokens": BUDGET,
    }
    with line_of(tmp_path_factory.mktemp("stack"), reference.folder, **settings) as running:
        yield running


@pytest.fixture(params=DOORS)
def door(request, line):
    """Asks, and fails where it is refused. What it begins is gone afterwards."""
    ask = line.doors[request.param]

    def answered(**fields):
        answer = ask(fields)
        assert not isinstance(answer, Refused), (fields, answer)
        return answer

    yield answered
    eventually(line.client.at_rest, 10.0, "blocks or rows were not given back")


@pytest.fixture
def salt(request):
    """Whatever other tests have left in the prefix cache, nothing of it is hit."""
    return request.node.name


def together(door, *requests):
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda fields: door(**fields), requests))


def ids(length, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(97, 123) for _ in range(length)]


def words(count):
    """A chat's text that is as long as one wants, in bytes."""
    return bytes(ids(count)).decode()


# --- sampling -------------------------------------------------------------------------------------


def test_b1_a_seed_does_not_depend_on_neighbours(door):
    seeded = {"prompt": "Once", "seed": 11, "temperature": 0.9, "max_tokens": 20, "ignore_eos": True}
    alone = door(**seeded).token_ids
    for neighbour in ({}, {"seed": 12}, {}, {"seed": 11}):
        other = {name: value for name, value in seeded.items() if name != "seed"} | neighbour
        first, second = together(door, seeded, other)
        assert first.token_ids == alone
        assert (second.token_ids == alone) == (neighbour == {"seed": 11})


def test_b2_b4_choices_differ_and_only_a_seed_brings_them_again(door):
    options = {"prompt": "Once", "n": 4, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    sets = [[said.token_ids for said in door(seed=7, **options).choices.values()] for _ in range(2)]
    assert sets[0] == sets[1] and len({tuple(said) for said in sets[0]}) == 4
    free = [tuple(door(**options | {"n": 1}).token_ids) for _ in range(4)]
    assert len(set(free)) == 4


def test_b5_tiny_temperatures_are_greedy(door):
    options = {"prompt": "Once", "max_tokens": 12, "ignore_eos": True, "seed": 1}
    texts = {door(temperature=temperature, **options).text for temperature in (0, 1e-6, 1e-4)}
    assert len(texts) == 1 and texts != {""}
    assert door(temperature=0.01, **options).text


def test_b7_kinds_of_sampling_mix_in_one_batch(door):
    base = {"prompt": "Once", "max_tokens": 16, "ignore_eos": True, "seed": 3}
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "presence_penalty": 1.0, "logprobs": 3},
        {"temperature": 1.0, "repetition_penalty": 1.3, "top_p": 0.2},
    ]
    requests = [base | kind for kind in kinds]
    solo = [door(**fields).token_ids for fields in requests]
    assert [answer.token_ids for answer in together(door, *requests)] == solo


def test_b9_b10_penalties_reach_the_sampler_and_charge_what_they_should(door):
    """presence and frequency leave the first step alone, repetition knows the prompt already; all do something."""
    first = {"prompt": "aaaaaaaa", "max_tokens": 1, "logprobs": 5, **GREEDY}
    plain = door(**first).said.top
    assert door(presence_penalty=2.0, **first).said.top == plain
    assert door(frequency_penalty=2.0, **first).said.top == plain
    assert door(repetition_penalty=2.0, **first).said.top != plain
    long = {"prompt": "Once", "max_tokens": 60, "logit_bias": {"97": 5}, **GREEDY}
    text = door(**long).token_ids
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert door(**long, **{penalty: 2.0}).token_ids != text


def test_a7_a_stop_that_never_comes_holds_nothing_back(line):
    """The first text is in the first chunk, with a long stop string as without."""
    body = {"prompt": "Once", "max_tokens": 10, "stream": True, "logit_bias": {"97": 100}, **GREEDY}
    chunks = {}
    for stop in (None, ["~" * 40]):
        events = post(line.http_address, COMPLETIONS, body | {"stop": stop}).events()
        chunks[str(stop)] = [event["choices"][0]["text"] for event in events]
        assert "".join(chunks[str(stop)]) == "a" * 10
    assert all(text[0] for text in chunks.values())


# --- scheduling and memory ------------------------------------------------------------------------


def test_c1_prompts_around_the_budget_are_cut_into_chunks(door, reference, salt):
    prompts = [ids(length, length) for length in (BUDGET - 1, BUDGET, BUDGET + 1, 200)]
    requests = [{"prompt": prompt, "max_tokens": 8, "cache_salt": salt, **GREEDY} for prompt in prompts]
    alone = [door(**fields) for fields in requests]
    for prompt, answer in zip(prompts, alone, strict=True):
        assert answer.prompt_tokens == len(prompt) and len(answer.token_ids) == 8
        assert_greedy(reference, prompt, answer.token_ids)
    behind = together(door, *(fields | {"cache_salt": f"{salt} again"} for fields in requests))
    assert [answer.token_ids for answer in behind] == [answer.token_ids for answer in alone]


def test_c3_whole_blocks_that_are_cached_leave_a_token_to_compute(door, salt):
    for length, cached in ((15, 0), (16, 0), (17, 16), (32, 16), (33, 32)):
        fields = {"prompt": ids(length), "max_tokens": 4, "cache_salt": f"{salt} {length}", **GREEDY}
        first, second = door(**fields), door(**fields)
        assert first.cached_tokens == 0 and second.cached_tokens == cached
        assert first.token_ids == second.token_ids


def test_c5_salts_share_nothing_and_a_name_is_no_salt(door, salt):
    fields = {"prompt": ids(40), "max_tokens": 1, "logprobs": 2, **GREEDY}
    answers = [door(**fields, cache_salt=f"{salt} {s}") for s in "XYX"]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 32]
    assert len({str(answer.said.top) for answer in answers}) == 1
    # Without a salt a tenant of that name finds nothing of it, nor does one find his with the name as salt.
    unsalted = fields | {"prompt": ids(40, salt)}
    assert door(**unsalted, cache_salt=f"{salt} A").cached_tokens == 0
    assert door(**unsalted, user=f"{salt} A").cached_tokens == 0
    assert door(**unsalted, user=f"{salt} B").cached_tokens == 32
    assert door(**unsalted, cache_salt=f"{salt} B").cached_tokens == 0


def test_c6_after_a_block_that_is_gone_nothing_is_hit(door, line, salt):
    """A chain loses its end first, and is hit up to there; the same tokens at another place are another block."""
    prompt = ids(6 * BLOCK + 1)
    fields = {"max_tokens": 2, "cache_salt": f"{salt} moved", **GREEDY}
    door(prompt=prompt, **fields)
    moved = [*ids(BLOCK, 77), *prompt[BLOCK : 3 * BLOCK], 1]
    assert door(prompt=moved, **fields).cached_tokens == 0
    hits = set()
    for num_others in range(4, 14):
        fields["cache_salt"] = f"{salt} {num_others}"
        whole = door(prompt=prompt, **fields)
        for i in range(num_others):
            door(prompt=ids(3 * BLOCK, i), max_tokens=1, cache_salt=f"{salt} {num_others} {i}", ignore_eos=True)
        again = door(prompt=prompt, **fields)
        assert again.token_ids == whole.token_ids
        hits.add(again.cached_tokens)
    assert hits <= {i * BLOCK for i in range(7)} and len(hits) > 2, hits
    assert post(line.http_address, "/reset_prefix_cache", None).status == 200
    assert door(prompt=prompt, **fields).cached_tokens == 0


def test_c7_a_shared_system_prompt_contaminates_nobody(door, salt):
    system = {"role": "system", "content": words(48)}
    chats = [{"messages": [system, {"role": "user", "content": f"Number {i}?"}]} for i in range(12)]
    options = {"max_tokens": 8, **GREEDY}
    solo = [door(**chat, **options, read_prefix_cache=False, write_prefix_cache=False).token_ids for chat in chats]
    for _ in range(3):
        answers = together(door, *(chat | options | {"cache_salt": salt} for chat in chats))
        assert [answer.token_ids for answer in answers] == solo
    assert all(answer.cached_tokens >= 48 for answer in answers)


@QUICK_AT_STREAMS
def test_c8_a_pool_for_two_changes_no_text_of_six_though_two_leave(door, line, reference):
    """Six of up to 300 tokens in a pool of 640: preempted again and again, and two clients leave at any time."""
    prompts = [ids(length, length) for length in (63, 64, 65, 200, 30, 90)]
    before = line.client.loads().num_preemptions_total
    draw = random.Random(4)
    leavers = [_leaving(line, prompt, draw.random() / 2) for prompt in prompts[4:]]
    requests = [{"prompt": prompt, "max_tokens": 100, **GREEDY} for prompt in prompts[:4]]
    for prompt, answer in zip(prompts, together(door, *requests), strict=False):
        assert len(answer.token_ids) == 100
        assert_greedy(reference, prompt, answer.token_ids)
    for leaver in leavers:
        leaver.join()
    eventually(line.client.at_rest, 10.0, "blocks or rows were not given back")
    assert line.client.loads().num_preemptions_total > before


def _leaving(line, prompt, seconds):
    """A client over HTTP that closes its connection after a while."""

    def run():
        with connect(line.http_address) as connection:
            connection.sendall(
                request_bytes("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 100, "stream": True, **GREEDY})
            )
            connection.settimeout(seconds)
            try:
                while connection.recv(4096):
                    pass
            except TimeoutError:
                pass

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_c10_c13_streams_that_are_left_at_once_leave_nothing_and_hurt_nobody(line, reference):
    """Over HTTP: 200 that close when they have their first bytes or have just asked, beside normal requests."""
    http = line.http_address
    prompts = [ids(20, i) for i in range(4)]
    body = request_bytes(
        "POST", CHAT, {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 400, **GREEDY}
    )

    def normal(i):
        answer = line.doors["http"]({"prompt": prompts[i], "max_tokens": 30, **GREEDY})
        assert_greedy(reference, prompts[i], answer.token_ids)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(normal, i) for i in range(4)]
        for i in range(200):
            with connect(http) as connection:
                connection.sendall(body)
                if i % 2:
                    connection.recv(64)
                if i % 3 == 0:  # without a farewell
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        for future in running:
            future.result()
    eventually(line.client.at_rest, 10.0, "blocks or rows were not given back")
    normal(0)


def test_c15_a_long_prompt_lets_a_short_one_and_a_stream_pass(line, door, salt):
    """A decodes; B brings ten chunks; C comes after B and has its answer before, while A goes on. C may come too late
    once, where the machine is busy with something else, but not again and again."""
    num_a = [0]
    ended = threading.Event()

    def follow():
        for response in line.client.stream(ids(5), max_tokens=400, **GREEDY):
            num_a[0] += response.WhichOneof("event") == "chunk"
            if ended.is_set():
                return

    def ask(prompt, name):
        door(prompt=prompt, max_tokens=1, cache_salt=f"{salt} {name}", **GREEDY)
        return time.monotonic(), num_a[0]

    a = threading.Thread(target=follow)
    a.start()
    eventually(lambda: num_a[0], 10.0)
    passed = []
    with ThreadPoolExecutor(2) as pool:
        for i in range(5):
            before = num_a[0]
            b = pool.submit(ask, ids(8 * BUDGET, 1), f"b{i}")
            c = pool.submit(ask, ids(10, 2), f"c{i}")
            (b_at, b_count), (c_at, _) = b.result(), c.result()
            passed.append(c_at < b_at and b_count - before > 1)
    ended.set()
    a.join(60)
    assert any(passed)


@QUICK_AT_STREAMS
def test_c16_who_was_preempted_is_not_preempted_for_ever(door, line, reference):
    """Arrivals that go on over a pool for about two: everybody ends, with the right text."""
    before = line.client.loads().num_preemptions_total
    prompts = [ids(60 + i, i) for i in range(10)]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda prompt: door(prompt=prompt, max_tokens=100, **GREEDY), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 100
        assert_greedy(reference, prompt, answer.token_ids)
    assert 0 < line.client.loads().num_preemptions_total - before <= 3 * len(prompts)
