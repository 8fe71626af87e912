from pathlib import Path

import pytest

from quartet.services.executor.resources import (
    NotEnoughMemory,
    available_memory,
    has_native_bfloat16,
    num_cpus,
    num_kv_blocks,
)
from quartet.services.executor.settings import ExecutorSettings

GIB = 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, content in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 16777216 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


V2 = {"proc/self/cgroup": "0::/user/app\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n"}


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        (V2 | {"sys/fs/cgroup/user/app/cpu.max": "max 100000"}, 8),
        (V2 | {"sys/fs/cgroup/user/app/cpu.max": "250000 100000"}, 2),
        (V2 | {"sys/fs/cgroup/user/app/cpu.max": "50000 100000"}, 1),
        # A parent's quota binds its children.
        (V2 | {"sys/fs/cgroup/user/app/cpu.max": "max 100000", "sys/fs/cgroup/user/cpu.max": "300000 100000"}, 3),
        # Inside a container the path is the host's, the files lie at the mount.
        (V2 | {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        (V2 | {"sys/fs/cgroup/cpu.max": "4000000 100000"}, 8),
        (V1 | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        (
            V1
            | {
                "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (V2 | {"sys/fs/cgroup/cpu.max": "nonsense"}, 8),
    ],
)
def test_cpus_are_bounded_by_affinity_and_quota(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    assert num_cpus(8, machine(tmp_path, files)) == cpus


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 16 * GIB),
        (V2 | {"sys/fs/cgroup/user/app/memory.max": "max", "sys/fs/cgroup/user/app/memory.current": "5"}, 16 * GIB),
        (
            V2
            | {
                "sys/fs/cgroup/user/app/memory.max": str(4 * GIB),
                "sys/fs/cgroup/user/app/memory.current": str(3 * GIB),
                "sys/fs/cgroup/user/app/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            V2 | {"sys/fs/cgroup/memory.max": str(64 * GIB), "sys/fs/cgroup/memory.current": "0"},
            16 * GIB,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}",
            },
            GIB + GIB // 2,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            },
            16 * GIB,
        ),
        (V2 | {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "2000"}, 0),
    ],
)
def test_memory_is_bounded_by_the_machine_and_the_cgroup(tmp_path: Path, files: dict[str, str], available: int) -> None:
    assert available_memory(machine(tmp_path, files)) == available


def test_a_machine_that_tells_nothing_asks_for_a_setting(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match="set num_blocks or kv_cache_bytes"):
        available_memory(tmp_path)
    assert num_cpus(3, tmp_path) == 3


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [("flags : fpu avx512f avx512_bf16", True), ("flags\t: fpu avx2", False), ("Features : fp asimd bf16", True)],
)
def test_native_bfloat16(tmp_path: Path, cpuinfo: str, native: bool) -> None:
    assert has_native_bfloat16(machine(tmp_path, {"proc/cpuinfo": cpuinfo})) is native


def test_the_pool_takes_its_share_of_what_is_left() -> None:
    settings = ExecutorSettings(kv_memory_fraction=0.5, max_num_seqs=100)
    assert num_kv_blocks(settings, 1600, 1000, 1_000_000) == 500


def test_the_pool_is_no_larger_than_all_rows_need() -> None:
    assert num_kv_blocks(ExecutorSettings(max_num_seqs=2), 33, 1000, 10**12) == 6


def test_explicit_sizes_win() -> None:
    assert num_kv_blocks(ExecutorSettings(num_blocks=7), 112, 1000, 0) == 7
    assert num_kv_blocks(ExecutorSettings(kv_cache_bytes=8500), 112, 1000, 0) == 8


@pytest.mark.parametrize(
    "settings",
    [
        ExecutorSettings(num_blocks=7),
        ExecutorSettings(kv_cache_bytes=7000),
        ExecutorSettings(kv_memory_fraction=0.5),
    ],
)
def test_a_pool_below_one_sequence_is_refused(settings: ExecutorSettings) -> None:
    with pytest.raises(NotEnoughMemory, match=r"max_model_len 113 needs 8 KV blocks.*lower max_model_len \(to 112"):
        num_kv_blocks(settings, 113, 1000, 14_100)
