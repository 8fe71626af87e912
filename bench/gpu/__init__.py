"""Proves on a GPU what the interpreter and the compiler cannot: `python -m bench.gpu`, one JSON object last."""
