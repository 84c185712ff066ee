"""Checks of lesson 10: text while it grows, one token from a row of logits, latencies from a trace."""

from __future__ import annotations

import math

from .exercise import Exercise, Wrong, require

# ---- 10.1

text_stream = Exercise("10.1", "TextStream", "Text that can be shown while it grows")


class Bytes:
    """A tokenizer whose tokens are pieces of bytes, like SmolLM2's. Token 0 is a special one: it has no text.

    strips: a space in front of a text is dropped, as the tokenizers of Llama 2 and Mistral do it.
    """

    eos_token_id = 0

    def __init__(self, *pieces: bytes, strips: bool = False) -> None:
        self.pieces, self.strips = (b"", *pieces), strips

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError("a stream gets ids and makes text; it never needs encode")

    def decode(self, token_ids, skip_special_tokens: bool = False) -> str:
        shown = (b"<end>" if token_id == 0 and not skip_special_tokens else self.pieces[token_id] for token_id in token_ids)
        text = b"".join(shown).decode("utf-8", errors="replace")
        return text[1:] if self.strips and text.startswith(" ") else text


def _run(TextStream, tokenizer: Bytes, token_ids: list[int]) -> tuple[list[str], str, str]:
    """What each push gave, what flush gave, and the calls in words."""
    stream, pieces = TextStream(tokenizer), []
    given = f"tokens {[tokenizer.pieces[token_id] for token_id in token_ids]}"
    for token_id in token_ids:
        pieces.append(stream.push(token_id))
        if not isinstance(pieces[-1], str):
            raise Wrong("push returns a text, an empty one when there is nothing to show", given=given, got=pieces[-1])
    rest = stream.flush()
    if not isinstance(rest, str):
        raise Wrong("flush returns a text, an empty one when nothing was held back", given=given, got=rest)
    return pieces, rest, given


@text_stream.test("plain words are shown as they come")
def _(TextStream):
    pieces, rest, given = _run(TextStream, Bytes(b"Hi", b"!"), [1, 2])
    require(
        pieces == ["Hi", "!"],
        "each push gives what its token adds to the text",
        given=given,
        got=f"pushes gave {pieces}, flush {rest!r}",
    )
    require(rest == "", "nothing was held back, so flush has nothing to give", given=given, got=f"flush gave {rest!r}")


@text_stream.test("a special token has no text")
def _(TextStream):
    pieces, rest, given = _run(TextStream, Bytes(b"Hi"), [1, 0])
    require(
        "".join(pieces) + rest == "Hi",
        "the end-of-sequence token isn't shown to the user",
        given=given,
        got=f"pushes gave {pieces}",
    )


@text_stream.test("an emoji of three tokens is shown once, and whole", concept="U1")
def _(TextStream):
    bird = "🐦".encode()
    pieces, rest, given = _run(TextStream, Bytes(bird[:2], bird[2:3], bird[3:], b"ok"), [1, 2, 3, 4])
    require("\ufffd" not in "".join(pieces), "no broken character is ever shown", given=given, got=f"pushes gave {pieces}")
    require(
        pieces == ["", "", "🐦", "ok"],
        "nothing until the character is complete, then the character, then the next word at once",
        given=given,
        got=f"pushes gave {pieces}, flush {rest!r}",
    )


@text_stream.test("the space between two words stays, whatever the tokenizer does with a space in front", concept="U4")
def _(TextStream):
    pieces, rest, given = _run(TextStream, Bytes(b"Good", b" morning", b" to", b" all", strips=True), [1, 2, 3, 4])
    require(
        "".join(pieces) + rest == "Good morning to all",
        "all pieces together are what the tokenizer makes of all tokens together",
        given=given + ", a tokenizer that drops a space in front of a text",
        got=f"pushes gave {pieces}, flush {rest!r}",
    )


@text_stream.test("Chinese between words, cut in the middle of its characters", concept="U1")
def _(TextStream):
    text = "say 你好, now".encode()
    pieces, rest, given = _run(TextStream, Bytes(text[:5], text[5:8], text[8:12], text[12:]), [1, 2, 3, 4])
    require("\ufffd" not in "".join(pieces), "no broken character is ever shown", given=given, got=f"pushes gave {pieces}")
    require(
        "".join(pieces) + rest == "say 你好, now",
        "nothing is lost and nothing comes twice",
        given=given,
        got=f"pushes gave {pieces}, flush {rest!r}",
    )


