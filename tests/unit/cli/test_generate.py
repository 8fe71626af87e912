"""What `quartet generate` asks of a server, and what it prints."""

import asyncio

from support.gateway_fakes import gateway, in_loop

from quartet.services.cli.generate import main
from quartet.shared import messages as m


@in_loop
async def test_what_is_given_arrives_and_the_answer_is_printed(capsys):
    async with gateway(words=["Hé", "llo"]) as (address, _, peer):
        flags = ["--address", address, "--tenant", "acme", "--max-tokens", "5", "--stop", "x", "--system", "Be brief."]
        assert await asyncio.to_thread(main, [*flags, "Say", "hello"]) == 0
        submit = peer.last(m.Submit)
    assert submit.prompt == m.ChatPrompt([m.ChatMessage("system", "Be brief."), m.ChatMessage("user", "Say hello")])
    assert (submit.tenant, submit.sampling.max_tokens, submit.text.stop) == ("acme", 5, ["x"])
    assert capsys.readouterr().out.splitlines()[-1] == "Héllo"


def test_no_server_is_told_in_one_line(capsys):
    assert main(["--address", "127.0.0.1:1", "hi"]) == 1
    assert "no server on 127.0.0.1:1" in capsys.readouterr().err
