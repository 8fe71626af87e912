"""The default model in the forms that peers read: the same weights, dequantised from the file that Quartet serves."""

from __future__ import annotations

from pathlib import Path

from bench.peers.environment import Environment
from quartet.shared.model_files import resolve_model

# Also the environment of the peer `transformers`.
TRANSFORMERS = Environment("transformers", ("transformers==5.24.0", "torch>=2.6", "accelerate", "gguf>=0.17"))


def gguf_file() -> Path:
    return resolve_model("smollm2-135m-instruct").path


def safetensors_folder(environment: Environment = TRANSFORMERS) -> Path:
    """bfloat16 weights, config and tokenizer, as transformers saves them."""
    folder = environment.folder / "model"
    if not (folder / "model.safetensors").is_file():
        environment.install()
        driver = Path(__file__).parent / "drivers" / "save_folder.py"
        environment.run([environment.bin / "python", "-I", driver, gguf_file(), folder], HF_HUB_OFFLINE="1")
    return folder
