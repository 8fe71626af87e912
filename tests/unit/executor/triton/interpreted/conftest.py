from support import triton_interpreter  # noqa: F401
