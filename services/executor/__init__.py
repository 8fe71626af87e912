"""Owns weights, KV memory, kernels and sampling; knows nothing of users, text or policy."""
