"""A GGUF file: metadata and (quantized) tensors in one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from quartet.services.executor.models.config import ModelConfig, ModelError
from quartet.services.executor.models.gguf_config import config_from_gguf
from quartet.services.executor.weights.ggml_types import Q4_1, dequantize
from quartet.services.executor.weights.gguf_header import GGUFHeader, GGUFTensor

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """A WeightSource. Raises ModelError naming the key or tensor that is missing or of no use."""

    def __init__(self, path: Path) -> None:
        header = GGUFHeader(path)
        if header.metadata.get("split.count", 1) != 1:
            raise ModelError(f"{path}: one of several split files: merge them first")
        tensors = dict(header.tensors)
        rope_factors = tensors.pop(_ROPE_FACTORS, None)
        self.config: ModelConfig = config_from_gguf(
            header.metadata,
            {name: tensor.shape for name, tensor in tensors.items()},
            None if rope_factors is None else tuple(_dequantize(rope_factors, torch.float32).tolist()),
        )
        self._tensors = {_hf_name(name): tensor for name, tensor in tensors.items()}
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._permuted = header.metadata["general.architecture"] == "llama"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def display_name(self, name: str) -> str:
        return self._tensors[name].name if name in self._tensors else _gguf_name(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._in_halves(name, _dequantize(self._tensors[name], dtype))

    def read_q4_1(self, name: str) -> torch.Tensor | None:
        tensor = self._tensors[name]
        if tensor.type is not Q4_1:
            return None
        return self._in_halves(name, torch.from_numpy(tensor.data.copy()))

    def _in_halves(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Works on whole rows, whatever they are made of."""
        if self._permuted and ".self_attn.q_proj." in name:
            return _split_halves(tensor, self.config.num_heads)
        if self._permuted and ".self_attn.k_proj." in name:
            return _split_halves(tensor, self.config.num_kv_heads)
        return tensor


def _dequantize(tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        return dequantize(tensor.type, tensor.data, dtype)
    except NotImplementedError as error:
        raise ModelError(f"tensor {tensor.name}: {tensor.type.name} is not supported") from error


def _split_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama files interleave the two halves that rotate with each other, row by row; undo it."""
    return tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return name


def _gguf_name(name: str) -> str:
    for own, hugging_face in _TOP_LEVEL.items():
        if name == hugging_face:
            return own
    for own, hugging_face in _IN_LAYER.items():
        match = re.fullmatch(rf"model\.layers\.(\d+)\.{re.escape(hugging_face)}\.(weight|bias)", name)
        if match:
            return f"blk.{match[1]}.{own}.{match[2]}"
    return name
