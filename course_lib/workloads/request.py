"""A request of a workload: when it comes, what it asks, how much it generates.

A prompt can be a text, token ids, or pieces of content (content id, number of tokens): the tokens are then made when
they are needed. Equal content has equal tokens, so that prompts which begin with the same pieces share blocks in
the prefix cache; different content differs from its first tokens on.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..validation import check_int, check_number

MAX_CONTENT = 2**62 - 1
MAX_TOKENS = 10_000_000  # of one request: more than any model takes, and a list that still fits in memory


class Piece(NamedTuple):
    """`num_tokens` tokens of the content number `content`."""

    content: int
    num_tokens: int


@dataclass(frozen=True)
class Request:
    """One request. Its output is `max_tokens` long where nothing stops it earlier.

    arrival_time  seconds after the start of the workload
    prompt        a text, token ids, or a tuple of Pieces
    """

    request_id: str
    arrival_time: float
    prompt: str | SequenceOf[int] | tuple[Piece, ...]
    max_tokens: int
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise TypeError(f"request_id must be a string, got {self.request_id!r}")
        if not self.request_id:
            raise ValueError("request_id='' is not allowed: an id must have at least 1 character")
        check_number("arrival_time", self.arrival_time, "at least 0", lambda x: x >= 0)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        if len(self.prompt) == 0:
            raise ValueError(f"prompt of {self.request_id!r} is empty: it must have at least 1 token")
        if self.is_made_of_pieces:
            for content, num_tokens in self.prompt:
                check_int("content", content, 0, MAX_CONTENT)
                check_int("num_tokens", num_tokens, 1, MAX_TOKENS)

    @property
    def is_made_of_pieces(self) -> bool:
        return isinstance(self.prompt[0], Piece)

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None for a text, which only a tokenizer can count."""
        if self.is_made_of_pieces:
            return sum(piece.num_tokens for piece in self.prompt)
        return None if isinstance(self.prompt, str) else len(self.prompt)

    def prompt_for(self, vocab_size: int) -> str | SequenceOf[int]:
        """The prompt as `Engine.add_request` takes it."""
        if not self.is_made_of_pieces:
            return self.prompt
        token_ids: list[int] = []
        for piece in self.prompt:
            token_ids += _tokens_of(piece, vocab_size)
        return token_ids


def _tokens_of(piece: Piece, vocab_size: int) -> list[int]:
    """The content's number, digit by digit in base `vocab_size`, then 0, 1, 2 … up to the piece's length."""
    number, tokens = piece.content, []
    for _ in range(_digits(vocab_size)):
        number, digit = divmod(number, vocab_size)
        tokens.append(digit)
    rest = piece.num_tokens - len(tokens)
    return tokens + _counting(vocab_size, rest) if rest > 0 else tokens[: piece.num_tokens]


@lru_cache
def _digits(vocab_size: int) -> int:
    """Digits that every content number fits in."""
    check_int("vocab_size", vocab_size, 2)
    return next(digits for digits in range(1, 63) if vocab_size**digits > MAX_CONTENT)


_numbers: list[int] = []  # 0, 1, 2 …, grown as needed and shared: slicing it makes no new integers


def _counting(vocab_size: int, count: int) -> list[int]:
    """0, 1, 2 … vocab_size - 1, 0, 1 …: `count` token ids."""
    _numbers.extend(range(len(_numbers), min(vocab_size, count)))
    period = _numbers[: min(vocab_size, count)]
    return (period * (count // len(period) + 1))[:count] if count > len(period) else period


def merge(*workloads: Iterable[Request]) -> list[Request]:
    """Several workloads as one, in order of arrival. Raises ValueError for a request id that comes twice."""
    requests = sorted((request for workload in workloads for request in workload), key=lambda r: r.arrival_time)
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise ValueError(f"request_id={request.request_id!r} comes twice: give the workloads different names")
        seen.add(request.request_id)
    return requests


def at_rate(requests: SequenceOf[Request], rate: float) -> list[Request]:
    """The same requests, their arrivals stretched or squeezed in time to `rate` requests a second on average.

    The pattern stays: a burst is still a burst. Raises ValueError when all arrive at the same moment.
    """
    check_number("rate", rate, "above 0 requests a second", lambda x: x > 0)
    requests = sorted(requests, key=lambda r: r.arrival_time)
    first = requests[0].arrival_time if requests else 0.0
    span = requests[-1].arrival_time - first if requests else 0.0
    if span == 0:
        raise ValueError(f"rate={rate} can't be set: the {len(requests)} requests have no time between them")
    factor = (len(requests) - 1) / rate / span
    return [replace(request, arrival_time=(request.arrival_time - first) * factor) for request in requests]
