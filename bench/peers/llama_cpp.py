"""llama.cpp's server, built from the tree in llama-cpp-python's source distribution for this machine's instructions."""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.line import free_port
from bench.peers.environment import Environment, UnavailableError
from bench.peers.http import HttpServer, ProgressReader, http_server
from bench.peers.models import gguf_file
from quartet.services.cli.bench.record import Prompt

VERSION = "0.3.36"
# scikit-build-core: pip asks the source distribution's build system for its metadata.
ENVIRONMENT = Environment("llama_cpp", ("cmake", "ninja", "scikit-build-core"))
OPTIONS = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF"]
OPTIONS += ["LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF"]
TOOLS = ("llama-server", "llama-quantize", "llama-bench")


class LlamaCpp:
    name = "llama_cpp"
    variants = {"bf16": "bf16", "q8_0": "int8", "q4_0": "int4", "q4_1": "int4"}
    how = "its server, /completion"

    def prepare(self, variants: Sequence[str]) -> str:
        ENVIRONMENT.install()
        if not all((_bin() / tool).is_file() for tool in TOOLS):
            _build()
        for variant in variants:
            _model(variant)
        return f"{VERSION} ({ENVIRONMENT.run([_bin() / 'llama-server', '--version']).splitlines()[0]})"

    def serve(self, variant: str, log: Path) -> contextlib.AbstractContextManager[HttpServer]:
        port = free_port()
        threads = str(os.cpu_count() or 1)
        command: list[str | Path] = [
            _bin() / "llama-server",
            "-m",
            _model(variant),
            "-np",
            "32",
            "-c",
            "16384",
            "-t",
            threads,
            "-cb",
        ]
        # Copies of finished requests' KV would cost time and hit nothing.
        command += ["--cache-ram", "0", "--no-ui", "--host", "127.0.0.1", "--port", str(port)]
        return http_server(command, log, f"http://127.0.0.1:{port}", "/completion", _request, ProgressReader)


def _request(token_ids: Prompt, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt": token_ids,
        "n_predict": output_tokens,
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }


def _bin() -> Path:
    return ENVIRONMENT.folder / "build" / "bin"


def _build() -> None:
    if shutil.which("c++") is None:
        raise UnavailableError("it is built from source, and there is no c++ compiler")
    folder = ENVIRONMENT.folder
    command: list[str | Path] = [
        ENVIRONMENT.bin / "python",
        "-m",
        "pip",
        "download",
        "--no-cache-dir",
        "--no-deps",
        "--dest",
        folder,
    ]
    command += ["--no-build-isolation", "--no-binary", ":all:", f"llama-cpp-python=={VERSION}"]
    ENVIRONMENT.run(command)
    archive = folder / f"llama_cpp_python-{VERSION}.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    source = folder / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    amx = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    intrinsics = (Path(__file__).parent / "gcc_amx.h").read_text()
    # Last, for its definitions to replace those of the compiler's headers.
    amx.write_text(amx.read_text().replace("\nnamespace {", f"\n{intrinsics}\nnamespace {{", 1))
    ninja = ENVIRONMENT.bin / "ninja"
    configure: list[str | Path] = [ENVIRONMENT.bin / "cmake", "-S", source, "-B", folder / "build", "-G", "Ninja"]
    ENVIRONMENT.run([*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}", *(f"-D{option}" for option in OPTIONS)])
    ENVIRONMENT.run([ninja, "-C", folder / "build", "-j", str(os.cpu_count() or 1), *TOOLS])


def _model(variant: str) -> Path:
    """The file that Quartet serves is the Q4_1; the others are made from its dequantised weights."""
    if variant == "q4_1":
        return gguf_file()
    target = ENVIRONMENT.folder / f"model-{variant}.gguf"
    if not target.is_file():
        source = gguf_file() if variant == "bf16" else _model("bf16")
        part = target.with_suffix(".part")
        ENVIRONMENT.run([_bin() / "llama-quantize", "--allow-requantize", source, part, variant.upper()])
        part.rename(target)
    return target
