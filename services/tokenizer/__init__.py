"""Owns chat templates, encoding, incremental decoding and stop strings; knows nothing of scheduling."""
