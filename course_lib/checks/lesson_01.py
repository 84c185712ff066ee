"""Checks of lesson 01: generate() without a KV cache, with one, and a prefill in pieces."""

from __future__ import annotations

from operator import index

from .exercise import Exercise, Wrong, require

naive = Exercise("01.1", "generate_naive", "generate() without a cache")
cached = Exercise("01.2", "generate_cached", "generate() with a KV cache")
pieces = Exercise("01.3", "prefill_in_pieces", "A cache filled bit by bit")


class Cache:
    """What the model keeps of each token. Not for anybody else to look into."""

    def __init__(self) -> None:
        self.entries: list[int] = []


class RecordingModel:
    """Stands in for a language model, with the calls of PlainModel; knows nothing of language.

    What it keeps of a token depends on the token, its position and everything before it in the cache; the next token
    depends on all that it kept. So a token left out, sent twice or wrongly numbered gives another answer.
    calls: (start_pos, num_tokens, tokens in the cache before) of every call
    """

    def __init__(self, vocab_size: int = 50_000) -> None:
        self.vocab_size = vocab_size
        self.calls: list[tuple[int, int, int]] = []

    def new_cache(self) -> Cache:
        return Cache()

    def __call__(self, token_ids, start_pos: int, cache: Cache | None = None) -> int:
        if not hasattr(token_ids, "__len__"):
            raise TypeError(f"token_ids must be a list of token ids, got {token_ids!r}")
        if not len(token_ids):
            raise ValueError("token_ids is empty: the model needs at least 1 token to say what follows it")
        entries = list(cache.entries) if cache is not None else []
        self.calls.append((index(start_pos), len(token_ids), len(entries)))
        for place, token in enumerate(token_ids):
            entries.append(hash((entries[-1] if entries else 0, int(token), index(start_pos) + place)))
        if cache is not None:
            cache.entries = entries
        return hash(tuple(entries)) % self.vocab_size

    @property
    def num_tokens(self) -> int:
        """Tokens that went through, in all calls."""
        return sum(count for _, count, _ in self.calls)


def continuation(prompt: list[int], count: int) -> list[int]:
    """What must come out: each token after the whole text before it, token by token through one cache."""
    model, cache, token = RecordingModel(), Cache(), 0
    for position, known in enumerate(prompt):
        token = model([known], position, cache)
    answer = [token]
    for position in range(len(prompt), len(prompt) + count - 1):
        answer.append(model([answer[-1]], position, cache))
    return answer


def answer_of(function, prompt: list[int], max_tokens: int, **more) -> tuple[list[int], RecordingModel]:
    """The learner's answer as a list of ints, and the model that it called."""
    model, before = RecordingModel(), list(prompt)
    got = function(model, prompt, max_tokens, **more)
    call = call_of(function, before, max_tokens, **{"eos_token_id": None, **more})
    require(prompt == before, "the prompt that you were given stays as it was", given=call, got=f"your function changed `prompt` to {prompt}")
    try:
        return [index(token) for token in (got.tolist() if hasattr(got, "tolist") else got)], model
    except TypeError:
        raise Wrong("the new tokens come back as a list of ids", given=call, got=got) from None


def call_of(function, *args, **more) -> str:
    name = getattr(function, "__name__", "it")
    return f"{name}({', '.join(['model', *map(str, args), *(f'{key}={value}' for key, value in more.items())])})"


def calls_text(model: RecordingModel) -> str:
    """The calls as a learner can read them."""
    return "; ".join(f"{count} token{'s' * (count > 1)} from position {start} on" for start, count, _ in model.calls[:5]) or "no call"


