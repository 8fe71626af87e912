"""The matrix products of the model: one seam for every way to hold and multiply weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# oneDNN picks the packed layout for this many rows; measured, it serves 1 to 256 rows equally well.
_PACK_ROWS = 32


class Linear:
    """y = x W^T + b. x [M, in_features] -> [M, out_features], in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out_features, in_features]; it is repacked, so that keeping it elsewhere costs twice."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = _is_packable(weight)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


def _is_packable(weight: torch.Tensor) -> bool:
    # Packed half precision beats F.linear by a third to a half; in float32 F.linear (MKL) is as good.
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
