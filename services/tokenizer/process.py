"""The process around TokenizerService: loading, signals, draining, exit code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jinja2

from quartet.services.tokenizer.byte_level import byte_tokenizer
from quartet.services.tokenizer.chat_template import ChatTemplate
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.loaders import load_tokenizer
from quartet.services.tokenizer.service import TokenizerService
from quartet.services.tokenizer.settings import TokenizerSettings
from quartet.services.tokenizer.tool_formats import pick_format
from quartet.shared.config import SettingsError
from quartet.shared.log import get_logger
from quartet.shared.model_files import ModelFiles, resolve_model
from quartet.shared.signals import stop_on_signals
from quartet.shared.tracing import make_tracer

_log = get_logger()
T = TypeVar("T")


def build_template(loaded: LoadedTokenizer, settings: TokenizerSettings, setting: str | None) -> ChatTemplate:
    """`setting` is the operator's template, which must compile; a model's broken one only costs chats."""
    source = setting or loaded.chat_template
    max_bytes = 2 * settings.max_prompt_bytes + (1 << 20)
    try:
        return ChatTemplate(source, loaded.special_tokens, max_bytes)
    except jinja2.TemplateError as error:
        if setting:
            raise SettingsError(f"chat_template: {error}") from error
        _log.warning("the model's chat template does not compile: chats are refused", error=str(error))
        return ChatTemplate(None, loaded.special_tokens, max_bytes)


async def run(settings: TokenizerSettings, template_setting: str | None) -> int:
    """Serves until SIGTERM or SIGINT; the exit code. A second signal ends the process at once."""
    stop = stop_on_signals()
    tracer = make_tracer("tokenizer", settings.name, settings.otlp_endpoint)

    def load() -> tuple[ModelFiles, LoadedTokenizer, ChatTemplate]:
        files = resolve_model(settings.model)
        loaded = byte_tokenizer() if settings.tokenizer == "byte" else load_tokenizer(files.path)
        return files, loaded, build_template(loaded, settings, template_setting)

    stopped = asyncio.ensure_future(stop.wait())
    loading = _in_daemon_thread(asyncio.get_running_loop(), load)
    waiting: list[asyncio.Future[Any]] = [loading, stopped]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        return 0
    files, loaded, template = await loading
    tool_format = pick_format(settings.tool_parser, template.source)
    service = TokenizerService(settings, loaded, template, files.fingerprint, tool_format)
    service.tracer = tracer
    service.start()
    metrics_server = service.metrics_server(settings)
    metrics_server.start()
    _log.info("tokenizer started", model=files.name, vocab_size=loaded.vocab_size, fingerprint=loaded.fingerprint[:12])
    await stopped
    _log.info("draining", num_unfinished=service.core.num_unfinished)
    await service.drain()
    metrics_server.close()
    service.close()
    if tracer is not None:
        tracer.close()
    return 0


def _in_daemon_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> asyncio.Future[T]:
    """Unlike an executor's thread, one that the process need not wait for when it ends."""
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, error)  # type: ignore[assignment]
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=body, name="load", daemon=True).start()
    return future
