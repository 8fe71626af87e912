"""What a peer may say of itself: bounds that keep one absurd number from costing all memory."""

from __future__ import annotations

from quartet.shared.messages import Hello, ModelInfo

MAX_TEXT = 512
# (least, most) of each number; the most are those of the wire's columns, or what a scheduler can hold.
_LIMITS = {
    "vocab_size": (1, 2**31 - 1),
    "max_model_len": (1, 2**31 - 1),
    "num_blocks": (1, 2**23),
    "block_size": (1, 2**16),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**31 - 1),
}


def malformed_model(model: ModelInfo) -> str | None:
    """What is impossible about a model; None when nothing is."""
    for name, (least, most) in _LIMITS.items():
        value = getattr(model, name)
        if not least <= value <= most:
            return f"{name} is {value}, which is not between {least} and {most}"
    for name in ("name", "model_fingerprint", "dtype", "device"):
        if len(getattr(model, name)) > MAX_TEXT:
            return f"{name} has {len(getattr(model, name))} characters, more than {MAX_TEXT}"
    return None


def malformed_hello(hello: Hello) -> str | None:
    """Why no session can be had with a peer that says this of itself; None when one can."""
    for name in ("name", "version", "tokenizer_fingerprint"):
        if len(getattr(hello, name)) > MAX_TEXT:
            return f"{name} has {len(getattr(hello, name))} characters, more than {MAX_TEXT}"
    reason = malformed_model(hello.model) if hello.model is not None else None
    return None if reason is None else f"its model cannot be: {reason}"
