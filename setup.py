"""Builds the executor's kernels where a compiler for x86-64 Linux is at hand; all else is in pyproject.toml."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("services/executor/native/src")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wno-maybe-uninitialized"]
# Only files with these names use more than any x86-64 CPU has; nothing in them runs before the CPU was asked.
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni"]
AVX512_FLAGS += ["-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mfma", "-mf16c", "-mbmi2"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]


class BuildKernels(build_ext):
    """Compiles each file with the flags that its name asks for (twice where it is for both instruction sets), into a
    library that ctypes loads."""

    def build_extension(self, ext: Extension) -> None:
        objects: list[str] = []
        for source in ext.sources:
            for kind, flags in kinds(source).items():
                folder = str(Path(self.build_temp, kind))
                objects += self.compiler.compile([source], output_dir=folder, extra_postargs=FLAGS + flags)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # The C++ library goes in, so that any machine with the same C library can load it.
        static = ["-static-libgcc", "-static-libstdc++", "-pthread"]
        self.compiler.link_shared_object(objects, str(target), extra_postargs=static, target_lang="c++")


def kinds(source: str) -> dict[str, list[str]]:
    """The flags by instruction set."""
    wide = {"avx512": AVX512_FLAGS, "avx2": AVX2_FLAGS}
    ending = Path(source).stem.rsplit("_", 1)[-1]
    return wide if ending == "simd" else {ending: wide[ending]} if ending in wide else {"any": []}


def kernels() -> list[Extension]:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return []
    sources = sorted(str(path) for path in FOLDER.glob("*.cpp"))
    return [
        Extension(
            "quartet.services.executor.native._kernels",
            sources,
            depends=sorted(str(path) for path in FOLDER.glob("*.h")),
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels})
