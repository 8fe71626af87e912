"""The shared library of kernels: where it is, what it asks of the CPU, its functions' types."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from quartet.shared.log import get_logger

_FOLDER = Path(__file__).parent
_log = get_logger()


class Isa(enum.IntFlag):
    """What a CPU has of what the kernels use."""

    AVX512_BF16 = 1
    VNNI = 2
    AMX = 4
    AVX2 = 8  # with FMA and F16C
    AVX_VNNI = 16

    def widest(self) -> Isa:
        """The one set of kernels that serves best, AVX-512's or AVX2's, with what these use; nothing without."""
        for kind, more in ((Isa.AVX512_BF16, Isa.VNNI | Isa.AMX), (Isa.AVX2, Isa.AVX_VNNI)):
            if self & kind:
                return self & (kind | more)
        return Isa(0)

    def describe(self) -> str:
        return "+".join(member.name or "" for member in self).lower() or "none"


class Format(enum.IntEnum):
    """How a weight matrix is held."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


# What a decoder's time is counted by, in the order of the library's.
PHASES = ("small", "products", "attention", "head")


class DecoderConfig(Structure):
    _fields_ = [
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("vocab_size", c_int32),
        ("block_size", c_int32),
        ("num_threads", c_int32),
        ("isa", c_int32),
        ("rms_norm_eps", c_float),
    ]


class Step(Structure):
    _fields_ = [
        ("num_tokens", c_int32),
        ("num_rows", c_int32),
        ("num_decodes", c_int32),
        ("table_width", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("kv_pools", POINTER(c_void_p)),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("hidden", c_void_p),
    ]


class SampleStep(Structure):
    _fields_ = [
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("stride", c_int64),
        ("logits", c_void_p),
        ("rows", c_void_p),
        ("output_indices", c_void_p),
        ("is_random", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seed", c_void_p),
        ("choice_index", c_void_p),
        ("token_ids", c_void_p),
        ("failed", c_void_p),
    ]


@cache
def load_library() -> ctypes.CDLL | None:
    """The library, or None where it was not built (no compiler, another kind of CPU), is of other sources than
    these or cannot be loaded."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        try:
            _declare(library)
        except AttributeError as error:
            _log.warning(
                "the compiled kernels are out of date and not used: run python setup.py build_ext --inplace",
                library=str(path),
                error=str(error),
            )
            continue
        return library
    return None


@cache
def detect_isa() -> Isa:
    """What the kernels may use here; nothing where there is no library."""
    library = load_library()
    return Isa(0) if library is None else Isa(library.quartet_isa())


def _candidates() -> Iterator[Path]:
    yield from sorted(_FOLDER.glob("_kernels*.so"))


def _declare(library: ctypes.CDLL) -> None:
    library.quartet_isa.argtypes = []
    functions: dict[str, tuple[list[object], object]] = {
        "quartet_decoder_new": ([POINTER(DecoderConfig)], c_void_p),
        "quartet_decoder_free": ([c_void_p], None),
        "quartet_decoder_set_matrix": ([c_void_p, *[c_int] * 6, c_void_p, c_void_p], c_int),
        "quartet_decoder_set_embedding": ([c_void_p, c_void_p], c_int),
        "quartet_decoder_set_vector": ([c_void_p, c_int, c_int, c_void_p, c_int], None),
        "quartet_decoder_set_window": ([c_void_p, c_int, c_int], None),
        "quartet_decoder_forward": ([c_void_p, POINTER(Step)], c_int),
        "quartet_decoder_logits": ([c_void_p, c_void_p, c_int, c_void_p], c_int),
        "quartet_sampler_of": ([c_int, c_int], c_void_p),
        "quartet_sampler_free": ([c_void_p], None),
        "quartet_sample": ([c_void_p, POINTER(SampleStep)], c_int),
        "quartet_advise_huge_pages": ([c_void_p, c_size_t], None),
        "quartet_populate": ([c_void_p, c_size_t], c_int),
        "quartet_decoder_times": ([c_void_p, POINTER(c_double)], None),
        "quartet_decoder_read_weights": ([c_void_p], c_size_t),
        "quartet_attend": ([*[c_int] * 8, *[c_void_p] * 3, c_int, *[c_void_p] * 6], c_int),
        "quartet_multiply": ([c_int, c_int, c_int, c_int, c_void_p, c_int, c_void_p, c_void_p], c_int),
    }
    for name, (arguments, result) in functions.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = result
