"""Each service dies during streams; every stream goes on, and its text is an undisturbed run's."""

import threading

import pytest
from support.client import Result
from support.oracle import assert_greedy

PROMPTS = ["Once upon a time", "The history of Rome began", "def quicksort(array):", "My dear friend, I must tell you"]
OPTIONS = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}


@pytest.mark.parametrize("victim", ["tokenizer", "scheduler", "executor"])
def test_streams_survive_the_death_of(stack, reference, victim):
    results = [Result() for _ in PROMPTS]
    errors = []
    begun = threading.Barrier(len(PROMPTS) + 1)

    def follow(prompt, result):
        try:
            waiting = True
            for response in stack.client.stream(prompt, timeout=90, **OPTIONS):
                result.add(response)
                if waiting and result.choices and len(result.token_ids) >= 10:
                    waiting = False
                    begun.wait(60)
        except Exception as error:
            errors.append(error)
            begun.abort()

    threads = [threading.Thread(target=follow, args=pair) for pair in zip(PROMPTS, results, strict=True)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    stack.restart(victim)
    for thread in threads:
        thread.join(90)
    assert not errors, f"{errors}\n{stack.tail()}"
    for result in results:
        assert len(result.token_ids) == result.usage.completion_tokens == 60
        assert_greedy(reference, list(result.started.prompt_token_ids), result.token_ids)
    undisturbed = stack.client.generate(PROMPTS[0], **OPTIONS)
    assert undisturbed.text == results[0].text
