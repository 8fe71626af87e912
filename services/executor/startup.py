"""From settings to a model that is ready to run steps."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import torch

from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.engine import Engine, Model, TorchEngine
from quartet.services.executor.gpu_startup import BuildModel, is_interpreted, load_gpu_runner, pick_device
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.model_runner import ModelRunner
from quartet.services.executor.models.config import ModelConfig, ModelError
from quartet.services.executor.native.decoder import NativeDecoder, Quantization, why_not
from quartet.services.executor.native.engine import NativeEngine
from quartet.services.executor.native.library import Isa, detect_isa
from quartet.services.executor.native.sampler import NativeSampler, can_sample
from quartet.services.executor.resources import available_memory, has_native_bfloat16, num_cpus, num_kv_blocks
from quartet.services.executor.settings import ExecutorSettings
from quartet.services.executor.step_times import StepTimes
from quartet.services.executor.weights import DTYPES, is_q4_1, load_config, load_decoder, load_with
from quartet.shared.log import get_logger
from quartet.shared.messages import ModelInfo
from quartet.shared.model_files import ModelFiles, resolve_model

CPU_NUM_BATCHED_TOKENS = 256

_log = get_logger()


def load_runner(settings: ExecutorSettings) -> tuple[ModelRunner, ModelInfo]:
    """Loads, sizes the KV pool and warms up. Raises ModelError (of either kind) or NotEnoughMemory."""
    num_threads = settings.num_threads or num_cpus(len(os.sched_getaffinity(0)))
    torch.set_num_threads(num_threads)
    device = pick_device(settings)
    files = resolve_model(settings.model)
    config = load_config(files.path)
    max_model_len = pick_max_model_len(settings, config)
    if device.type == "cuda" or (settings.attention_backend == "triton" and is_interpreted()):
        _log.info("loading", model=files.name)

        def load(build: BuildModel, dtype: str) -> Model:
            return load_with(build, files.path, dtype, str(device), _log_progress)

        runner, batch, dtype_name = load_gpu_runner(settings, config, max_model_len, device, load)
        return runner, _model_info(files, batch, dtype_name, device)
    runner, batch, dtype_name = _load_cpu_runner(settings, files, config, max_model_len, num_threads)
    return runner, _model_info(files, batch, dtype_name, device)


def _load_cpu_runner(
    settings: ExecutorSettings, files: ModelFiles, config: ModelConfig, max_model_len: int, num_threads: int
) -> tuple[ModelRunner, InputBatch, str]:
    if settings.attention_backend == "triton" or settings.kv_dtype == "fp8":
        asked = "attention_backend triton" if settings.attention_backend == "triton" else "kv_dtype fp8"
        raise ModelError(f"{asked} is not possible: the Triton kernels need a GPU")
    device = torch.device("cpu")
    dtype_name = pick_dtype(settings, config)
    dtype = DTYPES[dtype_name]
    bytes_per_block = KVCache.bytes_per_block(config, settings.block_size, dtype)
    # What cannot fit even without the weights is refused before they are loaded.
    num_kv_blocks(settings, max_model_len, bytes_per_block, available_memory())
    _log.info("loading", model=files.name, dtype=dtype_name, num_threads=num_threads)
    started = time.monotonic()
    decoder = _load_model(settings, files.path, config, dtype_name, num_threads)
    _log.info("loaded", seconds=round(time.monotonic() - started, 2))

    num_blocks = num_kv_blocks(settings, max_model_len, bytes_per_block, available_memory())
    kv_cache = KVCache(config, num_blocks, settings.block_size, dtype, device)
    _log.info("KV memory", num_blocks=num_blocks, mebibytes=round(num_blocks * bytes_per_block / 2**20))
    batch = InputBatch(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens or CPU_NUM_BATCHED_TOKENS,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        vocab_size=config.vocab_size,
    )
    runner = ModelRunner(make_engine(decoder, kv_cache, batch, num_threads, settings.kv_prefault_bytes), batch)
    started = time.monotonic()
    runner.warm_up()
    _log.info("warmed up", seconds=round(time.monotonic() - started, 2))
    return runner, batch, dtype_name


def make_engine(
    decoder: Model, kv_cache: KVCache, batch: InputBatch, num_threads: int, prefault_bytes: int = 0
) -> Engine:
    """Of the decoder's kind, on the CPU."""
    isa = decoder.isa if isinstance(decoder, NativeDecoder) else None
    sampler = NativeSampler(batch.sampling, num_threads, isa) if can_sample() else None
    if isinstance(decoder, NativeDecoder) and sampler is not None:
        return NativeEngine(decoder, kv_cache, batch, sampler, StepTimes(decoder.times), prefault_bytes)
    return TorchEngine(decoder, kv_cache, TorchPagedAttention(), batch, torch.device("cpu"), drawer=sampler)


