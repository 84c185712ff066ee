"""The policy arena: your policy against the built-in ones, on fixed traffic, in virtual time.

    class Mine(Policy):
        name = "mine"

        def order(self, prefilling, waiting, step):
            return sorted([*prefilling, *waiting], key=lambda s: s.remaining_token_count)

    result = arena(Mine())     # in a notebook: the table; also print(result)
    result.bars()              # where it won and lost
    result.worst("rush")       # the request that it served worst, beside the best of the others
    leaderboard()              # what you tried so far

A round is a workload on a simulated chip. Its points are the percentage of requests that met both latency targets
(TTFT and ITL, as in `capacity.goodput`). A round in which somebody starved counts half: goodput alone rewards giving
up those who can't meet the target anyway.

A policy may look at what a real scheduler knows, and return the sequences in another order. It can't see how
long an answer will be, nor who is who: request ids are numbers here. One that raises, loops, invents or repeats
sequences, changes them, or asks for more than a step's budget gets no points, and is told why.
"""

from .board import leaderboard
from .play import arena
from .result import Result
from .rounds import Round, rounds
from .score import Score, built_in_scores, score

__all__ = ["Result", "Round", "Score", "arena", "built_in_scores", "leaderboard", "rounds", "score"]
