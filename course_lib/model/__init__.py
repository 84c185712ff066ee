"""The torch side of the engine: loading a model, its KV cache, attention, sampling.

Importing this package is cheap: torch and transformers are loaded when a model is.
"""

from .byte_tokenizer import ByteTokenizer
from .loading import LoadedModel, load_model

__all__ = ["ByteTokenizer", "LoadedModel", "load_model"]
