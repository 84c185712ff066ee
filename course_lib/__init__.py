"""A small LLM serving engine to learn from: paged KV cache, continuous batching, chunked prefill.

    from course_lib import Engine, EngineConfig, SamplingParams
    from course_lib.runners import FakeRunner

    engine = Engine(FakeRunner(), EngineConfig(max_prefill_chunk_size=64))

Importing this package needs the standard library alone; torch is loaded with the first model.
"""

import os

# Idle threads of torch's pool (GNU OpenMP) spin for milliseconds by default. Where anything else runs on the
# machine (a browser is enough), they take the cores from one another: a step of 256 tokens took 3.2 s beside one
# busy process, 1.7 s with the short spin set here; on an idle machine it is as fast. Must be set before torch
# is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from .config import EngineConfig, SamplingParams  # noqa: E402
from .engine import Engine, RequestOutput  # noqa: E402
from .sequence import SequenceStatus  # noqa: E402
from .trace import Trace  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineConfig",
    "ModelRunner",
    "RequestOutput",
    "SamplingParams",
    "SequenceStatus",
    "Trace",
    "load_model",
]


def __getattr__(name: str):
    """`load_model` and `ModelRunner` bring torch along: they are imported when first asked for."""
    if name == "load_model":
        from .model import load_model

        return load_model
    if name == "ModelRunner":
        from .runners.model import ModelRunner

        return ModelRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
