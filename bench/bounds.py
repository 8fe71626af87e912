"""What this machine could do at best: the bounds that measured figures are held against.

`python -m bench.bounds` prints operations a second by precision and instruction set, and bytes a second read from
memory, all cores together. They are the rates of the instructions themselves (see rates.c), compiled here, so they
need a C compiler; what no product can exceed, and few come near.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.line import HEAD_PARAMETERS, LAYER_PARAMETERS, Precision

SOURCE = Path(__file__).with_name("rates.c")
# Function of rates.c: the flag of /proc/cpuinfo that it needs.
NEEDS = {
    "read_memory": "avx2",
    "fp32_avx2": "fma",
    "int8_avx2": "avx2",
    "int8_avxvnni": "avx_vnni",
    "fp32_avx512": "avx512f",
    "bf16_avx512": "avx512_bf16",
    "int8_avx512": "avx512_vnni",
    "bf16_amx": "amx_bf16",
    "int8_amx": "amx_int8",
}
# What the executor's isa leaves, by the ends of functions' names.
USABLE = {"avx2": ("_avx2", "_avxvnni"), "avx512": ("_avx2", "_avxvnni", "_avx512")}
SECONDS = 0.2
ROUNDS = 8


def measure() -> dict[str, float]:
    """The best of some rounds of each function that this CPU can run; empty where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if compiler is None or "avx2" not in flags:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rates.so")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
        library = ctypes.CDLL(str(path))
    threads = len(os.sched_getaffinity(0))
    return {name: _together(getattr(library, name), threads) for name, flag in NEEDS.items() if flag in flags}


def allowed(rates: Mapping[str, float], precision: Precision, isa: str) -> dict[str, float]:
    """The bounds of the loads, by the rates of `measure`; nothing where they are not known. `isa` as the executor's.

    One stream reads all weights for each token. 32 streams of 128 in and 128 out multiply with them 256 times for 128
    tokens out (the head only for the 128), and read them for each 32 tokens out. The first token of 128 in has
    multiplied with them 128 times.
    """
    usable = [
        rate
        for name, rate in rates.items()
        if name.split("_")[0] in precision.multiplied_as and name.endswith(USABLE.get(isa, ("",)))
    ]
    if not usable:
        return {}
    read, rate = rates["read_memory"], max(usable)
    one_stream = read / precision.weight_bytes
    per_output = 2 * (2 * LAYER_PARAMETERS + HEAD_PARAMETERS)
    per_prompt = 2 * (128 * LAYER_PARAMETERS + HEAD_PARAMETERS)
    return {
        "read_gigabytes_per_second": round(read / 1e9, 1),
        "gigaops_per_second": round(rate / 1e9, 1),
        "one_stream_tokens_per_second": round(one_stream, 1),
        "streams_32_tokens_per_second": round(min(rate / per_output, 32 * one_stream), 1),
        "time_to_first_token_128": round(max(per_prompt / rate, 1 / one_stream), 4),
    }


def _together(function: Callable[[ctypes.c_double], float], threads: int) -> float:
    function.restype = ctypes.c_double  # type: ignore[attr-defined]
    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(function, [ctypes.c_double(SECONDS)] * threads)) for _ in range(ROUNDS))


if __name__ == "__main__":
    print(json.dumps(measure()))
