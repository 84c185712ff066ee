"""The arena's workloads: what every policy has to serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from ..capacity import Targets
from ..config import EngineConfig
from ..workloads import Request, agents, chat, merge, rag

MODEL, CHIP = "llama3-8b", "a100"


@dataclass(frozen=True)
class Round:
    """One workload of the arena, and the engine that serves it."""

    name: str
    what: str
    requests: tuple[Request, ...]
    config: EngineConfig
    targets: Targets


def _later(requests: list[Request], seconds: float) -> list[Request]:
    return [replace(request, arrival_time=request.arrival_time + seconds) for request in requests]


@cache
def rounds() -> tuple[Round, ...]:
    """The four workloads. All are made by rule and seed, so everybody's policy meets the same traffic."""
    rush = merge(
        chat(35, 350, 1, output_tokens=(8, 32)),
        _later(chat(2, 4, 2, prompt_tokens=(6000, 9000), output_tokens=(16, 64), name="doc"), 1.0),
    )
    bursts = merge(
        chat(4, 40, 5, output_tokens=(16, 128)),
        *(_later(rag(60, 16, 10 + i, documents=40, output_tokens=(16, 64), name=f"burst{i}-"), 1 + 2.5 * i) for i in range(4)),
    )
    teams = merge(*(
        _later(
            agents(8, 8, 20 + i, turns=3, pause=1.2, system_tokens=2048, turn_tokens=(128, 1024), output_tokens=(16, 96), name=f"agent{i}-"),
            1.5 * i,
        )
        for i in range(4)
    ))  # fmt: skip
    # Quartiles and tail as in Azure's public conversation trace (half of the prompts up to 1,020 tokens, a tenth above
    # 2,700; half of the answers up to 129 tokens, the rest up to 424), at twice its rate.
    shape = (
        (0.25, (180, 400), (41, 129)),
        (0.25, (400, 1020), (41, 129)),
        (0.25, (1020, 1190), (129, 424)),
        (0.15, (1190, 2730), (129, 424)),
        (0.10, (2730, 4150), (41, 424)),
    )
    public = merge(*(
        chat(11 * share, round(140 * share), 30 + i, prompt_tokens=prompts, output_tokens=outputs, name=f"size{i}-")
        for i, (share, prompts, outputs) in enumerate(shape)
    ))  # fmt: skip
    targets = Targets(ttft=0.5, itl=0.1)
    config = EngineConfig(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512, max_prefill_chunk_size=512)
    small, alone = replace(config, num_blocks=1536), replace(config, enable_prefix_caching=False)  # alone: nothing is shared
    return (
        Round("rush", "350 short chats in ten seconds, and four long documents among them", tuple(rush), alone, targets),
        Round("bursts", "chats, and now and then sixteen questions about documents at once", tuple(bursts), config, targets),
        Round("agents", "agents with common instructions and growing prompts, in a small pool", tuple(teams), small, targets),
        Round("public", "prompt and answer lengths as in a public trace, twice as busy", tuple(public), alone, targets),
    )