@text_stream.test("an answer that is cut off in the middle of a character loses nothing", concept="U2")
def _(TextStream):
    bird = "🐦".encode()
    tokenizer = Bytes(b"a", bird[:2])
    pieces, rest, given = _run(TextStream, tokenizer, [1, 2])
    require(
        "".join(pieces) + rest == tokenizer.decode([1, 2], skip_special_tokens=True),
        "flush brings what was held back, as the tokenizer shows it; the answer has ended, there is nothing to wait for",
        given=given,
        got=f"pushes gave {pieces}, flush {rest!r}",
    )


@text_stream.test("bytes that never become a character don't stop the stream", concept="U2")
def _(TextStream):
    tokenizer = Bytes(b"a", b"\xf0\x9f", b"ok", b" and", b" more")
    pieces, rest, given = _run(TextStream, tokenizer, [1, 2, 3, 4, 5])
    require(
        "".join(pieces) == tokenizer.decode([1, 2, 3, 4, 5], skip_special_tokens=True) and pieces[-2:] == [" and", " more"],
        "once other text follows, they will never be a character: they are shown as the tokenizer shows them, and the rest as it comes",
        given=given,
        got=f"pushes gave {pieces}, flush {rest!r}",
    )


@text_stream.test("self.text is what was shown so far")
def _(TextStream):
    bird = "🐦".encode()
    tokenizer, shown = Bytes(b"a", bird[:2], bird[2:], b"ok"), ""
    stream = TextStream(tokenizer)
    for number, token_id in enumerate((1, 2, 3, 4, 2, None), 1):
        shown += stream.flush() if token_id is None else stream.push(token_id)
        require(
            getattr(stream, "text", None) == shown,
            "text holds all that push and flush returned, and nothing that is still held back",
            given=f"tokens {[tokenizer.pieces[i] for i in (1, 2, 3, 4, 2)]} and flush, after call {number}",
            got=f"text is {getattr(stream, 'text', None)!r}, and {shown!r} was shown",
        )


@text_stream.test("two answers that grow at the same time don't mix")
def _(TextStream):
    tokenizer = Bytes(b"one", b"two")
    a, b = TextStream(tokenizer), TextStream(tokenizer)
    got = [a.push(1), b.push(2), a.push(1), b.push(2)]
    require(
        got == ["one", "two", "one", "two"],
        "each stream has tokens of its own",
        given="two streams, pushed in turns",
        got=f"pushes gave {got}",
    )


# ---- 10.2

sampling = Exercise("10.2", "sample_token", "One token from a row of logits")


def _logits(*probabilities: float):
    import torch

    return torch.tensor([math.log(p) if p else -math.inf for p in probabilities])


def _whole(token, given: str) -> int:
    """The token as an int: one already, or what int() makes one of without loss (a tensor of one element, a NumPy number)."""
    try:
        number = int(token)
        if number == token:
            return number
    except (TypeError, ValueError, RuntimeError):
        pass
    raise Wrong("the token's id: an int, or a tensor or array of one whole number", given=given, got=token)


def _draws(sample_token, probabilities: tuple, temperature: float, top_p: float, count: int, seed: int = 7) -> list[int]:
    """The first `count` tokens of a request."""
    draws = []
    for number in range(count):
        token = sample_token(_logits(*probabilities), temperature, top_p, seed, number)
        draws.append(_whole(token, f"probabilities {probabilities}"))
    return draws


@sampling.test("a token that is as good as certain")
def _(sample_token):
    draws = _draws(sample_token, (0.99998, 0.00001, 0.00001), 1.0, 1.0, 3)
    require(
        draws == [0, 0, 0],
        "token 0 has all but a trace of the probability",
        given="probabilities (0.99998, 0.00001, 0.00001), temperature 1",
        got=f"drew {draws}",
    )


@sampling.test("temperature 0 takes the most likely token", concept="T1")
def _(sample_token):
    draws = _draws(sample_token, (0.5, 0.3, 0.2), 0, 1.0, 20)
    require(
        set(draws) == {0},
        "greedy: always the most likely, whatever the seed",
        given="probabilities (0.5, 0.3, 0.2), temperature 0",
        got=f"drew {draws}",
    )


@sampling.test("a low temperature makes the likely ones likelier", concept="T2")
def _(sample_token):
    draws = _draws(sample_token, (0.6, 0.3, 0.1), 0.1, 1.0, 100)
    require(
        draws.count(0) >= 95,
        "at temperature 0.1 the first token has a probability of 0.999",
        given="probabilities (0.6, 0.3, 0.1), temperature 0.1, 100 draws",
        got=f"drew token 0 {draws.count(0)} times",
    )