def right_answer(function, prompt: list[int], max_tokens: int, saying: str, diagnose=lambda model, prompt: None, **more) -> RecordingModel:
    """Require the right tokens. Which idea a wrong answer misses, the calls may tell: `diagnose` names it."""
    got, model = answer_of(function, list(prompt), max_tokens, **more)
    must = continuation(prompt, max_tokens)
    given = call_of(function, prompt, max_tokens, **{"eos_token_id": None, **more})
    if got == prompt + must:
        raise Wrong("the new tokens alone come back, without the prompt", given=given, got=f"returned {got}")
    if got != must:
        raise Wrong(saying, given=given,
                    got=f"returned {got} after these calls: {calls_text(model)}", concept=diagnose(model, prompt))  # fmt: skip
    return model


def ends_at_eos(function) -> None:
    """An answer in which the third token is the end-of-sequence token."""
    answer = continuation([3, 1, 4], 6)
    got, _ = answer_of(function, [3, 1, 4], 6, eos_token_id=answer[2])
    require(got == answer[:3], "the answer ends with the end-of-sequence token, which belongs to it",
            given=f"max_tokens=6, and the third new token is eos_token_id={answer[2]}", got=f"returned {got}")  # fmt: skip


# ---- 01.1


def naive_mistake(model: RecordingModel, prompt: list[int]) -> str | None:
    """A call with the whole text that doesn't begin at position 0."""
    return "P1" if any(start and count >= len(prompt) for start, count, _ in model.calls) else None


@naive.test("a prompt of one token, one new token")
def _(generate_naive):
    right_answer(generate_naive, [7], 1, "the model is asked once, about the whole text, which begins at position 0", naive_mistake)


@naive.test("the model gets all of the text", concept="M4")
def _(generate_naive):
    right_answer(generate_naive, [7, 8, 9, 10], 1, "the token that follows the whole prompt", naive_mistake)


@naive.test("a new token is part of the next question", concept="M4")
def _(generate_naive):
    right_answer(generate_naive, [7, 8], 4, "each new token follows the prompt and all new tokens before it", naive_mistake)


@naive.test("it ends at the end-of-sequence token")
def _(generate_naive):
    ends_at_eos(generate_naive)


@naive.cost("one call for each new token", concept="K1")
def _(generate_naive):
    _, model = answer_of(generate_naive, [5, 6, 7], 5)
    require(len(model.calls) <= 5, "five new tokens take five calls", given="5 new tokens", got=f"called the model {len(model.calls)} times")


# ---- 01.2


def cached_mistake(model: RecordingModel, prompt: list[int]) -> str | None:
    """What went wrong, by the first call that brings other than the tokens without K/V."""
    for start, count, before in model.calls:
        if before and count > 1:
            return "K2"
        if before and start != before:
            return "P1"
    return None


@cached.test("a prompt of three tokens, one new token")
def _(generate_cached):
    right_answer(generate_cached, [7, 8, 9], 1, "the token that follows the prompt")


@cached.test("the second token comes from the first one and the cache", concept="K2")
def _(generate_cached):
    right_answer(generate_cached, [7, 8, 9], 2, "the second call brings what has no K/V yet, numbered as in the whole text", cached_mistake)


@cached.test("many tokens", concept="K2")
def _(generate_cached):
    right_answer(generate_cached, [4, 4, 4, 2, 9], 12, "the same tokens as without a cache", cached_mistake)


@cached.test("it ends at the end-of-sequence token")
def _(generate_cached):
    ends_at_eos(generate_cached)
    first = continuation([3, 1, 4], 1)
    got, _ = answer_of(generate_cached, [3, 1, 4], 6, eos_token_id=first[0])
    require(got == first, "the very first token can be the end-of-sequence token", given=f"the first new token is eos_token_id={first[0]}", got=f"returned {got}")


@cached.cost("every token goes through the model once", concept="K1")
def _(generate_cached):
    prompt = list(range(100, 140))
    _, model = answer_of(generate_cached, prompt, 10)
    require(model.num_tokens <= 49, "each token of the text goes through once, and the newest not at all",
            given="a prompt of 40 tokens, 10 new ones", got=f"{model.num_tokens} tokens in {len(model.calls)} calls")  # fmt: skip


