"""Cancel, deadlines, fairness and a pool that is too small, on the real processes."""

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from support.client import Result
from support.oracle import assert_greedy
from support.stack import eventually

from quartet.shared.pb import inference_pb2 as pb


def words(count):
    return "one" + " one" * (count - 1)


def at_rest(client):
    eventually(client.at_rest, 30.0, "blocks or rows were not given back")


def test_c10_streams_that_are_left_leave_nothing(client):
    for _ in range(200):
        stream = client.stream("Once upon a time", max_tokens=100, ignore_eos=True)
        next(stream)
        stream.cancel()
    at_rest(client)
    assert client.generate("hello", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_c13_aborts_at_once_are_harmless(client):
    def normal(i):
        return client.generate(f"Number {i} is", temperature=0.0, max_tokens=10, ignore_eos=True).token_ids

    solo = [normal(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(normal, i) for i in range(4)]
        for _ in range(200):
            client.stream("Once upon a time", max_tokens=100, ignore_eos=True).cancel()
        assert [r.result() for r in running] == solo
    at_rest(client)
    client.stub.Abort(pb.AbortRequest(request_id="00000000deadbeef"))


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_c12_g5_a_cancel_ends_the_work_in_every_phase(client, phase):
    stream = client.stream(words(1500) if phase == "prefill" else "hello", max_tokens=500, ignore_eos=True)
    if phase == "decode":
        result = Result()
        while not result.choices:
            result.add(next(stream))
    elif phase == "prefill":
        eventually(lambda: client.loads().num_running == 1)
    stream.cancel()
    # A second is promised on a machine of its own; left alone, all of this takes many times as long.
    eventually(client.at_rest, 5.0)


def test_g5_a_deadline_ends_the_work(client):
    with pytest.raises(grpc.RpcError) as caught:
        for _ in client.stream("hello", max_tokens=2000, ignore_eos=True, timeout=0.7):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    at_rest(client)
    with pytest.raises(grpc.RpcError) as caught:
        next(client.stream("hello", max_tokens=100, timeout=-1))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_abort_ends_a_stream_with_its_reason(client):
    result = Result()
    for response in client.stream("hello", max_tokens=1000, ignore_eos=True):
        result.add(response)
        if len(result.choices.get(0, Result()).token_ids if result.choices else []) == 5:
            client.stub.Abort(pb.AbortRequest(request_id=result.started.request_id))
    assert result.finish_reason == "ABORT" and result.usage is not None
    at_rest(client)


def test_attach_takes_over_a_stream(client):
    whole = client.generate("Once upon a time", temperature=0.0, max_tokens=32, ignore_eos=True)
    first, second = Result(), Result()
    stream = client.stream("Once upon a time", temperature=0.0, max_tokens=32, ignore_eos=True)
    for response in stream:
        first.add(response)
        if first.choices and len(first.token_ids) >= 8:
            break
    position = pb.ChoicePosition(index=0, next_index=len(first.token_ids))
    second.choices, second.started = first.choices, None
    for response in client.stub.Attach(pb.AttachRequest(request_id=first.started.request_id, positions=[position])):
        second.add(response)
    assert second.text == whole.text and second.token_ids == whole.token_ids
    with pytest.raises(grpc.RpcError) as caught:
        for _ in stream:
            pass
    assert caught.value.code() == grpc.StatusCode.ABORTED
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Attach(pb.AttachRequest(request_id="00000000deadbeef")))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.fixture
def line_of(small, request):
    """`line_of("tiny" or "real", settings...)`: (a stack of the test's own, transformers' model in fp32)."""

    def start(model, **settings):
        if model == "real":
            return small(**settings), request.getfixturevalue("reference")
        folder, reference = request.getfixturevalue("tiny_model")
        return small(model=folder, tokenizer_tokenizer="byte", **settings), reference

    return start


@pytest.mark.parametrize(
    ("model", "length", "budget"), [("tiny", 3000, 8), pytest.param("real", 2000, 256, marks=pytest.mark.slow)]
)
def test_c15_a_long_prompt_starves_nobody(line_of, model, length, budget):
    """A decodes; B brings a prompt for many steps; C brings 10 tokens and has its first one before B."""
    settings = {"executor_max_model_len": 4096, "executor_num_blocks": 512, "executor_max_num_batched_tokens": budget}
    stack, _ = line_of(model, **settings)
    results = {name: Result() for name in "abc"}
    first_token = {}

    def run(name, prompt, count):
        stream = stack.client.stream(prompt, max_tokens=count, ignore_eos=True, temperature=0.0)
        for response in stream:
            results[name].add(response)
            if results[name].choices:
                first_token.setdefault(name, time.monotonic())
            if len(first_token) == 3:  # A decodes for as long as it takes.
                stream.cancel()
                return

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(run, "a", [100] * 4, 4000)]
        eventually(lambda: "a" in first_token, 20)
        b_sent = time.monotonic()
        runs.append(pool.submit(run, "b", [101] * length, 2))
        eventually(lambda: results["b"].started)
        runs.append(pool.submit(run, "c", [102] * 10, 2))
        for each in runs:
            each.result(240)
    assert first_token["c"] < first_token["b"]
    during = sum(b_sent < t < first_token["b"] for t in results["a"].choices[0].times)
    assert during >= 5, "A stood still while B's prompt was computed"


@pytest.mark.parametrize("model", ["tiny", pytest.param("real", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_c1_c8_a_small_pool_and_a_small_budget_change_no_text(line_of, model):
    """A pool for about two requests, a budget of 64 tokens, six long generations, two of them aborted."""
    stack, reference = line_of(model, executor_num_blocks=40, executor_max_num_batched_tokens=64)
    prompts = [[100] * length + [110 + i] for i, length in enumerate((63, 64, 65, 200, 30, 90))]
    rng = random.Random(4)
    for _ in range(3):
        # Some before their first event, some anywhere on the way.
        aborted = {i: rng.choice((0, rng.randrange(1, 180))) for i in rng.sample(range(6), 2)}

        def run(i, aborted=aborted):
            if i not in aborted:
                return stack.client.generate(prompts[i], temperature=0.0, max_tokens=180, ignore_eos=True)
            stream = stack.client.stream(prompts[i], temperature=0.0, max_tokens=180, ignore_eos=True)
            for _ in itertools.islice(stream, aborted[i]):
                pass
            stream.cancel()
            return None

        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(run, range(6)))
        for result in results:
            if result is not None:
                assert len(result.token_ids) == 180
                assert_greedy(reference, list(result.started.prompt_token_ids), result.token_ids)
        at_rest(stack.client)
    assert stack.client.loads().num_preemptions_total > 0


def test_c7_a_shared_system_prompt_contaminates_nobody(client):
    system = {"role": "system", "content": "You answer with one short sentence. " * 6}
    chats = [[system, {"role": "user", "content": f"Tell me about the number {i}."}] for i in range(6)]
    options = {"temperature": 0.0, "max_tokens": 12}
    solo = [client.generate(c, cache_salt=f"solo {i}", **options).text for i, c in enumerate(chats)]
    assert len(set(solo)) > 1
    with ThreadPoolExecutor(6) as pool:
        for _ in range(2):
            results = list(pool.map(lambda c: client.generate(c, **options), chats))
            assert [r.text for r in results] == solo
    assert all(r.usage.cached_tokens >= 16 for r in results)
