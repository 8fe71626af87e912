"""Makes Triton's interpreter compute as a GPU does where it does not: conversions to bfloat16 and to
8-bit floats round to nearest, and products of bfloat16 are of its values, not of its bits."""

from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as interpreter

_TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot
_patch_lang_tensor = interpreter._patch_lang_tensor


def _convert_rounded(data: Any, from_type: Any, to_type: Any, rounding_mode: Any) -> Any:
    """The bits of `data` (an array of a float type's values or bits) in another float type."""
    source, target = _TORCH_DTYPES.get(str(from_type)), _TORCH_DTYPES.get(str(to_type))
    if source is None or target is None:
        return _convert_float(data, from_type, to_type, rounding_mode)
    bits = torch.from_numpy(np.ascontiguousarray(data).view(np.dtype(f"i{source.itemsize}")))
    converted = bits.view(source).to(target).view(_BITS[target.itemsize]).numpy()
    return converted.view(np.dtype(f"u{target.itemsize}")).reshape(data.shape)


def _dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    def widened(operand: Any) -> Any:
        if str(operand.dtype.scalar) != "bf16":
            return operand
        bits = _convert_rounded(operand.data, operand.dtype.scalar, interpreter.tl.float32, None)
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    return _create_dot(self, widened(a), widened(b), *rest)


def _patch_with_scalars(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    # Triton 3.6 leaves it to numpy to make an int of an array of one element, which numpy 2.4 refuses.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._convert_float = _convert_rounded
interpreter.InterpreterBuilder.create_dot = _dot_of_values
interpreter._patch_lang_tensor = _patch_with_scalars
