"""Model files: formats, checks, loading."""

from quartet.services.executor.dtypes import DTYPES
from quartet.services.executor.weights.loader import is_q4_1, load_config, load_decoder, load_with

__all__ = ["DTYPES", "is_q4_1", "load_config", "load_decoder", "load_with"]
