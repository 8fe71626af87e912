"""Compiled kernels for CPUs with AVX2 or AVX-512 BF16; absent where they could not be built, and never needed."""
