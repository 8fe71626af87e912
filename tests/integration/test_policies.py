"""A scheduling policy is swapped under load: the scheduler dies and another one comes with another policy."""

import threading

from support.client import Result

POLICIES = ["fair", "srf", "support.policies:NewestFirst", "fcfs"]
PROMPTS = [f"{name} tells a story: " for name in ("Ada", "Bob", "Cleo", "Dan", "Eve", "Fay")]
OPTIONS = {"temperature": 0.0, "max_tokens": 500, "ignore_eos": True}


def test_streams_go_on_under_another_policy(small, tiny_model, request, monkeypatch):
    """Each policy takes over from the one before; two streams wait for a row all the while."""
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))
    stack = small(
        model=tiny_model[0],
        tokenizer_tokenizer="byte",
        executor_max_model_len=1024,
        executor_num_blocks=400,
        scheduler_max_num_seqs=4,
        scheduler_policy="priority",
    )
    client = stack.client
    results = [Result() for _ in PROMPTS]
    errors = []
    progress = threading.Condition()

    def follow(i):
        try:
            options = OPTIONS | {"tenant": f"tenant {i % 2}", "priority": i}
            for response in client.stream(PROMPTS[i], timeout=200, **options):
                with progress:
                    results[i].add(response)
                    progress.notify_all()
        except Exception as error:
            errors.append(error)

    def num_tokens():
        return sum(len(c.token_ids) for r in results for c in r.choices.values())

    threads = [threading.Thread(target=follow, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for policy in POLICIES:
        with progress:
            target = num_tokens() + 150
            assert progress.wait_for(lambda: num_tokens() >= target or errors, 180), stack.tail()  # noqa: B023
            assert not all(r.usage for r in results), "over before the swap"
        stack.kill("scheduler")
        stack.start("scheduler", scheduler_policy=policy)
    for thread in threads:
        thread.join(200)
    assert not errors, f"{errors}\n{stack.tail()}"
    log = stack.log("scheduler").read_text()
    assert [f"policy={policy} " in log for policy in POLICIES] == [True] * 4

    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.usage.completion_tokens == len(result.token_ids) == 500
        undisturbed = client.generate(prompt, **OPTIONS)
        assert undisturbed.token_ids == result.token_ids and undisturbed.text == result.text
