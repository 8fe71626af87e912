"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

import msgspec

from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.constraints import tokenize_tools
from quartet.services.gateway.http.errors import invalid
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.logprobs import token_text
from quartet.services.gateway.http.prompts import chat_prompt, checked_ids
from quartet.services.gateway.http.requests import DetokenizeRequest, TokenizeRequest
from quartet.services.gateway.http.responses import Detokenized, Tokenized
from quartet.shared.messages import Decode, Decoded, Encode, Encoded, Prompt, TextPrompt

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(api: Api, exchange: Exchange) -> None:
    """The empty text is no error here: it has no tokens."""
    body = await exchange.read_json(_TOKENIZE, api.settings.max_body_bytes, api.settings.body_timeout)
    async with exchange.while_client_is_there():
        _, model = api.model(body.model)
        prompt = _prompt(body, api.settings.max_messages)
        tools = tokenize_tools(body, api.limits)
        encoded = await api.ask(Encoded, lambda call_id: Encode(call_id, prompt, tools))
        texts = [token_text(token) for token in encoded.tokens] if body.return_token_strs else None
        answer = Tokenized(len(encoded.token_ids), model.max_model_len, encoded.token_ids, texts)
        await exchange.respond(200, msgspec.json.encode(answer))


async def detokenize(api: Api, exchange: Exchange) -> None:
    body = await exchange.read_json(_DETOKENIZE, api.settings.max_body_bytes, api.settings.body_timeout)
    async with exchange.while_client_is_there():
        api.model(body.model)
        token_ids = checked_ids("tokens", body.tokens)
        decoded = await api.ask(Decoded, lambda call_id: Decode(call_id, token_ids, bool(body.skip_special_tokens)))
        await exchange.respond(200, msgspec.json.encode(Detokenized(decoded.text)))


def _prompt(body: TokenizeRequest, max_messages: int) -> Prompt:
    if body.messages is not None:
        if body.prompt is not None:
            raise invalid("messages", "goes not together with prompt")
        if body.add_special_tokens:
            raise invalid("add_special_tokens", "goes with prompt only: a chat template writes its own")
        return chat_prompt(body, body.messages, max_messages)
    if body.prompt is None:
        raise invalid("prompt", "give either prompt or messages")
    return TextPrompt(body.prompt, body.add_special_tokens is not False)
