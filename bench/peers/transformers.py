"""transformers' generate, all requests in one static batch: what there was before continuous batching."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from bench.peers.in_process import InProcess, in_process
from bench.peers.models import TRANSFORMERS, safetensors_folder


class Transformers:
    name = "transformers"
    variants = {"bf16": "bf16"}
    how = "in process, generate; lengths are equal, so that its batch has no padding"

    def prepare(self, variants: Sequence[str]) -> str:
        safetensors_folder()
        return TRANSFORMERS.version("transformers")

    def serve(self, variant: str, log: Path) -> contextlib.AbstractContextManager[InProcess]:
        return in_process(TRANSFORMERS, "transformers_generate.py", [str(safetensors_folder())], log)
