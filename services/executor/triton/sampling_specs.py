"""The sampling kernels in every configuration that the executor launches."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.services.executor.triton import sampling
from quartet.services.executor.triton.kernel_spec import KernelSpec, Work

# A Llama's vocabulary.
_ROWS, _VOCAB = 64, 128_256
_ROW = 4 * _VOCAB
_SHAPE = f"{_ROWS} rows, vocabulary {_VOCAB}"

_LOGITS = {"logits": "*fp32", "stride": "i32", "rows": "*i64"}
_STATE = {"params": "*fp32", "counters": "*i64"}
_POINTERS = ("logits", "params", "counters", "tallies", "biases", "best", "token_ids", "last_tokens", "candidates")


def kernel_specs() -> Iterator[KernelSpec]:
    # A product's rows are as wide as the vocabulary, which may be odd.
    for aligned in (True, False):
        yield from _specs(aligned)


def _specs(aligned: bool) -> Iterator[KernelSpec]:
    suffix = "" if aligned else ",odd vocabulary"

    def spec(
        name: str,
        fn: object,
        signature: dict[str, str],
        constexprs: dict[str, object],
        num_warps: int,
        passes: float,
    ) -> KernelSpec:
        signature = {**_LOGITS, **signature, "vocab_size": "i32"}
        divisible = tuple(n for n in signature if n in _POINTERS or (aligned and n in ("stride", "vocab_size")))
        return KernelSpec(
            name=f"{name}{suffix}",
            fn=fn,
            signature=signature,
            constexprs=constexprs,
            num_warps=num_warps,
            divisible_by_16=divisible,
            quick=aligned,
            work=(Work(_SHAPE, passes * _ROW * _ROWS, 0),) if aligned else (),
        )

    yield spec(
        "adjust_logits",
        sampling.adjust_kernel,
        {"output_indices": "*i64", **_STATE, "tallies": "*i32", "biases": "*fp32"},
        {"TILE": sampling.ADJUST_TILE},
        sampling.ADJUST_WARPS,
        4,
    )
    yield KernelSpec(
        name=f"row_max{suffix}",
        fn=sampling.row_max_kernel,
        signature={"logits": "*fp32", "stride": "i32", "best": "*fp32", "token_ids": "*i32", "vocab_size": "i32"},
        constexprs={"TILE": sampling.ROW_TILE},
        num_warps=sampling.NUM_WARPS,
        divisible_by_16=("logits", "best", "token_ids", *(("stride", "vocab_size") if aligned else ())),
        quick=aligned,
        work=(Work(_SHAPE, _ROW * _ROWS, 0),) if aligned else (),
    )
    found = {"best": "*fp32", **_STATE, "candidates": "*fp32", "num_candidates": "*i32", "edges": "*fp32"}
    sizes = {"MAX_CANDIDATES": sampling.MAX_CANDIDATES}
    yield spec(
        "candidates",
        sampling.candidates_kernel,
        {**found, "masses": "*fp32"},
        {"TILE": sampling.EDGE_TILE, **sizes},
        sampling.NUM_WARPS,
        2,
    )
    yield spec(
        "limits",
        sampling.limits_kernel,
        {**found, "masses": "*fp32", "limits": "*fp32"},
        {"TILE": sampling.LIMITS_TILE, **sizes},
        sampling.LIMITS_WARPS,
        0,
    )
    for is_random, is_truncated in ((False, False), (True, False), (True, True)):
        yield spec(
            f"draw[{'truncated' if is_truncated else 'random' if is_random else 'greedy'}]",
            sampling.draw_kernel,
            {
                "output_indices": "*i64",
                "best": "*fp32",
                "token_ids": "*i32",
                **_STATE,
                "limits": "*fp32",
                "last_tokens": "*i64",
                "tallies": "*i32",
            },
            {"TILE": sampling.ROW_TILE, "IS_RANDOM": is_random, "IS_TRUNCATED": is_truncated},
            sampling.NUM_WARPS,
            1 if is_random else 0,
        )
