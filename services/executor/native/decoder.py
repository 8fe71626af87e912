"""The decoder whose step is one call into the compiled kernels; bfloat16 activations, weights in any Format."""

from __future__ import annotations

import weakref
from ctypes import c_double, c_void_p
from typing import Literal, Protocol

import torch

from quartet.services.executor.attention.interface import AttentionBackend
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.parameters import EMBED_TOKENS, FINAL_NORM, LM_HEAD
from quartet.services.executor.models.rope import RotaryEmbedding
from quartet.services.executor.native.library import (
    PHASES,
    DecoderConfig,
    Format,
    Isa,
    Step,
    detect_isa,
    load_library,
)
from quartet.services.executor.native.pool_pages import PoolPages


class LoadParameters(Protocol):
    """Each parameter once: by name, or as GGML's Q4_1 blocks where the checkpoint has it so (else None)."""

    def __call__(self, name: str) -> torch.Tensor: ...

    def q4_1(self, name: str) -> torch.Tensor | None: ...


Quantization = Literal["none", "int8", "int4"]

_QKV, _OUTPUT, _GATE_UP, _DOWN, _HEAD = range(5)
_INPUT_NORM, _POST_ATTENTION_NORM, _QUERY_NORM, _KEY_NORM, _FINAL_NORM = range(5)
_FIRST_ANGLES = 2048


def why_not(config: ModelConfig, block_size: int) -> str | None:
    """What keeps the kernels from serving this model here, None when nothing does."""
    if load_library() is None:
        return "the kernels were not built"
    if not detect_isa().widest():
        return "the CPU has neither AVX2 nor AVX-512 BF16"
    if config.head_size % 32 or config.head_size > 512:
        return f"head_size {config.head_size} is no multiple of 32 up to 512"
    if block_size % 16:
        return f"block_size {block_size} is no multiple of 16"
    return None


