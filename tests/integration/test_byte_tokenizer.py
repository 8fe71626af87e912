"""The whole line on a model with random weights and no vocabulary files: real processes, in seconds."""

from support.oracle import assert_greedy

OPTIONS = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


def test_random_weights_and_bytes(small, tiny_model):
    folder, model = tiny_model
    client = small(model=folder, tokenizer_tokenizer="byte").client
    result = client.generate("Grüße", **OPTIONS)
    assert list(result.started.prompt_token_ids) == [256, *"Grüße".encode()]
    assert_greedy(model, list(result.started.prompt_token_ids), result.token_ids)
    assert result.text == bytes(i for i in result.token_ids if i < 256).decode(errors="replace")

    chat = client.generate([{"role": "user", "content": "Hi"}], **OPTIONS)
    assert bytes(chat.started.prompt_token_ids[1:]) == b"user: Hi\nassistant: "
    forced = client.generate("x", temperature=0.0, logit_bias={257: 100.0})
    assert (forced.finish_reason, forced.text, forced.token_ids) == ("STOP", "", [257])
