"""Workloads made by rule and seed: the same call gives the same requests, in every Python.

The sizes are parameters; their defaults are choices that show an effect, not measurements of anyone's traffic.
A range (low, high) is drawn from uniformly, both ends included. Rates are requests a second, arrivals Poisson.
"""

from __future__ import annotations

import math
import random
from bisect import bisect

from ..validation import check_int, check_number
from .request import Piece, Request, merge

Range = tuple[int, int]

_SYSTEM, _DOCUMENTS = 0, 1  # content numbers: the agents' instructions, the first document


def poisson_arrivals(rate: float, count: int, seed: int = 0, start: float = 0.0) -> list[float]:
    """`count` moments of a Poisson process from `start` on: independent exponential gaps of mean 1 / rate."""
    check_number("rate", rate, "above 0 requests a second", lambda x: x > 0)
    check_int("count", count, 1)
    check_number("start", start, "at least 0", lambda x: x >= 0)
    rng, times = random.Random(seed), []
    for _ in range(count):
        start += -math.log(1.0 - rng.random()) / rate
        times.append(start)
    return times


def stall(
    running: int = 128,
    prompt_tokens: int = 8192,
    *,
    arrival: float,
    context: int = 128,
    output_tokens: int = 64,
    long_output_tokens: int = 16,
) -> list[Request]:
    """The course's case: `running` answers are streaming when one long prompt, "long", arrives at `arrival` seconds.

    The others come at time 0, with a prompt of `context` tokens and `output_tokens` to generate.
    (The default size is that of the text the course is built on: 128 running, a prompt of 8,192.)
    """
    check_int("running", running, 0)
    chats = [Request(f"chat{i}", 0.0, (Piece(1 + i, context),), output_tokens) for i in range(running)]
    return [*chats, Request("long", arrival, (Piece(0, prompt_tokens),), long_output_tokens)]


def chat(
    rate: float,
    count: int,
    seed: int = 0,
    *,
    prompt_tokens: Range = (32, 512),
    output_tokens: Range = (16, 256),
    name: str = "chat",
) -> list[Request]:
    """Short questions, nothing shared."""
    draw = _Draw(seed)
    return [
        Request(f"{name}{i}", time, (draw.own(prompt_tokens),), draw.int(output_tokens))
        for i, time in enumerate(poisson_arrivals(rate, count, seed))
    ]


def rag(
    rate: float,
    count: int,
    seed: int = 0,
    *,
    documents: int = 20,
    document_tokens: int = 2048,
    question_tokens: Range = (16, 64),
    output_tokens: Range = (32, 128),
    name: str = "rag",
) -> list[Request]:
    """Retrieval: one of `documents` texts, then a question about it. Equal documents share their prefix.

    Some are asked for more often than others: document k with a weight of 1 / (k + 1), as Zipf's law has it.
    """
    check_int("documents", documents, 1)
    draw, weights = _Draw(seed), [1 / (k + 1) for k in range(documents)]
    return [
        Request(
            f"{name}{i}", time,
            (Piece(_DOCUMENTS + draw.weighted(weights), document_tokens), draw.own(question_tokens)),
            draw.int(output_tokens),
        )
        for i, time in enumerate(poisson_arrivals(rate, count, seed))
    ]  # fmt: skip


def agents(
    rate: float,
    count: int,
    seed: int = 0,
    *,
    turns: int = 5,
    system_tokens: int = 1024,
    turn_tokens: Range = (128, 512),
    output_tokens: Range = (16, 128),
    pause: float = 2.0,
    name: str = "agent",
) -> list[Request]:
    """`count` agents, each asking `turns` times: instructions shared by all, then everything of its turns before.

    `rate`: agents a second. The next turn comes `pause` seconds after the one before (whether or not that is
    answered: a replay has fixed times). What the model said is part of the turn that follows.
    """
    check_int("turns", turns, 1)
    check_number("pause", pause, "at least 0 seconds", lambda x: x >= 0)
    draw, requests = _Draw(seed), []
    for i, time in enumerate(poisson_arrivals(rate, count, seed)):
        history = (Piece(_SYSTEM, system_tokens),)
        for turn in range(turns):
            history = (*history, draw.own(turn_tokens))
            requests.append(Request(f"{name}{i}.{turn}", time + turn * pause, history, draw.int(output_tokens)))
    return merge(requests)


def long_documents(
    rate: float,
    count: int,
    seed: int = 0,
    *,
    every: int = 10,
    document_tokens: Range = (4096, 8192),
    prompt_tokens: Range = (32, 512),
    output_tokens: Range = (16, 256),
    name: str = "chat",
    document_name: str = "doc",
) -> list[Request]:
    """Chats, and every `every`-th request is someone who hands in a long document: "doc0", "doc1" …"""
    check_int("every", every, 1)
    draw, requests = _Draw(seed), []
    for i, time in enumerate(poisson_arrivals(rate, count, seed)):
        is_long = i % every == every - 1
        request_id = f"{document_name}{i // every}" if is_long else f"{name}{i}"
        prompt = (draw.own(document_tokens if is_long else prompt_tokens),)
        requests.append(Request(request_id, time, prompt, draw.int(output_tokens)))
    return requests


def mix(rate: float, count: int, seed: int = 0) -> list[Request]:
    """Half of the requests chats, a quarter retrieval, a quarter chats with long documents among them."""
    check_int("count", count, 4)
    quarter = count // 4
    return merge(
        chat(rate / 2, count - 2 * quarter, seed),
        rag(rate / 4, quarter, seed + 1),
        long_documents(rate / 4, quarter, seed + 2, name="talk"),
    )


class _Draw:
    """Random sizes, and content that no other request has. (Plain arithmetic on random(): the same in every Python.)"""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(check_int("seed", seed, 0) + 2**32)  # not the draws of the arrivals

    def int(self, limits: Range) -> int:
        low, high = limits
        if low > high:
            raise ValueError(f"range {limits} is empty: the first number must not be above the second")
        return low + int(self._random.random() * (high - low + 1))

    def own(self, limits: Range) -> Piece:
        return Piece(self._random.getrandbits(62), self.int(limits))

    def weighted(self, weights: list[float]) -> int:
        """An index, drawn with these weights."""
        sums, total = [], 0.0
        for weight in weights:
            total += weight
            sums.append(total)
        return min(bisect(sums, self._random.random() * total), len(weights) - 1)
