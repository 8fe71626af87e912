"""A tokenizer without a vocabulary file, for tests and for study: every byte of UTF-8 is a token.

Ids 0 to 255 are the bytes, 256 begins a text and 257 ends it. Any model with a vocabulary of 258 or
more can be run with it, one with random weights too.
"""

from __future__ import annotations

import hashlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quartet.services.tokenizer.loaded import LoadedTokenizer, byte_level_alphabet, describe

BOS_TOKEN, BOS_TOKEN_ID = "<|bos|>", 256
EOS_TOKEN, EOS_TOKEN_ID = "<|eos|>", 257

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> LoadedTokenizer:
    vocab = dict(byte_level_alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (BOS_TOKEN, EOS_TOKEN)])
    # Words are cut apart only so that long texts are encoded in pieces: no bytes are merged anyway.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return describe(
        tokenizer,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_ids=[EOS_TOKEN_ID],
        add_bos=True,
        chat_template=CHAT_TEMPLATE,
        special_tokens={"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN},
        fingerprint=hashlib.sha256(f"bytes, then {BOS_TOKEN} {EOS_TOKEN}".encode()).hexdigest(),
    )
