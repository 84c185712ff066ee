"""Checks of lesson 11: a chunk size for a latency target, and a policy that nobody starves under."""

from __future__ import annotations

from .exercise import Exercise, Wrong, expect, require

# ---- 11.1

chunk_size = Exercise("11.1", "chunk_for_target", "The largest chunk that keeps a step within a target")


class PerToken:
    """A chip on which every token of a step takes a millisecond."""

    def seconds(self, work) -> float:
        return work.tokens / 1000

    def __repr__(self) -> str:
        return "1 ms a token"


class PerPair:
    """A chip on which only attention takes time: a microsecond for each (query, key) pair."""

    def seconds(self, work) -> float:
        return work.pairs / 1_000_000

    def __repr__(self) -> str:
        return "1 µs a pair"


class PerContext:
    """A chip on which only reading K/V takes time: a microsecond for each token of context."""

    def seconds(self, work) -> float:
        return work.context / 1_000_000

    def __repr__(self) -> str:
        return "1 µs a token of context"


class PerRow:
    """A chip on which only sampling takes time: a millisecond for each row."""

    def seconds(self, work) -> float:
        return work.rows / 1000

    def __repr__(self) -> str:
        return "1 ms a sampled row"


@chunk_size.test("nobody else is there")
def _(chunk_for_target):
    expect(
        chunk_for_target,
        PerToken(),
        running=0,
        context=0,
        prompt=1000,
        target=0.0505,
        gives=50,
        saying="50 tokens take 50 ms, 51 would take longer than 50.5",
    )


@chunk_size.test("a target that is met exactly is met")
def _(chunk_for_target):
    expect(
        chunk_for_target,
        PerToken(),
        running=0,
        context=0,
        prompt=1000,
        target=0.125,
        gives=125,
        saying="125 tokens take 125 ms, and that is within 125 ms",
    )


@chunk_size.test("the running streams' tokens are in the step too", concept="C3")
def _(chunk_for_target):
    expect(
        chunk_for_target,
        PerToken(),
        running=20,
        context=10,
        prompt=1000,
        target=0.0505,
        gives=30,
        saying="50 tokens fit into the step, and 20 of them are the streams'",
    )


@chunk_size.test("no chunk is longer than the prompt")
def _(chunk_for_target):
    expect(
        chunk_for_target,
        PerToken(),
        running=0,
        context=0,
        prompt=30,
        target=10.0,
        gives=30,
        saying="everything is fast enough, so the whole prompt in one piece, and no chunk is longer than its prompt",
    )


@chunk_size.test("a target that can't be met")
def _(chunk_for_target):
    expect(
        chunk_for_target,
        PerToken(),
        running=100,
        context=10,
        prompt=1000,
        target=0.05,
        gives=0,
        saying="the streams alone take longer: there is no such chunk, 0",
    )


@chunk_size.test("the last chunk attends to the whole prompt, so it is the slowest", concept="M4")
def _(chunk_for_target):
    # The last ten of 10,000 tokens have 99,955 pairs. Ten divides 10,000, so the last chunk is a full one; and with chunks of
    # eleven, the last full one ends at 9,999 and has 109,934.
    expect(
        chunk_for_target,
        PerPair(),
        running=0,
        context=0,
        prompt=10_000,
        target=0.1,
        gives=10,
        saying="the step at the end of the prompt must be within the target as well",
    )


@chunk_size.test("each stream attends to its own context")
def _(chunk_for_target):
    # 100 streams with one new token at a context of 200: 20,000 pairs, and the chunk as above.
    expect(
        chunk_for_target,
        PerPair(),
        running=100,
        context=200,
        prompt=10_000,
        target=0.12,
        gives=10,
        saying="the streams' tokens attend to 200 tokens each, their own context, and that takes time as well",
    )


@chunk_size.test("K/V is read: of every stream, and of the prompt")
def _(chunk_for_target):
    expect(
        chunk_for_target,
        PerContext(),
        running=10,
        context=100,
        prompt=1000,
        target=0.0019,
        gives=0,
        saying="1,000 + 1,000 tokens of K/V take 2 ms, whatever the chunk",
    )
    expect(
        chunk_for_target,
        PerContext(),
        running=10,
        context=100,
        prompt=1000,
        target=0.0021,
        gives=1000,
        saying="2 ms are within the target, whatever the chunk",
    )


