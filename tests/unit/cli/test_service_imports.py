"""What a service has in memory once its modules are imported: each costs the start, and every restart."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMPILERS = {"torch._dynamo", "torch._inductor", "triton", "sympy"}
SERVICES = {
    "gateway": ("gateway.__main__, quartet.services.gateway.service", {"torch", "numpy", "tokenizers", "gguf"}),
    "tokenizer": ("tokenizer.__main__", {"torch", "numpy", "transformers", "grpc", "gguf", "huggingface_hub"}),
    "scheduler": ("scheduler.__main__", {"torch", "numpy", "grpc", "google.protobuf", "tokenizers"}),
    "executor": (
        "executor.__main__, quartet.services.executor.startup, quartet.services.executor.service",
        {"transformers", "scipy", "gguf", "grpc", "tokenizers", "huggingface_hub", *COMPILERS},
    ),
    "cli": ("cli.main, quartet.services.cli.serve", {"torch", "numpy", "grpc", "google.protobuf", "tokenizers"}),
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_nothing_that_it_does_not_serve_with(service: str) -> None:
    modules, unwanted = SERVICES[service]
    code = f"import sys, quartet.services.{modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert unwanted.isdisjoint(loaded), unwanted.intersection(loaded)


def test_the_executor_waits_for_torch_only_when_its_settings_are_good() -> None:
    code = "import sys, quartet.services.executor.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"torch", "numpy"}.isdisjoint(loaded)
