"""Model files: formats, checks, loading."""

from quartet.services.executor.weights.loader import DTYPES, load_config, load_decoder, load_with

__all__ = ["DTYPES", "load_config", "load_decoder", "load_with"]