@chunk_size.test("each stream's token is sampled, and the last chunk's last row")
def _(chunk_for_target):
    expect(
        chunk_for_target,
        PerRow(),
        running=10,
        context=5,
        prompt=40,
        target=0.0105,
        gives=0,
        saying="eleven rows take 11 ms: ten streams, and the first token of the prompt's answer",
    )


# ---- 11.2

policy = Exercise("11.2", "ShortestWithAgeing", "Shortest first, and nobody starves")


def _sequence(name: str, prompt: int, *, arrival: int, step: int, cached: int = 0, last_step: int = -1):
    """A WAITING sequence, or a PREFILLING one when part of it is cached."""
    from ..sequence import PREFILLING, Sequence

    sequence = Sequence(name, [1] * prompt, arrival=arrival, arrival_step=step)
    if cached:
        sequence.cached_token_count, sequence.last_step = cached, last_step
        sequence.transition_to(PREFILLING)
    return sequence


def _order(make, prefilling: list, waiting: list, step: int, max_age: int = 10) -> tuple[list[str], str]:
    """Names in the order that the policy gives, and the call in words."""
    lists = list(prefilling), list(waiting)
    answer = make(max_age).order(*lists, step)
    words = [
        f"{s.request_id}: {s.status.name}, {s.remaining_token_count} of {len(s.prompt_token_ids)} tokens left, came in step {s.arrival_step}"
        for s in [*prefilling, *waiting]
    ]
    given = f"step {step}, max_age={max_age}\n" + "\n".join(words)
    if answer is None or not hasattr(answer, "__iter__"):
        raise Wrong("a list of the sequences, in the order in which they are served", given=given, got=answer)
    if lists != (list(prefilling), list(waiting)):
        raise Wrong(
            "the engine's lists are not yours to change: make a new one",
            given=given,
            got=f"afterwards prefilling is {[s.request_id for s in lists[0]]}, waiting {[s.request_id for s in lists[1]]}",
        )
    answer = list(answer)
    strangers = [item for item in answer if not any(item is s for s in [*prefilling, *waiting])]
    if strangers:
        raise Wrong("a list of the sequences that it was given", given=given, got=strangers)
    return [s.request_id for s in answer], given


@policy.test("nobody waits")
def _(ShortestWithAgeing):
    names, given = _order(ShortestWithAgeing, [], [], 5)
    require(names == [], "nobody to order", given=given, got=f"order {names}")


@policy.test("the shortest is served first")
def _(ShortestWithAgeing):
    waiting = [
        _sequence("long", 300, arrival=0, step=5),
        _sequence("short", 20, arrival=1, step=5),
        _sequence("middle", 90, arrival=2, step=5),
    ]
    names, given = _order(ShortestWithAgeing, [], waiting, 6)
    require(
        names[:1] == ["short"] and sorted(names) == ["long", "middle", "short"],
        "everyone, the one with the fewest tokens first",
        given=given,
        got=f"order {names}",
    )
    require(names == ["short", "middle", "long"], "then the next shortest", given=given, got=f"order {names}")


@policy.test("the lists that it gets stay as they are")
def _(ShortestWithAgeing):
    prefilling = [_sequence("half", 25, arrival=2, step=5, cached=20, last_step=6)]
    _order(ShortestWithAgeing, prefilling, [_sequence("long", 90, arrival=0, step=5), _sequence("short", 20, arrival=1, step=5)], 7)
    old = [_sequence("old", 90, arrival=0, step=5), _sequence("young", 20, arrival=1, step=29)]
    _order(ShortestWithAgeing, [], old, 30)


@policy.test("half-filled requests are ordered among the waiting ones")
def _(ShortestWithAgeing):
    prefilling = [_sequence("half", 45, arrival=0, step=5, cached=15, last_step=6)]
    waiting = [_sequence("new", 50, arrival=1, step=6), _sequence("tiny", 10, arrival=2, step=6)]
    names, given = _order(ShortestWithAgeing, prefilling, waiting, 7)
    require("half" in names, "the half-filled one is served as well", given=given, got=f"order {names}", concept="C6")
    require(
        names[-1:] != ["half"],
        "it has fewer tokens left than a newcomer, and goes before it",
        given=given,
        got=f"order {names}",
        concept="C6",
    )
    require(
        names == ["tiny", "half", "new"],
        "the task asks what is left to prefill, not who is half-filled",
        given=given,
        got=f"order {names}",
    )


