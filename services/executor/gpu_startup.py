"""From settings to a model that is ready to run steps on a GPU (or under Triton's interpreter)."""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.dtypes import DTYPES
from quartet.services.executor.engine import Engine, Model, TorchEngine
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.model_runner import WARM_UP, ModelRunner
from quartet.services.executor.models.config import ModelConfig, ModelError
from quartet.services.executor.models.decoder import Decoder, LoadParameter
from quartet.services.executor.resources import available_memory, num_kv_blocks
from quartet.services.executor.settings import ExecutorSettings
from quartet.shared.log import get_logger
from quartet.shared.sampling_params import SamplingParams

GPU_NUM_BATCHED_TOKENS = 8192
# Capturing graphs ends past either: what is left runs padded to a larger size.
_MAX_CAPTURE_SECONDS = 60.0
_MAX_CAPTURE_BYTES = 2 << 30

# One step of each, so that every kernel of the sampler is compiled and loaded.
_WARM_UP = (
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(),
    SamplingParams(top_p=0.9, top_k=50, repetition_penalty=1.1),
)

BuildModel = Callable[[ModelConfig, LoadParameter], Model]

_log = get_logger()


def pick_device(settings: ExecutorSettings) -> torch.device:
    """Raises ModelError where the settings ask for a GPU and torch has none."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if settings.device == "cuda":
        build = "this torch was built without CUDA or ROCm" if not _is_gpu_build() else "torch finds no usable GPU"
        raise ModelError(f"device cuda: {build}; use device cpu (or auto)")
    return torch.device("cpu")


def is_interpreted() -> bool:
    """Whether Triton's kernels run without a GPU, slowly, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(settings: ExecutorSettings, config: ModelConfig, dtype: str, device: torch.device) -> str | None:
    """What keeps Triton's kernels from serving the model on `device`, None when nothing does."""
    if device.type != "cuda" and not is_interpreted():
        return "the Triton kernels need a GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from quartet.services.executor.triton.backend import why_not

    capability = None
    if device.type == "cuda" and torch.version.hip is None:
        properties = torch.cuda.get_device_properties(device)
        capability = 10 * properties.major + properties.minor
    return why_not(config, settings.block_size, DTYPES[dtype], _kv_dtype(settings, dtype), capability)


def load_gpu_runner(
    settings: ExecutorSettings,
    config: ModelConfig,
    max_model_len: int,
    device: torch.device,
    load: Callable[[BuildModel, str], Model],
) -> tuple[ModelRunner, InputBatch, str]:
    """(runner, its batch, the name of the dtype). `load` gives the built model, its weights in the named dtype on
    `device`. Raises ModelError or NotEnoughMemory."""
    if settings.quantization in ("int8", "int4"):
        raise ModelError(f"quantization {settings.quantization} is of a CPU's kernels: there is none on {device.type}")
    if settings.attention_backend == "native":
        raise ModelError("attention_backend native is of a CPU: on a GPU it is triton or torch_paged")
    dtype = pick_gpu_dtype(settings, config)
    reason = why_not_triton(settings, config, dtype, device)
    if settings.attention_backend == "torch_paged":
        reason = "attention_backend is torch_paged"
    elif reason is not None and (settings.attention_backend == "triton" or settings.kv_dtype == "fp8"):
        asked = "attention_backend triton" if settings.attention_backend == "triton" else "kv_dtype fp8"
        raise ModelError(f"{asked} is not possible: {reason}")
    _log.info("loading", dtype=dtype, device=_name(device))
    started = time.monotonic()
    build = _TritonBuild() if reason is None else _PlainBuild()
    if reason is not None:
        _log.warning("running in plain torch, which is slow on a GPU", reason=reason)
    model = load(build.model, dtype)
    _log.info("loaded", seconds=round(time.monotonic() - started, 2))

    kv_dtype = _kv_dtype(settings, dtype)
    num_tokens = settings.max_num_batched_tokens or GPU_NUM_BATCHED_TOKENS
    runners = _Runners(settings, build, model, config, kv_dtype, max_model_len, num_tokens, device)
    bytes_per_block = KVCache.bytes_per_block(config, settings.block_size, kv_dtype)
    is_sized = settings.num_blocks or settings.kv_cache_bytes
    available = 0 if is_sized else runners.measure_room(bytes_per_block)
    num_blocks = num_kv_blocks(settings, max_model_len, bytes_per_block, available, on_gpu=device.type == "cuda")
    runner, batch, engine = runners.make(num_blocks)
    _log.info("KV memory", num_blocks=num_blocks, mebibytes=round(num_blocks * bytes_per_block / 2**20))
    started = time.monotonic()
    runner.warm_up(_WARM_UP if device.type == "cuda" else WARM_UP)
    if settings.cuda_graphs:
        build.capture_graphs(engine, device)
    _log.info("warmed up", seconds=round(time.monotonic() - started, 2))
    return runner, batch, dtype


