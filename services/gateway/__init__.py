"""Owns client connections, streams and limits; knows nothing of tokens' meaning, KV or models."""
