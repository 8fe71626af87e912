"""OpenVINO GenAI's continuous batching, in its own process: its figures hold no HTTP."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.peers.environment import Environment
from bench.peers.in_process import InProcess, in_process
from bench.peers.models import gguf_file, safetensors_folder

VERSION = "2026.4.0"
# Each build of GenAI loads one build of OpenVINO.
ENVIRONMENT = Environment("openvino", (f"openvino-genai=={VERSION}", f"openvino=={VERSION}", "numpy"))
# Only writes models; it needs torch.
EXPORTER = Environment("optimum", ("optimum-intel[openvino]==2.2.0", "torch>=2.6"), without=("torchvision",))
FORMATS = {
    "bf16": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "64"],
}


class OpenVino:
    name = "openvino"
    # With few-bit weights, computing in f32 lets it quantize activations too: faster for one stream, not always for 32.
    variants = {
        "bf16": "bf16",
        "int8": "int8",
        "int8_f32": "int8",
        "int4": "int4",
        "int4_f32": "int4",
        "q4_1": "int4",
    }
    how = "in process, ContinuousBatchingPipeline; computes in bf16, variants _f32 in f32"

    def prepare(self, variants: Sequence[str]) -> str:
        ENVIRONMENT.install()
        for variant in variants:
            _model(variant.removesuffix("_f32"))
        return ENVIRONMENT.version("openvino-genai")

    def serve(self, variant: str, log: Path) -> contextlib.AbstractContextManager[InProcess]:
        precision = "f32" if variant.endswith("_f32") else "bf16"
        model = _model(variant.removesuffix("_f32"))
        return in_process(ENVIRONMENT, "openvino_genai.py", [str(model), precision], log)


def _model(variant: str) -> Path:
    if variant == "q4_1":
        return gguf_file()
    target = ENVIRONMENT.folder / f"model-{variant}"
    if not target.is_dir():
        EXPORTER.install()
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        command: list[str | Path] = [
            EXPORTER.bin / "optimum-cli",
            "export",
            "openvino",
            "--task",
            "text-generation-with-past",
        ]
        EXPORTER.run([*command, "-m", safetensors_folder(), *FORMATS[variant], part], HF_HUB_OFFLINE="1")
        os.replace(part, target)
    return target
