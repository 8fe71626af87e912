"""The executor's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from quartet.shared.address import DEFAULT_EXECUTOR_METRICS, check_metrics_address
from quartet.shared.config import CommonSettings
from quartet.shared.transport import ipc_address


class ExecutorSettings(CommonSettings, frozen=True, kw_only=True):
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="where the model runs; auto: on a GPU where torch has one")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="of weights and KV memory; auto: the model's, but 16 bits are float32 on a CPU that has "
            "neither bfloat16 nor compiled kernels"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "auto", "int8", "int4"],
        Meta(
            description="of the weights, on compiled kernels: int8, int4 (4 bits as GGUF's Q4_1, the head in 8); "
            "auto: int4 when the model's file is Q4_1"
        ),
    ] = "none"
    attention_backend: Annotated[
        Literal["auto", "triton", "native", "torch_paged"],
        Meta(
            description="triton: kernels of a GPU; native: compiled kernels of a CPU; torch_paged: all in plain torch; "
            "auto: the first of these that device, model and dtype allow"
        ),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp8"], Meta(description="of KV memory; auto: as dtype; fp8: float8_e4m3fn, on triton kernels")
    ] = "auto"
    isa: Annotated[
        Literal["auto", "avx2", "avx512", "amx"],
        Meta(
            description="instructions of the compiled kernels; auto: the best that the CPU has; avx2, avx512: as on "
            "a CPU without more; amx: with AMX; refused where the CPU lacks it"
        ),
    ] = "auto"
    max_model_len: Annotated[int, Meta(description="most tokens of prompt and output; 0: as the model says", ge=0)] = 0
    max_num_seqs: Annotated[int, Meta(description="most sequences that run at a time", ge=1, le=4096)] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(description="most tokens computed in one step; 0: 256 on a CPU, 8192 on a GPU", ge=0)
    ] = 0
    block_size: Annotated[int, Meta(description="tokens in a KV block", ge=1, le=1024)] = 16
    num_blocks: Annotated[int, Meta(description="KV blocks; 0: as many as memory allows", ge=0)] = 0
    kv_cache_bytes: Annotated[int, Meta(description="bytes of KV memory; 0: by kv_memory_fraction", ge=0)] = 0
    kv_memory_fraction: Annotated[
        float, Meta(description="share of the memory left after loading that KV memory may take", gt=0, le=1)
    ] = 0.25
    kv_prefault_bytes: Annotated[
        int,
        Meta(
            description="bytes of KV memory beyond what was used that the compiled kernels take from the system while "
            "nothing runs, so that no step waits for its pages; 0: none",
            ge=0,
        ),
    ] = 1 << 30
    gpu_memory_fraction: Annotated[
        float, Meta(description="share of a GPU's memory for weights, activations and KV memory together", gt=0, le=1)
    ] = 0.9
    cuda_graphs: Annotated[
        bool, Meta(description="on a GPU, launch steps of decodes alone as graphs, captured at the start")
    ] = True
    num_threads: Annotated[int, Meta(description="CPU threads; 0: as quota and affinity allow", ge=0)] = 0
    drain_timeout: Annotated[
        float, Meta(description="seconds that a scheduler that is draining too is served after SIGTERM", ge=0)
    ] = 30.0
    scheduler_link: Annotated[
        str, Meta(description="address of the scheduler to dial; empty: the socket in run_dir")
    ] = ""
    metrics_address: Annotated[
        str,
        Meta(description="host:port where Prometheus scrapes; the next free one of ten ports; empty: nowhere"),
    ] = DEFAULT_EXECUTOR_METRICS

    def __post_init__(self) -> None:
        check_metrics_address(self.metrics_address)
        if self.num_blocks and self.kv_cache_bytes:
            raise ValueError("num_blocks and kv_cache_bytes both size the KV pool: give one of them")
        if self.quantization in ("int8", "int4") and self.dtype in ("float32", "float16"):
            raise ValueError(f"quantization {self.quantization} computes in bfloat16, not {self.dtype}")
        if self.quantization in ("int8", "int4") and self.device == "cuda":
            raise ValueError(f"quantization {self.quantization} is of a CPU's kernels: there is none on device cuda")
        if self.attention_backend == "native" and self.device == "cuda":
            raise ValueError("attention_backend native is of a CPU: on device cuda it is triton or torch_paged")
        if self.kv_dtype == "fp8" and self.attention_backend in ("native", "torch_paged"):
            raise ValueError(f"kv_dtype fp8 needs attention_backend triton, not {self.attention_backend}")

    @property
    def scheduler_address(self) -> str:
        return self.scheduler_link or ipc_address(self.run_dir, "scheduler-executor")
