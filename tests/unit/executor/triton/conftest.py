"""Triton decides at its import whether kernels are interpreted, for the whole process. So what needs its
interpreter is in `interpreted/`, which is collected only where test_interpreted.py has set that up."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["interpreted"]
