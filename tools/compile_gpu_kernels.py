"""Compiles every Triton kernel of the executor for GPUs that need not be here, and says what each takes.

    python tools/compile_gpu_kernels.py                 all of them (minutes)
    python tools/compile_gpu_kernels.py --quick         a few of each
    python tools/compile_gpu_kernels.py --write-table   the table of docs/gpu.md, from those it names

Exit status 1 when a kernel does not compile, spills registers or takes more shared memory than a GPU has.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quartet.services.executor.triton.kernel_spec import KernelSpec

CAPABILITIES = (80, 90, 100)
# Bytes of shared memory that one program may have.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
TABLE = Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
# Bytes/s and dense bf16 operations/s, as their maker states them.
GPUS = {"H100 SXM": (3.35e12, 989e12), "H200": (4.8e12, 989e12)}
# Shares of those that the kernels are expected to reach, when bound by one or the other.
MEMORY_SHARE, MATRIX_SHARE = 0.85, 0.60


@dataclass(frozen=True)
class Usage:
    """registers  per thread
    stack       bytes per thread, where spilled registers go
    shared      bytes per program
    """

    registers: int
    stack: int
    shared: int


def problems(usage: Usage, capability: int) -> Iterator[str]:
    if usage.stack:
        yield f"spills {usage.stack} bytes"
    if usage.shared > SHARED_MEMORY[capability]:
        yield f"takes {usage.shared} bytes of shared memory, of {SHARED_MEMORY[capability]}"


def parse_usage(report: str, shared: int) -> Usage:
    """`report` is cuobjdump's; `shared` what the kernel asks for at its launch."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if found is None:
        raise ValueError(f"no resource usage in {report!r}")
    registers, stack, local = map(int, found.groups())
    return Usage(registers, stack + local, shared)


def compile_spec(name: str, capability: int) -> Usage:
    """Of the named spec; runs in processes that keep no state but the registry."""
    import triton

    spec = {spec.name: spec for spec in load_specs()}[name]
    kernel = spec.compile(capability)
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        result = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return parse_usage(result.stdout + result.stderr, kernel.metadata.shared)


def load_specs() -> list[KernelSpec]:
    from quartet.services.executor.triton.registry import kernel_specs

    return kernel_specs()


def compile_all(tasks: list[tuple[str, int]], jobs: int) -> tuple[dict[tuple[str, int], Usage], int]:
    """Prints a line for each (name, capability). Returns what they take and how many are no good."""
    usages: dict[tuple[str, int], Usage] = {}
    num_failed = 0
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(compile_spec, *task): task for task in tasks}
        for future in concurrent.futures.as_completed(futures):
            name, capability = futures[future]
            error = future.exception()
            if error is not None:
                wrong = [f"does not compile: {type(error).__name__}: {str(error)[:500]}"]
                text = ""
            else:
                usage = usages[name, capability] = future.result()
                wrong = list(problems(usage, capability))
                text = f"{usage.registers} registers, {usage.shared} bytes shared"
            num_failed += bool(wrong)
            print(f"{'FAIL' if wrong else 'ok'}\tsm_{capability}\t{name}\t{text}\t{'; '.join(wrong)}", flush=True)
    return usages, num_failed


def table(specs: list[KernelSpec], usages: dict[tuple[str, int], Usage]) -> str:
    head = ["kernel (sm_90)", "registers", "shared", "shape", "GB", "Gop", "bound by"]
    head += [f"{gpu}: {kind}, µs" for gpu in GPUS for kind in ("least", "expected")]
    lines = ["| " + " | ".join(head) + " |", "|---|--:|--:|---|--:|--:|---|" + "--:|" * (2 * len(GPUS))]
    told = set()
    for spec in specs:
        usage = usages[spec.name, 90]
        for work in spec.work:
            # Of dtypes of the same size one is enough; what moves next to nothing has no bound to tell.
            key = (spec.fn.__name__, str(spec.constexprs), work)
            if key in told or not work.num_bytes:
                continue
            told.add(key)
            cells = [spec.name, str(usage.registers), f"{usage.shared / 1024:.0f} KiB", work.shape]
            cells += [f"{work.num_bytes / 1e9:.4g}", f"{work.operations / 1e9:.4g}"]
            memory_bound = None
            times = []
            for bandwidth, peak in GPUS.values():
                reading, computing = work.num_bytes / bandwidth, work.operations / peak
                memory_bound = reading / MEMORY_SHARE >= computing / MATRIX_SHARE
                times.append(f"{1e6 * max(reading, computing):.3g}")
                times.append(f"{1e6 * max(reading / MEMORY_SHARE, computing / MATRIX_SHARE):.3g}")
            lines.append("| " + " | ".join([*cells, "memory" if memory_bound else "matrix units", *times]) + " |")
    return "\n".join(lines)


def write_table(text: str) -> None:
    before, rest = TABLE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    TABLE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few of each kernel")
    parser.add_argument("--match", default="", help="only kernels whose name has this regular expression")
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES, help="may be repeated")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--write-table", action="store_true")
    arguments = parser.parse_args()
    specs = [spec for spec in load_specs() if re.search(arguments.match, spec.name)]
    if arguments.write_table:
        specs = [spec for spec in specs if spec.work]
        tasks = [(spec.name, 90) for spec in specs]
    else:
        capabilities = arguments.capability or CAPABILITIES
        tasks = [
            (spec.name, capability)
            for spec in specs
            if spec.quick or not arguments.quick
            for capability in capabilities
            if capability in spec.capabilities
        ]
    usages, num_failed = compile_all(tasks, arguments.jobs)
    print(f"{len(tasks) - num_failed} of {len(tasks)} compiled for good")
    if arguments.write_table and not num_failed:
        write_table(table(specs, usages))
    return 1 if num_failed or not tasks else 0


if __name__ == "__main__":
    sys.exit(main())
