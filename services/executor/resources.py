"""What this process may use of the machine: CPUs and memory, as affinity and cgroups (v1, v2) limit them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from quartet.services.executor.settings import ExecutorSettings

ROOT = Path("/")
# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 2**60


class NotEnoughMemory(ValueError):
    """The KV pool cannot hold one sequence; the message names the settings that help."""


def num_cpus(affinity: int, root: Path = ROOT) -> int:
    """Threads worth running: `affinity` (the CPUs this process may run on), less when a quota gives less."""
    quotas = [quota for folder in _cgroups("cpu", root) if (quota := _cpu_quota(folder)) is not None]
    return max(1, min(affinity, *map(math.floor, quotas)) if quotas else affinity)


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can still be allocated before the machine swaps or a cgroup's limit is met."""
    limits = [room for folder in _cgroups("memory", root) if (room := _memory_room(folder)) is not None]
    meminfo = dict(line.split(":") for line in _read(root / "proc/meminfo").splitlines())
    if kibibytes := meminfo.get("MemAvailable"):
        limits.append(int(kibibytes.split()[0]) * 1024)
    if not limits:
        raise NotEnoughMemory("cannot tell how much memory is available: set num_blocks or kv_cache_bytes")
    return max(0, min(limits))


def has_native_bfloat16(root: Path = ROOT) -> bool:
    """Whether the CPU multiplies bfloat16 itself; emulated it is slower than float32."""
    cpuinfo = _read(root / "proc/cpuinfo").split()
    return not {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}.isdisjoint(cpuinfo)


def num_kv_blocks(
    settings: ExecutorSettings, max_model_len: int, bytes_per_block: int, available: int, *, on_gpu: bool = False
) -> int:
    """Blocks of the KV pool; `available` bytes are left now that the weights are loaded; on a GPU, by its
    memory fraction.

    Raises NotEnoughMemory when one sequence of `max_model_len` would not fit.
    """
    blocks_per_seq = -(-max_model_len // settings.block_size)
    if settings.num_blocks:
        num_blocks, source = settings.num_blocks, f"num_blocks {settings.num_blocks}"
    elif settings.kv_cache_bytes:
        num_blocks = settings.kv_cache_bytes // bytes_per_block
        source = f"kv_cache_bytes {settings.kv_cache_bytes}"
    else:
        share = available if on_gpu else int(settings.kv_memory_fraction * available)
        num_blocks = max(0, min(share // bytes_per_block, settings.max_num_seqs * blocks_per_seq))
        source = f"kv_memory_fraction {settings.kv_memory_fraction:g} of {available / 2**20:.0f} MiB available"
        if on_gpu:
            source = f"gpu_memory_fraction {settings.gpu_memory_fraction:g}, which leaves {share / 2**20:.0f} MiB,"
    if num_blocks < blocks_per_seq:
        raise NotEnoughMemory(
            f"max_model_len {max_model_len} needs {blocks_per_seq} KV blocks "
            f"({blocks_per_seq * bytes_per_block / 2**20:.0f} MiB) and {source} gives {num_blocks}: "
            f"lower max_model_len (to {num_blocks * settings.block_size} at most), or raise num_blocks, "
            f"kv_cache_bytes or {'gpu' if on_gpu else 'kv'}_memory_fraction"
        )
    return num_blocks


# --- cgroups --------------------------------------------------------------------------------------


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """The folders, from this process's own up to the top, whose files may limit `controller`."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            yield from _upwards(mount, path)
        elif controller in controllers.split(","):
            # Either name may be the folder and the other a link that a container lacks.
            for name in dict.fromkeys((controllers, controller)):
                yield from _upwards(mount / name, path)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the host's: then only the mount itself is there.
    folder = mount / path.strip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _cpu_quota(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if float(quota) > 0:
            return float(quota) / float(period)
    return None


def _memory_room(folder: Path) -> int | None:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        if limit.isdigit() and usage.isdigit() and int(limit) < _NO_LIMIT:
            # File pages that nobody maps are dropped before the limit hurts.
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            return int(limit) - int(usage) + int(stat.get(cache_name, "0"))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