@sampling.test("top-p keeps the token that crosses p", concept="T3")
def _(sample_token):
    draws = _draws(sample_token, (0.9, 0.1), 1.0, 0.5, 50)
    require(
        set(draws) == {0},
        "one token is kept, and drawn every time",
        given="probabilities (0.9, 0.1), top_p 0.5, 50 draws",
        got=f"drew {set(draws)}",
    )


@sampling.test("top-p drops what comes after it", concept="T3")
def _(sample_token):
    draws = _draws(sample_token, (0.4, 0.3, 0.2, 0.1), 1.0, 0.5, 200)
    require(
        not {2, 3} & set(draws), "the first two reach 0.5 together: the others are never drawn",
        given="probabilities (0.4, 0.3, 0.2, 0.1), top_p 0.5, 200 draws", got=f"drew {set(draws)}",
    )  # fmt: skip


@sampling.test("the answer is a token id, not a place in the sorted row", concept="T5")
def _(sample_token):
    draws = _draws(sample_token, (0.05, 0.05, 0.9), 1.0, 0.5, 20)
    require(
        set(draws) == {2},
        "the most likely token is number 2",
        given="probabilities (0.05, 0.05, 0.9), top_p 0.5",
        got=f"drew {set(draws)}",
    )


@sampling.test("the same request draws the same token again")
def _(sample_token):
    first, again = (_draws(sample_token, (0.25,) * 4, 1.0, 1.0, 20) for _ in range(2))
    require(
        first == again,
        "seed and number of tokens decide, and nothing else",
        given="20 draws, twice",
        got=f"drew {first}, then {again}",
    )


@sampling.test("each token of an answer is a draw of its own", concept="T7")
def _(sample_token):
    draws = _draws(sample_token, (0.25,) * 4, 1.0, 1.0, 60)
    require(
        len(set(draws)) > 1,
        "one seed, sixty draws: not all alike",
        given="four equal tokens, num_generated 0 to 59",
        got=f"drew {draws[:8]} …",
    )
    draws = _draws(sample_token, (0.25,) * 4, 1.0, 1.0, 60, seed=0)
    require(
        len(set(draws)) > 1,
        "0 is a seed like every other",
        given="four equal tokens, seed 0, num_generated 0 to 59",
        got=f"drew {draws[:8]} …",
    )


@sampling.test("another seed, another answer")
def _(sample_token):
    rows = [_draws(sample_token, (0.25,) * 4, 1.0, 1.0, 20, seed) for seed in range(4)]
    require(
        len({tuple(row) for row in rows}) == 4,
        "the seed decides",
        given="seeds 0 to 3, 20 draws each",
        got=f"drew {[row[:8] for row in rows]} …",
    )


@sampling.test("another seed isn't the same answer, a token later")
def _(sample_token):
    seven, eight = (_draws(sample_token, (0.25,) * 4, 1.0, 1.0, 40, seed) for seed in (7, 8))
    require(
        seven[1:] != eight[:-1] and eight[1:] != seven[:-1],
        "draw 1 of seed 7 and draw 0 of seed 8 are different draws",
        given="four equal tokens, seeds 7 and 8, 40 draws each",
        got=f"drew {seven[:8]} … and {eight[:8]} …",
    )


@sampling.test("the temperature comes first, then top-p", concept="T2")
def _(sample_token):
    draws = _draws(sample_token, (0.6, 0.3, 0.1), 5.0, 0.8, 100)
    require(
        2 in draws,
        "at temperature 5 they are 0.39, 0.34 and 0.27: the first two don't reach 0.8, so token 2 is kept, and drawn now and then",
        given="probabilities (0.6, 0.3, 0.1), temperature 5, top_p 0.8, 100 draws",
        got=f"drew {set(draws)}",
    )


@sampling.test("every token as often as its probability says")
def _(sample_token):
    probabilities, wanted = (0.03, 0.57, 0.1, 0.3), (0.0, 0.588, 0.103, 0.309)
    draws = _draws(sample_token, probabilities, 1.0, 0.95, 1500)
    shares = [draws.count(token) / len(draws) for token in range(4)]
    require(
        all(abs(share - want) < 0.05 for share, want in zip(shares, wanted, strict=True)),
        "top_p 0.95 keeps three tokens, and their shares are as their probabilities",
        given=f"probabilities {probabilities}, top_p 0.95, 1,500 draws",
        got=f"shares {[round(share, 2) for share in shares]}",
    )


@sampling.test("the logits are not changed")
def _(sample_token):
    logits = _logits(0.1, 0.6, 0.3)
    before = logits.clone()
    sample_token(logits, 0.7, 0.8, 1, 0)
    require(bool((logits == before).all()), "the row of logits belongs to the caller", got=logits)


# ---- 10.3