def _model_info(files: ModelFiles, batch: InputBatch, dtype_name: str, device: torch.device) -> ModelInfo:
    return ModelInfo(
        name=files.name,
        model_fingerprint=files.fingerprint,
        vocab_size=batch.vocab_size,
        max_model_len=batch.max_model_len,
        num_blocks=batch.num_blocks,
        block_size=batch.block_table.block_size,
        max_num_seqs=batch.max_num_seqs,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        dtype=dtype_name,
        device=device.type,
        structured_output=True,
    )


def _load_model(settings: ExecutorSettings, path: Path, config: ModelConfig, dtype: str, num_threads: int) -> Model:
    """On the compiled kernels where they can serve it, else in plain torch."""
    reason = _why_plain(settings, config, dtype)
    if reason is not None:
        if settings.attention_backend == "native":
            raise ModelError(f"attention_backend native is not possible: {reason}")
        if settings.quantization in ("int8", "int4"):
            raise ModelError(f"quantization {settings.quantization} needs the compiled kernels, but {reason}")
        if settings.isa == "amx":
            raise ModelError(f"isa amx is of the compiled kernels, but {reason}")
        _log.info("running in plain torch", reason=reason)
        return load_decoder(path, dtype, progress=_log_progress)
    quantization = _pick_quantization(settings, path)
    build = functools.partial(
        NativeDecoder,
        block_size=settings.block_size,
        num_threads=num_threads,
        quantization=quantization,
        isa=pick_isa(settings.isa, detect_isa()),
    )
    decoder = load_with(build, path, dtype, progress=_log_progress)
    _log.info("running on compiled kernels", isa=decoder.isa.describe(), quantization=quantization)
    return decoder


def pick_isa(wanted: str, found: Isa) -> Isa:
    """What the kernels use of `found`. Raises ModelError where what is wanted is not there."""
    if wanted == "auto":
        return found.widest()
    needed = {"avx2": Isa.AVX2, "avx512": Isa.AVX512_BF16, "amx": Isa.AMX}[wanted]
    if not found & needed:
        raise ModelError(f"isa {wanted}: this CPU has {found.describe()}")
    narrower = {Isa.AVX2: ~Isa.AVX512_BF16, Isa.AVX512_BF16: ~Isa.AMX}.get(needed, found)
    return (found & narrower).widest()


def _pick_quantization(settings: ExecutorSettings, path: Path) -> Quantization:
    if settings.quantization != "auto":
        return settings.quantization
    return "int4" if is_q4_1(path) else "none"


def _why_plain(settings: ExecutorSettings, config: ModelConfig, dtype: str) -> str | None:
    if settings.attention_backend == "torch_paged":
        return "attention_backend is torch_paged"
    if dtype != "bfloat16":
        return f"the compiled kernels compute in bfloat16, not {dtype}"
    return why_not(config, settings.block_size)


def pick_dtype(settings: ExecutorSettings, config: ModelConfig) -> str:
    """auto: as the model was saved, except that 16 bits become bfloat16 where the CPU has it or the compiled kernels
    run, and float32 elsewhere."""
    if settings.dtype != "auto":
        return settings.dtype
    is_fast = has_native_bfloat16() or _why_plain(settings, config, "bfloat16") is None
    return "bfloat16" if config.dtype != "float32" and is_fast else "float32"


def pick_max_model_len(settings: ExecutorSettings, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if settings.max_model_len > longest:
        raise ModelError(f"max_model_len {settings.max_model_len} is more than the model's {longest}")
    return settings.max_model_len or longest


def _log_progress(done: int, total: int) -> None:
    if 4 * done // total != 4 * (done - 1) // total:
        _log.info("loading weights", percent=100 * done // total)
