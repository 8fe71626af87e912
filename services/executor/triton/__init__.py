"""Kernels in Triton and what launches them. Imported only where the model runs on a GPU (or in the
interpreter), so that a CPU-only install needs no triton."""
