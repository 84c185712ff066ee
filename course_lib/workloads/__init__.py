"""What comes in: workloads made by rule, public traces, and the driver that replays them on any engine.

    requests = merge(chat(rate=5, count=200), rag(rate=1, count=40))
    requests = read_azure("AzureLLMInferenceTrace_conv.csv")
    trace = simulate(EngineConfig(...), requests, model="llama3-8b", chip="h100")
    trace = replay(engine, requests)

`simulate` runs on a simulated chip, `replay` on an engine of your own, simulated or real.
"""

from .generators import agents, chat, long_documents, mix, poisson_arrivals, rag, stall
from .public_traces import read_azure, read_mooncake
from .replay import replay, simulate
from .request import Piece, Request, at_rate, merge

__all__ = [
    "Piece",
    "Request",
    "agents",
    "at_rate",
    "chat",
    "long_documents",
    "merge",
    "mix",
    "poisson_arrivals",
    "rag",
    "read_azure",
    "read_mooncake",
    "replay",
    "simulate",
    "stall",
]