class NativeDecoder:
    """A Model. K/V are kept in the cache's memory in the kernels' own order (see attention.h), so one cache serves
    this decoder or the plain one, not both in turn. Its attention is its own: a backend passed in is not used."""

    dtype = torch.bfloat16
    device = torch.device("cpu")

    def __init__(
        self,
        config: ModelConfig,
        load: LoadParameters,
        *,
        block_size: int,
        num_threads: int,
        quantization: Quantization = "none",
        isa: Isa | None = None,
    ) -> None:
        """`load` gives each parameter of `parameter_shapes(config)`. `isa` narrows what the CPU has.
        Raises ValueError where `why_not` has a reason, MemoryError when memory is short."""
        reason = why_not(config, block_size)
        library = load_library()
        if reason is not None or library is None:
            raise ValueError(f"the compiled kernels cannot serve this model: {reason}")
        self.config = config
        self.isa = (detect_isa() if isa is None else isa).widest()
        self._library = library
        self._block_size = block_size
        self._layer_format = {"none": Format.BF16, "int8": Format.INT8, "int4": Format.INT4}[quantization]
        # A head in 4 bits would cost 8 % of perplexity.
        head_format = Format.BF16 if quantization == "none" else Format.INT8
        handle = library.quartet_decoder_new(
            DecoderConfig(
                num_layers=config.num_layers,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_size,
                vocab_size=config.vocab_size,
                block_size=block_size,
                num_threads=num_threads,
                isa=int(self.isa),
                rms_norm_eps=config.rms_norm_eps,
            )
        )
        if not handle:
            raise MemoryError("cannot create the decoder")
        self._handle = c_void_p(handle)
        # Its threads end with it, before the interpreter does.
        weakref.finalize(self, library.quartet_decoder_free, self._handle)

        # Packed and let go before anything else is loaded: it is a large part of a small model.
        embed_tokens = _bf16(load(EMBED_TOKENS))
        if config.tie_word_embeddings:
            self._set_matrix(0, _HEAD, head_format, [embed_tokens])
        else:
            _check_memory(library.quartet_decoder_set_embedding(self._handle, embed_tokens.data_ptr()))
        del embed_tokens
        for layer in range(config.num_layers):
            self._load_layer(layer, load)
        self._set_vector(0, _FINAL_NORM, load(FINAL_NORM))
        if not config.tie_word_embeddings:
            self._set_matrix(0, _HEAD, head_format, [load(LM_HEAD)])

        self._rotary = RotaryEmbedding(config.rope, config.head_size, self.device)
        self._cos_sin = torch.empty(0), torch.empty(0)
        self._angles, self._num_angles = (0, 0), 0
        # Of the first rows of one piece of memory, by their number.
        self._logits: dict[int, torch.Tensor] = {}
        self._logits_address = 0
        self._max_logits = 0
        self._cache: KVCache | None = None
        self._kv_pools = (c_void_p * 0)()

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """As Decoder.forward; hidden states [T, hidden_size] bfloat16."""
        num_tokens = batch.query_start_loc_list[-1]
        hidden = torch.empty(num_tokens, self.config.hidden_size, dtype=self.dtype)
        step = Step(
            num_tokens=num_tokens,
            num_rows=len(batch.seq_lens_list),
            num_decodes=batch.num_decodes,
            table_width=batch.block_tables.shape[1],
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slot_mapping=batch.slot_mapping.data_ptr(),
            query_start_loc=batch.query_start_loc.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            hidden=hidden.data_ptr(),
        )
        self.use_cache(kv_cache, step)
        self.run(step, max(batch.seq_lens_list))
        return hidden

    def run(self, step: Step, longest: int) -> None:
        """Writes the hidden states of a step that has been told its cache; `longest` of its seq_lens."""
        if longest > self._num_angles:
            self._extend_angles(longest)
        step.cos, step.sin = self._angles
        _check_memory(self._library.quartet_decoder_forward(self._handle, step))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size] float32, valid until the next call: memory is used again."""
        hidden = hidden.contiguous()
        return self.project(hidden.data_ptr(), len(hidden))

    def project(self, hidden: int, num_rows: int) -> torch.Tensor:
        """As compute_logits, of rows at an address. As many rows come out as the same tensor each time."""
        logits = self._logits.get(num_rows)
        if logits is None:
            # Not tensors of inference mode, whatever the caller is in: they outlive it, and samplers write to them.
            with torch.inference_mode(False):
                logits = self._logits_of(num_rows)
        _check_memory(self._library.quartet_decoder_logits(self._handle, hidden, num_rows, self._logits_address))
        return logits

    def _logits_of(self, num_rows: int) -> torch.Tensor:
        if num_rows > self._max_logits:
            whole = torch.empty(num_rows, self.config.vocab_size)
            self._logits = {num_rows: whole}
            self._max_logits, self._logits_address = num_rows, whole.data_ptr()
        logits = self._logits[num_rows] = self._logits[self._max_logits][:num_rows]
        return logits

    def times(self) -> dict[str, float]:
        """Cumulative seconds by phase: `small` (embedding, norms, quantising of rows), `products` of the layers,
        `attention` (with rotation and the cache's writes), `head` (compute_logits). Any thread may ask."""
        seconds = (c_double * len(PHASES))()
        self._library.quartet_decoder_times(self._handle, seconds)
        return dict(zip(PHASES, seconds, strict=True))

    def read_weights(self) -> int:
        """Reads all weights once on all threads and does nothing else: the bound of a step with one row.
        Returns the bytes read."""
        return int(self._library.quartet_decoder_read_weights(self._handle))

    # --- loading ----------------------------------------------------------------------------------

    def _load_layer(self, layer: int, load: LoadParameters) -> None:
        config, prefix = self.config, f"model.layers.{layer}."

        def matrix(kind: int, has_bias: bool, *names: str) -> None:
            weights: list[torch.Tensor] = []
            for name in names:
                blocks = load.q4_1(f"{prefix}{name}.weight") if self._layer_format is Format.INT4 else None
                weights.append(load(f"{prefix}{name}.weight") if blocks is None else blocks)
            bias = torch.cat([load(f"{prefix}{name}.bias") for name in names]) if has_bias else None
            self._set_matrix(layer, kind, self._layer_format, weights, bias)

        self._set_vector(layer, _INPUT_NORM, load(prefix + "input_layernorm.weight"))
        matrix(_QKV, config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        matrix(_OUTPUT, config.o_bias, "self_attn.o_proj")
        self._set_vector(layer, _POST_ATTENTION_NORM, load(prefix + "post_attention_layernorm.weight"))
        matrix(_GATE_UP, config.mlp_bias, "mlp.gate_proj", "mlp.up_proj")
        matrix(_DOWN, config.mlp_bias, "mlp.down_proj")
        if config.qk_norm:
            self._set_vector(layer, _QUERY_NORM, load(prefix + "self_attn.q_norm.weight"))
            self._set_vector(layer, _KEY_NORM, load(prefix + "self_attn.k_norm.weight"))
        self._library.quartet_decoder_set_window(self._handle, layer, config.layer_windows[layer] or 0)

    def _set_matrix(
        self, layer: int, kind: int, format: Format, weights: list[torch.Tensor], bias: torch.Tensor | None = None
    ) -> None:
        """weights: the matrices [N_i, K] that lie on each other, or their Q4_1 blocks [N_i, K / 32 * 20] uint8."""
        num_inner = _num_inner(weights[0])
        if format is Format.INT4 and num_inner % 32:
            format = Format.INT8
        parts = [_as_q4_1(weight) if format is Format.INT4 else _bf16(weight) for weight in weights]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        bias = None if bias is None else bias.float().contiguous()
        _check_memory(
            self._library.quartet_decoder_set_matrix(
                self._handle,
                layer,
                kind,
                int(format),
                len(data),
                num_inner,
                int(kind == _GATE_UP),
                data.data_ptr(),
                None if bias is None else bias.data_ptr(),
            )
        )

    def _set_vector(self, layer: int, kind: int, values: torch.Tensor) -> None:
        values = values.float().contiguous()
        self._library.quartet_decoder_set_vector(self._handle, layer, kind, values.data_ptr(), len(values))

    # --- what steps share -------------------------------------------------------------------------

    def use_cache(self, kv_cache: KVCache, step: Step) -> None:
        """Tells the step where keys and values are. Raises ValueError where they are not held as needed."""
        if self._cache is not kv_cache:
            self._take_cache(kv_cache)
        step.kv_pools = self._kv_pools

    def pool_pages(self, kv_cache: KVCache, ahead_bytes: int) -> PoolPages:
        """Of a cache that it uses."""
        return PoolPages(kv_cache.pools, kv_cache.num_blocks + 1, ahead_bytes, self._library.quartet_populate)

    def _take_cache(self, kv_cache: KVCache) -> None:
        if kv_cache.block_size != self._block_size or kv_cache.keys[0].dtype != self.dtype:
            raise ValueError("the cache is not the one that this decoder was made for")
        self._cache = kv_cache
        for pool in kv_cache.pools:
            self._library.quartet_advise_huge_pages(pool.data_ptr(), pool.nbytes)
        self._kv_pools = (c_void_p * self.config.num_layers)(*[pool.data_ptr() for pool in kv_cache.pools])

    def _extend_angles(self, num_positions: int) -> None:
        half = self.config.head_size // 2
        cos, sin = self._rotary(torch.arange(max(_FIRST_ANGLES, 2 * num_positions)))
        self._cos_sin = cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()
        self._angles = self._cos_sin[0].data_ptr(), self._cos_sin[1].data_ptr()
        self._num_angles = len(self._cos_sin[0])


def _num_inner(weight: torch.Tensor) -> int:
    return weight.shape[1] // 20 * 32 if weight.dtype == torch.uint8 else weight.shape[1]


def _as_q4_1(weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype == torch.uint8:
        return weight
    import gguf  # slow to import, and a checkpoint in Q4_1 does without

    return torch.from_numpy(gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q4_1))


def _bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).contiguous()


def _check_memory(succeeded: int) -> None:
    if not succeeded:
        raise MemoryError("the kernels could not get memory")