latency = Exercise("10.3", "latencies", "What each user waited for, from a trace")


def _trace(arrivals: dict[str, float], steps: list[tuple]):
    """steps: (start, end, the requests that got a token, those that got a chunk of their prompt)."""
    from ..trace import ChunkRecord, RequestRecord, StepRecord, Trace

    trace = Trace({"num_blocks": 8, "max_num_batched_tokens": 8})
    for name, arrival in arrivals.items():
        trace.requests[name] = RequestRecord(name, name, 4, 8, arrival, 0)
    for index, (start, end, tokens, prefills) in enumerate(steps):
        chunks = [
            ChunkRecord(name, 0, 1, "prefill" if name in prefills else "decode", name in tokens)
            for name in {**dict.fromkeys(tokens), **dict.fromkeys(prefills)}
        ]
        trace.steps.append(StepRecord(index, start, end, chunks, tokens=dict.fromkeys(tokens, 1)))
    return trace


def _same(got, wanted: dict, saying: str, given: str, concept: str | None = None) -> None:
    from .exercise import is_same, plain

    rows = plain(got)
    if not isinstance(rows, dict) or not is_same(rows, plain(wanted), 1e-6):
        raise Wrong(saying, given=given, got=f"returned {rows}", concept=concept)


@latency.test("one request, a token every second")
def _(latencies):
    trace = _trace({"a": 0.0}, [(0, 1, "a", "a"), (1, 2, "a", ""), (2, 3, "a", "")])
    _same(
        latencies(trace, 50),
        {"a": (1.0, 1.0, 1.0)},
        "(TTFT, percentile of the gaps, longest gap)",
        "arrival at 0 s, tokens at 1, 2 and 3 s",
    )


@latency.test("a step in which it got nothing is part of the gap")
def _(latencies):
    trace = _trace({"a": 0.0}, [(0, 1, "a", "a"), (1, 5, "", ""), (5, 6, "a", "")])
    _same(
        latencies(trace, 50),
        {"a": (1.0, 5.0, 5.0)},
        "from one of its tokens to the next of its tokens",
        "tokens at 1 and 6 s, a step of 4 s without it between",
    )


@latency.test("the wait begins with the arrival, not with the step")
def _(latencies):
    trace = _trace({"a": 0.4}, [(0, 1, "", ""), (1, 2, "a", "a")])
    _same(
        latencies(trace, 50), {"a": (1.6, None, None)},
        "it came while a step was running, and waited for that step too; with one token there is no gap",
        "arrival at 0.4 s, a step from 0 to 1 s without it, its first token at 2 s",
    )  # fmt: skip


@latency.test("a chunk in the middle of the prompt is nothing that the user sees", concept="I5")
def _(latencies):
    trace = _trace({"a": 0.0}, [(0, 1, "", "a"), (1, 2, "", "a"), (2, 3, "a", "a"), (3, 4, "a", "")])
    _same(
        latencies(trace, 50), {"a": (3.0, 1.0, 1.0)}, "the first token comes with the third chunk",
        "a prompt in three chunks: steps end at 1, 2 and 3 s, the token comes in the third",
    )  # fmt: skip


@latency.test("each request has its own tokens", concept="A9")
def _(latencies):
    trace = _trace({"a": 0.0, "b": 0.0}, [(0, 1, "ab", "ab"), (1, 2, "a", ""), (2, 3, "a", ""), (3, 4, "ab", "")])
    _same(
        latencies(trace, 50), {"a": (1.0, 1.0, 1.0), "b": (1.0, 3.0, 3.0)}, "the gap of b is between two tokens of b",
        "a gets tokens at 1, 2, 3 and 4 s, b at 1 and 4 s",
    )  # fmt: skip


@latency.test("the percentile is the one that was asked for")
def _(latencies):
    ends = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 31]
    trace = _trace({"a": 0.0}, [(start, end, "a", "") for start, end in zip([0, *ends], ends, strict=False)])
    for percent, wanted in ((50, 1.0), (90, 3.0), (100, 21.0)):
        _same(
            latencies(trace, percent), {"a": (1.0, wanted, 21.0)}, "nine gaps of 1 s and one of 21 s, with linear interpolation between them",
            f"tokens at {ends} s, percent={percent}",
        )  # fmt: skip


@latency.test("a request that has no token yet")
def _(latencies):
    trace = _trace({"a": 0.0, "b": 0.0}, [(0, 1, "a", "ab")])
    _same(
        latencies(trace, 50),
        {"a": (1.0, None, None), "b": (None, None, None)},
        "None where there is nothing to measure",
        "b is still PREFILLING when the trace ends",
    )