def pick_gpu_dtype(settings: ExecutorSettings, config: ModelConfig) -> str:
    """auto: as the model was saved; bfloat16 where the file does not say."""
    if settings.dtype != "auto":
        return settings.dtype
    return config.dtype if config.dtype in DTYPES else "bfloat16"


def _kv_dtype(settings: ExecutorSettings, dtype: str) -> torch.dtype:
    return torch.float8_e4m3fn if settings.kv_dtype == "fp8" else DTYPES[dtype]


class _PlainBuild:
    """The plain decoder, on any device."""

    model: BuildModel = Decoder
    cache: type[KVCache] = KVCache

    def engine(
        self, model: Model, config: ModelConfig, cache: KVCache, batch: InputBatch, device: torch.device
    ) -> Engine:
        return TorchEngine(model, cache, TorchPagedAttention(), batch, device)

    def profile(self, engine: Engine) -> None:
        """Beside warming up, the step that takes the most memory."""

    def capture_graphs(self, engine: Engine, device: torch.device) -> None:
        """Where the engine can be told to."""


class _TritonBuild(_PlainBuild):
    """Imported where it is asked for: an install without a GPU has no triton."""

    def __init__(self) -> None:
        from quartet.services.executor.triton.decoder import TritonDecoder
        from quartet.services.executor.triton.kv_cache import TritonKVCache

        self.model = TritonDecoder
        self.cache = TritonKVCache

    def engine(
        self, model: Model, config: ModelConfig, cache: KVCache, batch: InputBatch, device: torch.device
    ) -> Engine:
        from quartet.services.executor.triton.backend import TritonAttention
        from quartet.services.executor.triton.decoder import TritonDecoder
        from quartet.services.executor.triton.device_engine import DeviceEngine

        assert isinstance(model, TritonDecoder)
        attention = TritonAttention(config, cache.keys[0].dtype, batch.max_num_seqs, device)
        return DeviceEngine(model, cache, attention, batch, device)

    def profile(self, engine: Engine) -> None:
        from quartet.services.executor.triton.device_engine import DeviceEngine

        assert isinstance(engine, DeviceEngine)
        engine.profile()

    def capture_graphs(self, engine: Engine, device: torch.device) -> None:
        from quartet.services.executor.triton.decode_graphs import CudaGraph, EagerGraph
        from quartet.services.executor.triton.device_engine import DeviceEngine

        assert isinstance(engine, DeviceEngine)
        on_gpu = device.type == "cuda"
        engine.capture_graphs(
            max_seconds=_MAX_CAPTURE_SECONDS,
            max_bytes=_MAX_CAPTURE_BYTES,
            make_graph=CudaGraph if on_gpu else EagerGraph,
            memory_used=functools.partial(_used, device) if on_gpu else int,
        )


@dataclass(slots=True)
class _Runners:
    """Makes runners of one model with pools of some size."""

    settings: ExecutorSettings
    build: _PlainBuild
    model: Model
    config: ModelConfig
    kv_dtype: torch.dtype
    max_model_len: int
    num_tokens: int
    device: torch.device

    def make(self, num_blocks: int) -> tuple[ModelRunner, InputBatch, Engine]:
        settings = self.settings
        batch = InputBatch(
            max_num_seqs=settings.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.num_tokens,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            vocab_size=self.config.vocab_size,
        )
        cache = self.build.cache(self.config, num_blocks, settings.block_size, self.kv_dtype, self.device)
        engine = self.build.engine(self.model, self.config, cache, batch, self.device)
        return ModelRunner(engine, batch), batch, engine

    def measure_room(self, bytes_per_block: int) -> int:
        """Bytes that KV memory may take: what the GPU's fraction leaves beside weights and the largest step."""
        device = self.device
        if device.type != "cuda":
            return available_memory()
        # A pool that holds one step, so that it is a real one that is measured.
        num_blocks = -(-self.num_tokens // self.settings.block_size) + 1
        runner, _, engine = self.make(num_blocks)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner.warm_up(_WARM_UP)
        self.build.profile(engine)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - num_blocks * bytes_per_block
        del runner, engine
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        # Other processes' memory, and what the driver and libraries took.
        others = total - free - torch.cuda.memory_reserved(device)
        graphs = _MAX_CAPTURE_BYTES if self.settings.cuda_graphs else 0
        return int(self.settings.gpu_memory_fraction * total) - others - peak - graphs


def _used(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _is_gpu_build() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, interpreted"
