"""The attention backend that runs Triton's kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.triton.kv_cache import TritonKVCache
from quartet.services.executor.triton.paged_decode import PART_COLUMNS, ROW_COLUMNS, paged_decode, plan_decode
from quartet.services.executor.triton.paged_prefill import paged_prefill
from quartet.services.executor.triton.tiles import (
    BLOCK_SIZES,
    HEAD_SIZES,
    MAX_GROUP,
    decode_parts,
    decode_tile,
    prefill_tile,
)

FP8 = torch.float8_e4m3fn
# Longer than any context: a window of all.
_NO_WINDOW = 1 << 30
# Taken for granted where no GPU is: the interpreter's plans then have a few parts, and its tiles are Hopper's.
_INTERPRETED_PROCESSORS = 2
_INTERPRETED_CAPABILITY = 90


def why_not(
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    capability: int | None = None,
) -> str | None:
    """What stands in the way of these kernels, or None. `capability` is the GPU's: 90 for 9.0, None when
    there is none to ask (the interpreter)."""
    group = config.num_heads // config.num_kv_heads
    if config.head_size not in HEAD_SIZES:
        return f"the Triton kernels take head sizes {_listed(HEAD_SIZES)}, not {config.head_size}"
    if block_size not in BLOCK_SIZES:
        return f"the Triton kernels take block sizes {_listed(BLOCK_SIZES)}, not {block_size}"
    if group > MAX_GROUP:
        return f"the Triton kernels take up to {MAX_GROUP} query heads per KV head, not {group}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the Triton kernels compute in bfloat16, float16 or float32, not {_name(dtype)}"
    kv_dtype = kv_dtype or dtype
    if kv_dtype not in (dtype, FP8):
        return f"the Triton kernels take KV memory in {_name(dtype)} or float8_e4m3fn here, not {_name(kv_dtype)}"
    if capability is not None and dtype == torch.float32:
        return "the Triton kernels compute in bfloat16 or float16 on a GPU, not float32"
    if capability is not None and capability < 80:
        return f"the Triton kernels need a GPU of compute capability 8.0 or more, not {capability / 10}"
    if capability is not None and kv_dtype == FP8 and capability < 89:
        return f"float8_e4m3fn KV memory needs a GPU of compute capability 8.9 or more, not {capability / 10}"
    return None


@dataclass(slots=True)
class _DecodePlan:
    """Which part of which row each program takes; static buffers, cut anew by every prepare()."""

    window: int
    parts: torch.Tensor  # [num_parts + max_num_seqs, 4] int32
    rows: torch.Tensor  # [max_num_seqs, 2] int32


class TritonAttention:
    """An AttentionBackend for what `why_not` has nothing against.

    For a batch of decode rows alone, all that the host decides depends on the number of rows only, and
    all memory that outlives a call is allocated here: prepare() and forward() can be captured in a CUDA
    graph for padded batches. A padding row has seq_len 0 and gets zeros. prepare() launches kernels too,
    so it belongs to what is captured.
    """

    def __init__(
        self, config: ModelConfig, kv_dtype: torch.dtype, max_num_seqs: int, device: torch.device | str
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            num_processors = properties.multi_processor_count
            capability = 10 * properties.major + properties.minor
        else:
            num_processors, capability = _INTERPRETED_PROCESSORS, _INTERPRETED_CAPABILITY
        group = config.num_heads // config.num_kv_heads
        self._decode_tile = decode_tile(config.head_size, group, kv_dtype.itemsize)
        self._prefill_tile = prefill_tile(config.head_size, kv_dtype.itemsize, capability)
        self._num_parts = decode_parts(config.num_kv_heads, num_processors)
        self._max_num_seqs = max_num_seqs
        max_parts = self._num_parts + max_num_seqs
        self._plans = {
            window: _DecodePlan(
                window=_NO_WINDOW if window is None else window,
                parts=torch.empty((max_parts, PART_COLUMNS), dtype=torch.int32, device=device),
                rows=torch.empty((max_num_seqs, ROW_COLUMNS), dtype=torch.int32, device=device),
            )
            for window in dict.fromkeys(config.layer_windows)
        }
        self._partial_out = torch.empty((max_parts, config.num_heads, config.head_size), device=device)
        self._partial_lse = torch.empty((max_parts, config.num_heads), device=device)
        self._ones = torch.ones(config.num_kv_heads, device=device)
        self._batch: ForwardBatch | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        """Cuts the decode rows into parts; ValueError when there are more than max_num_seqs."""
        self._batch = batch
        num_rows = batch.num_decodes
        if num_rows > self._max_num_seqs:
            raise ValueError(f"{num_rows} decode rows, but attention was made for {self._max_num_seqs}")
        if num_rows == 0:
            return
        for plan in self._plans.values():
            plan_decode(
                plan.parts[: self._num_parts + num_rows],
                plan.rows[:num_rows],
                batch.seq_lens,
                self._num_parts,
                plan.window,
                self._decode_tile.block_n,
            )

    def forward(
        self,
        query: torch.Tensor,
        layer: int,
        kv_cache: KVCache,
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """As AttentionBackend.forward; RuntimeError when `prepare` was not called for this batch."""
        if self._batch is not batch:
            raise RuntimeError("attention.prepare(batch) was not called for this batch")
        num_tokens, num_heads, head_size = query.shape
        if query.stride(2) != 1 or query.stride(1) != head_size:
            query = query.contiguous()
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        key_scales = value_scales = self._ones
        if isinstance(kv_cache, TritonKVCache):
            key_scales, value_scales = kv_cache.key_scales[layer], kv_cache.value_scales[layer]
        out = torch.empty((num_tokens, num_heads, head_size), dtype=query.dtype, device=query.device)
        num_decodes = batch.num_decodes
        if num_decodes:
            plan = self._plans[sliding_window]
            paged_decode(
                out,
                query,
                keys,
                values,
                key_scales,
                value_scales,
                batch.block_tables,
                plan.parts[: self._num_parts + num_decodes],
                plan.rows[:num_decodes],
                self._partial_out,
                self._partial_lse,
                scale=scale,
                tile=self._decode_tile,
            )
        if num_tokens > num_decodes:
            paged_prefill(
                out,
                query,
                keys,
                values,
                key_scales,
                value_scales,
                batch.block_tables,
                batch.query_start_loc,
                batch.seq_lens,
                first_row=num_decodes,
                num_tokens=num_tokens - num_decodes,
                scale=scale,
                sliding_window=sliding_window,
                tile=self._prefill_tile,
            )
        return out.flatten(1)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
