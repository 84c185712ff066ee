"""What computes a step: the protocol, and the runners that need no torch.

`ModelRunner` (a real model) lives in `course_lib.runners.model`, which imports torch.
"""

from ..batch import Sample
from .base import Runner, Tokenizer
from .fake import FakeRunner
from .simulated import SimulatedRunner

__all__ = ["FakeRunner", "Runner", "Sample", "SimulatedRunner", "Tokenizer"]