@policy.test("short is who has little left, not whose prompt was short", concept="A2")
def _(ShortestWithAgeing):
    prefilling = [_sequence("almost done", 300, arrival=0, step=5, cached=290, last_step=6)]
    names, given = _order(ShortestWithAgeing, prefilling, [_sequence("new", 50, arrival=1, step=6)], 7)
    require(names == ["almost done", "new"], "10 tokens are fewer than 50", given=given, got=f"order {names}")


@policy.test("whoever is max_age steps old goes before all younger ones", concept="C6")
def _(ShortestWithAgeing):
    waiting = [_sequence("old", 300, arrival=0, step=5), _sequence("short", 20, arrival=1, step=14)]
    names, given = _order(ShortestWithAgeing, [], waiting, 15)
    require(names == ["old", "short"], "10 steps have gone by since the old one came", given=given, got=f"order {names}")


@policy.test("age counts from the arrival, not from the last chunk", concept="C13")
def _(ShortestWithAgeing):
    prefilling = [_sequence("old", 300, arrival=0, step=5, cached=100, last_step=19)]
    names, given = _order(ShortestWithAgeing, prefilling, [_sequence("short", 20, arrival=1, step=19)], 20)
    require(
        names == ["old", "short"],
        "the old one had a chunk in step 19, and is 15 steps old all the same",
        given=given,
        got=f"order {names}",
    )


@policy.test("a step earlier it isn't old yet")
def _(ShortestWithAgeing):
    waiting = [_sequence("nearly old", 300, arrival=0, step=5), _sequence("short", 20, arrival=1, step=13)]
    names, given = _order(ShortestWithAgeing, [], waiting, 14)
    require(names == ["short", "nearly old"], "9 steps old, with max_age=10", given=given, got=f"order {names}")


@policy.test("the old ones among themselves: in order of arrival")
def _(ShortestWithAgeing):
    waiting = [_sequence("older and shorter", 20, arrival=1, step=6), _sequence("oldest", 300, arrival=0, step=5)]
    names, given = _order(ShortestWithAgeing, [], waiting, 30)
    require(
        names == ["oldest", "older and shorter"],
        "old is old: now the arrival counts, not the length",
        given=given,
        got=f"order {names}",
    )


@policy.test("in the real engine, a long prompt has its first token in time, while short ones keep coming", concept="C6")
def _(ShortestWithAgeing):
    from ..config import EngineConfig, SamplingParams
    from ..engine import Engine
    from ..runners.fake import FakeRunner

    runner = FakeRunner()
    config = EngineConfig(max_num_batched_tokens=32, max_num_seqs=16, max_prefill_chunk_size=16, policy=ShortestWithAgeing(10))
    engine, bound = Engine(runner, config), 10 + 160 // 16 + 5
    engine.add_request([2] * 160, SamplingParams(max_tokens=1), request_id="long")
    for step in range(120):
        for newcomer in range(2):  # together as many tokens as a step has
            engine.add_request(
                [3 + step] * (15 + newcomer), SamplingParams(max_tokens=1), request_id=f"short {step}.{newcomer}"
            )
        if any(output.request_id == "long" for output in engine.step()):
            break
    require(
        step <= bound,
        f"after max_age steps it goes first, and its ten chunks take ten steps: within {bound} steps",
        given="a prompt of 160 tokens, two short ones arrive in every step, max_age=10, chunks of 16",
        got=f"its first token came in step {step}" if step < 119 else "no first token within 120 steps",
    )


@policy.test("ties: equally many tokens left, in order of arrival")
def _(ShortestWithAgeing):
    waiting = [_sequence("second", 50, arrival=1, step=5), _sequence("first", 50, arrival=0, step=5)]
    names, given = _order(ShortestWithAgeing, [], waiting, 6)
    require(names == ["first", "second"], "who came earlier goes first", given=given, got=f"order {names}")
