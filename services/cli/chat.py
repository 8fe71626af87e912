"""`quartet chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from quartet.services.cli.answer import Stats, build_parser, print_answer, run_with_client, sampling_of

DESCRIPTION = """Talks with the model of a running server. The whole conversation is sent each time; the server's
prefix cache makes that cheap."""
EPILOG = """in the conversation:
  /reset     forget what was said
  /exit      leave (or Ctrl-D)
  Ctrl-C     cut the answer short

examples:
  quartet chat
  quartet chat --system 'Answer like a pirate.' --temperature 0.7
"""


def main(argv: Sequence[str]) -> int:
    parser = build_parser("chat", DESCRIPTION, EPILOG)
    parser.add_argument("--system", metavar="TEXT", help="system message at the start")
    parser.add_argument("--stats", action="store_true", help="print speed after each answer")
    options = parser.parse_args(argv)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and history)

    def body(client: Any) -> int:
        start = [{"role": "system", "content": options.system}] if options.system is not None else []
        messages = list(start)
        while (text := _ask()) is not None:
            if text == "/reset":
                messages = list(start)
            elif text:
                _turn(client, messages, text, sampling_of(options), options.stats)
        return 0

    return run_with_client("chat", options, body)


def _ask() -> str | None:
    try:
        text = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
    except KeyboardInterrupt:
        print()
        return ""
    return None if text in ("/exit", "/quit") else text


def _turn(client: Any, messages: list[dict[str, str]], text: str, sampling: dict[str, Any], show: bool) -> None:
    """Adds the question and its answer to `messages`; an answer that was cut short is forgotten with its question."""
    stats = Stats()
    question = {"role": "user", "content": text}
    try:
        answer = print_answer(client, sampling, stats, messages=[*messages, question])
    except KeyboardInterrupt:
        print(" [cut]")
        return
    messages += [question, {"role": "assistant", "content": answer}]
    if show:
        print(f"[{stats}]", file=sys.stderr)