# ---- 01.3


def first_token_of(function, prompt: list[int], piece_size: int, num_cached: int = 0) -> tuple[int, RecordingModel, Cache, str]:
    """What the learner's prefill returns, the model, the cache, and the call as text."""
    model, cache = RecordingModel(), Cache()
    if num_cached:
        model(prompt[:num_cached], 0, cache)
        model.calls.clear()
    token = function(model, list(prompt), piece_size, cache, num_cached)
    return token, model, cache, call_of(function, prompt, piece_size, "cache", num_cached)


def right_prefill(function, prompt: list[int], piece_size: int, saying: str, num_cached: int = 0) -> None:
    token, model, cache, call = first_token_of(function, prompt, piece_size, num_cached)
    got = f"returned {token} after these calls: {calls_text(model)}"
    require(not isinstance(token, tuple | list) and token is not None, "the first new token comes back: one id", given=call, got=token)
    if int(token) != continuation(prompt, 1)[0]:
        raise Wrong(saying, given=call, got=got, concept=pieces_mistake(model, len(prompt), num_cached))
    require(len(cache.entries) == len(prompt), "the cache that you were given holds the whole prompt afterwards", given=call,
            got=f"the cache holds {len(cache.entries)} tokens", concept="M4")  # fmt: skip
    require(all(count <= piece_size for _, count, _ in model.calls), f"no call has more than {piece_size} tokens", given=call, got=got)


def pieces_mistake(model: RecordingModel, length: int, num_cached: int) -> str | None:
    """What went wrong, by the calls."""
    if any(before < num_cached for _, _, before in model.calls):
        return "M4"
    if len(model.calls) > 1 and all(before == num_cached for _, _, before in model.calls):
        return "M4"
    if num_cached and model.calls and model.calls[0][0] == 0:
        return "K2" if model.num_tokens == length else "P5"
    if any(start != before for start, _, before in model.calls):
        return "P1"
    return "I8" if num_cached + model.num_tokens < length else None


@pieces.test("the prompt is one piece", concept="A5")
def _(prefill_in_pieces):
    right_prefill(prefill_in_pieces, [7, 8, 9, 10], 4, "four tokens, one call")


@pieces.test("the second piece goes on where the first one ended", concept="P1")
def _(prefill_in_pieces):
    right_prefill(prefill_in_pieces, [7, 8, 9, 10, 11, 12, 13, 14], 4, "the token that follows the prompt, as if it had gone in with one call")


@pieces.test("the last piece may be short", concept="I8")
def _(prefill_in_pieces):
    right_prefill(prefill_in_pieces, [7, 8, 9, 10, 11], 4, "the whole prompt goes in")
    right_prefill(prefill_in_pieces, [7, 8], 4, "a prompt shorter than a piece goes in as it is")


@pieces.test("part of the prompt is in the cache already", concept="K2")
def _(prefill_in_pieces):
    right_prefill(prefill_in_pieces, [7, 8, 9, 10, 11, 12, 13], 2, "what is cached isn't sent again, and the rest is numbered as in the whole prompt", num_cached=3)


@pieces.test("the next token can be decoded from this cache", concept="A5")
def _(prefill_in_pieces):
    prompt = list(range(50, 73))
    for piece_size in (1, 5, 23, 64):
        token, model, cache, call = first_token_of(prefill_in_pieces, prompt, piece_size)
        second = model([token], len(prompt), cache)
        require([int(token), second] == continuation(prompt, 2), "decode goes on as after a prefill in one piece", given=call,
                got=f"first token {token}, then {second}")  # fmt: skip


@pieces.cost("no more calls than needed", concept="C11")
def _(prefill_in_pieces):
    _, model, _, call = first_token_of(prefill_in_pieces, list(range(20)), 8)
    require(len(model.calls) <= 3, "20 tokens in pieces of 8 take three calls", given=call, got=f"called the model {len(model.calls)} times")
