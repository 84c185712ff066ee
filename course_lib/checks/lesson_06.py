"""Checks of lesson 06: counters and states after a step, the end of a request, the order of a step."""

from __future__ import annotations

from ..block_manager import BlockManager
from ..config import EngineConfig, SamplingParams
from ..engine import Engine
from ..runners import FakeRunner
from ..scheduler import ScheduledChunk, Scheduler
from ..sequence import FINISHED, PREFILLING, RUNNING, WAITING, Sequence, SequenceStatus
from .exercise import Exercise, NotDone, Wrong, require


def sequence_of(prompt: int, cached: int = 0, generated: int = 0, status: SequenceStatus = WAITING, name: str = "r") -> Sequence:
    """A request with so many tokens, in the given state."""
    sequence = Sequence(name, list(range(100, 100 + prompt)))
    sequence.generated_token_ids = list(range(generated))
    sequence.cached_token_count = cached
    if status is not WAITING:
        sequence.transition_to(status)
    return sequence


# ---- 06.1

after = Exercise("06.1", "advance", "After the forward pass")


def moved(advance, sequence: Sequence, start: int, count: int) -> tuple[str, str]:
    """Let a chunk be done; returns (the input in words, what came out of it)."""
    length, generated = len(sequence.prompt_token_ids), len(sequence.generated_token_ids)
    given = f"prompt of {length}{f', {generated} generated' if generated else ''}, {sequence.status.name}, {sequence.cached_token_count} cached; "
    given += f"the chunk with the tokens {start} to {start + count - 1} is done"
    kind = "decode" if sequence.status is RUNNING else "prefill"
    is_last = start + count == sequence.known_token_count
    try:
        advance(ScheduledChunk(sequence, start, count, kind, is_last))
    except RuntimeError as refusal:
        if kind != "decode" or isinstance(refusal, NotDone):
            raise
        saying = "a decode doesn't change the state: one that is RUNNING stays so"
        raise Wrong(saying, given=given, got=f"RuntimeError: {refusal}", concept="I8") from None
    return given, f"{sequence.status.name}, {sequence.cached_token_count} cached"


@after.test("the first chunk of several counts", concept="A2")
def _(advance):
    sequence = sequence_of(10)
    given, got = moved(advance, sequence, 0, 4)
    require(sequence.cached_token_count == 4, "the tokens that were computed are cached now", given=given, got=got)


@after.test("two requests take turns", concept="A9")
def _(advance):
    first, second = sequence_of(10, name="Ana"), sequence_of(12, name="Ben")
    for sequence, start, count in ((first, 0, 3), (second, 0, 5), (first, 3, 3), (second, 5, 5)):
        moved(advance, sequence, start, count)
    got = f"Ana {first.cached_token_count} cached, Ben {second.cached_token_count}"
    given = "Ana: chunks of 3 and 3; Ben, between them: 5 and 5"
    require((first.cached_token_count, second.cached_token_count) == (6, 10), "each request has its own progress", given=given, got=got)


@after.test("a half-filled request is PREFILLING", concept="I8")
def _(advance):
    sequence = sequence_of(10)
    given, got = moved(advance, sequence, 0, 4)
    require(sequence.status is PREFILLING, "it has begun, and a part of its prompt is missing", given=given, got=got)
    given, got = moved(advance, sequence, 4, 4)
    require(sequence.status is PREFILLING, "it goes on being in the middle of its prompt", given=given, got=got)


@after.test("the last chunk counts its own tokens, and no more", concept="A1")
def _(advance):
    sequence = sequence_of(10, 8, status=PREFILLING)
    given, got = moved(advance, sequence, 8, 2)
    require(sequence.cached_token_count == 10, "cached are the tokens whose K/V was written: those of the prompt", given=given, got=got)


@after.test("with the last chunk it runs", concept="A5")
def _(advance):
    sequence = sequence_of(10, 8, status=PREFILLING)
    given, got = moved(advance, sequence, 8, 2)
    require(sequence.status is RUNNING, "all of its prompt is cached: it decodes from now on", given=given, got=got)


@after.test("a prompt of one chunk runs at once", concept="A5")
def _(advance):
    sequence = sequence_of(3)
    given, got = moved(advance, sequence, 0, 3)
    require(sequence.status is RUNNING, "it never is in the middle of its prompt", given=given, got=got)


@after.test("a decode counts one token, and changes no state", concept="A1")
def _(advance):
    sequence = sequence_of(10, 10, generated=1, status=RUNNING)
    given, got = moved(advance, sequence, 10, 1)
    require((sequence.status, sequence.cached_token_count) == (RUNNING, 11), "the token that went in has its K/V now", given=given, got=got)


@after.test("after a preemption: its own answer must be cached again before it runs", concept="I8")
def _(advance):
    sequence = sequence_of(6, generated=4)
    given, got = moved(advance, sequence, 0, 6)
    require(sequence.status is PREFILLING, "four of its known tokens have no K/V yet", given=given, got=got)
    given, got = moved(advance, sequence, 6, 4)
    require((sequence.status, sequence.cached_token_count) == (RUNNING, 10), "now all of them have", given=given, got=got)


@after.test("a hit in the prefix cache: the first chunk starts behind it", concept="A2")
def _(advance):
    sequence = sequence_of(20)
    given, got = moved(advance, sequence, 16, 4)
    saying = "where does this chunk end? Everything up to there is in the cache, wherever the chunk began"
    require((sequence.status, sequence.cached_token_count) == (RUNNING, 20), saying, given=given, got=got)


# ---- 06.2

ends = Exercise("06.2", "Ends", "The end, in any state")


class Room:
    """A scheduler of the learner's class with one request in each of the three states, in a pool of 16 blocks of 4."""

    def __init__(self, scheduler: type) -> None:
        config = EngineConfig(block_size=4, num_blocks=16, enable_prefix_caching=False)
        self.blocks = BlockManager(16, 4)
        self.scheduler = scheduler(config, self.blocks)
        self.waits = sequence_of(10, name="waits")
        self.half = self._holder("half", 12, 8, 0, PREFILLING, self.scheduler.prefilling)
        self.runs = self._holder("runs", 10, 10, 1, RUNNING, self.scheduler.running)
        self.scheduler.waiting.append(self.waits)

    def _holder(self, name, prompt, cached, generated, status, queue) -> Sequence:
        sequence = sequence_of(prompt, cached, generated, status, name)
        self.blocks.allocate(sequence, cached)
        queue.append(sequence)
        return sequence

    @property
    def queues(self) -> dict[str, list[str]]:
        lists = {"waiting": self.scheduler.waiting, "prefilling": self.scheduler.prefilling, "running": self.scheduler.running}
        return {name: [sequence.request_id for sequence in queue] for name, queue in lists.items()}

    def require(self, condition, saying: str, sequence: Sequence, deed: str) -> None:
        got = f"it is {sequence.status.name} with {len(sequence.block_table)} blocks, {sequence.cached_token_count} cached; queues {self.queues}; "
        got += f"{self.blocks.num_free} blocks free"
        require(condition, saying, given=deed, got=got)


@ends.test("a request that runs comes to its end")
def _(scheduler):
    room = Room(scheduler)
    room.scheduler.finish(room.runs, "length")
    deed = 'finish(a RUNNING request, "length")'
    room.require(room.runs.status is FINISHED, "it is FINISHED", room.runs, deed)
    room.require(room.runs.finish_reason == "length", "it knows why", room.runs, deed)
    room.require(room.queues == {"waiting": ["waits"], "prefilling": ["half"], "running": []}, "no queue holds it; the others stay", room.runs, deed)
    room.require(room.blocks.num_free == 14, "its three blocks are free again", room.runs, deed)


@ends.test("cancelled in the middle of its prompt", concept="L2")
def _(scheduler):
    room = Room(scheduler)
    room.scheduler.finish(room.half, "cancelled")
    deed = 'finish(a PREFILLING request with 8 cached tokens, "cancelled")'
    room.require(room.blocks.num_free == 13, "the blocks that it held are free again", room.half, deed)
    room.require(room.half.status is FINISHED and not room.queues["prefilling"], "it has left its queue", room.half, deed)


@ends.test("cancelled while it waits", concept="L1")
def _(scheduler):
    room = Room(scheduler)
    room.scheduler.finish(room.waits, "cancelled")
    deed = 'finish(a WAITING request, "cancelled")'
    room.require(room.queues["waiting"] == [], "it is in no queue: nobody will ever run it", room.waits, deed)
    room.require(room.waits.status is FINISHED and room.blocks.num_free == 11, "it has ended, and no block changed hands", room.waits, deed)


@ends.test("preempted while it runs")
def _(scheduler):
    room = Room(scheduler)
    room.scheduler.preempt(room.runs)
    deed = "preempt(a RUNNING request)"
    room.require(room.runs.status is WAITING and room.blocks.num_free == 14, "it waits, and its three blocks are free", room.runs, deed)
    room.require(room.queues == {"waiting": ["runs", "waits"], "prefilling": ["half"], "running": []}, "it is at the front of those who wait", room.runs, deed)
    room.require(len(room.runs.prompt_token_ids) == 10 and room.runs.generated_token_ids == [0], "its tokens are kept", room.runs, deed)
    room.require(room.runs.num_preemptions == 1, "num_preemptions is 1", room.runs, deed)


@ends.test("preempted in the middle of its prompt", concept="B7")
def _(scheduler):
    room = Room(scheduler)
    room.scheduler.preempt(room.half)
    deed = "preempt(a PREFILLING request with 8 cached tokens)"
    room.require(room.blocks.num_free == 13, "the blocks that it held are free again", room.half, deed)
    room.require(room.half.status is WAITING and room.queues["prefilling"] == [], "it waits", room.half, deed)


@ends.test("what a preempted request remembers", concept="A7")
def _(scheduler):
    for state in ("runs", "half"):
        room = Room(scheduler)
        sequence = getattr(room, state)
        room.scheduler.preempt(sequence)
        room.require(sequence.cached_token_count == 0, "nothing of it is in the cache any more", sequence, f"preempt({state})")
        room.require(sequence.remaining_token_count == sequence.known_token_count, "all its tokens are to be computed", sequence, f"preempt({state})")


@ends.test("in the real engine: nothing leaks, and every token is right")
def _(scheduler):
    config = EngineConfig(block_size=4, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=16, max_prefill_chunk_size=6,
                          enable_prefix_caching=False)  # fmt: skip
    runner = FakeRunner()
    engine = Engine(runner, config, scheduler=scheduler)
    prompts = {f"r{n}": [n] * (6 + 3 * n) for n in range(6)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(max_tokens=9), request_id=name)
    got: dict[str, list[int]] = {name: [] for name in prompts}
    given = "six requests in a pool of 12 blocks of 4; two are cancelled"
    for step in range(300):
        for output in engine.step():
            got[output.request_id] += output.new_token_ids
        try:
            engine.check_invariants()
        except AssertionError as complaint:
            raise Wrong("the engine's books are right after every step", given=given, got=f"step {step}: {complaint}") from None
        if step in (1, 3):
            engine.cancel(f"r{step}")
    require(not engine.has_unfinished_requests(), "every request ends", given=given, got=f"after 300 steps: {sorted(engine.snapshot())}")
    require(engine.block_manager.num_free == 12, "all blocks are free in the end", given=given, got=f"{engine.block_manager.num_free} of 12")
    for name in ("r0", "r2", "r4", "r5"):
        require(got[name] == runner.solo(prompts[name], 9), "its tokens are those of a run alone, each once", given=given, got=f"{name} differs")


# ---- 06.3

order = Exercise("06.3", "one_step", "The order of a step")


class Broken(RuntimeError):
    """What the check's model raises."""


def desk() -> tuple[Scheduler, BlockManager, Sequence]:
    """A real scheduler with one request of 10 prompt tokens, chunks of 4, blocks of 4."""
    config = EngineConfig(block_size=4, num_blocks=16, max_prefill_chunk_size=4, enable_prefix_caching=False)
    blocks = BlockManager(16, 4)
    scheduler, sequence = Scheduler(config, blocks), sequence_of(10)
    scheduler.add(sequence)
    return scheduler, blocks, sequence


def fail(plan):
    raise Broken("device out of memory")


def broken(one_step, scheduler) -> str:
    """Run a step whose model raises; says what reached the caller."""
    try:
        result = one_step(scheduler, fail)
    except Broken:
        return "the error"
    return f"{result!r} instead of the error"


@order.test("a step that works: planned, computed, counted")
def _(one_step):
    scheduler, _, sequence = desk()
    seen = []
    result = one_step(scheduler, lambda plan: seen.append([tuple(chunk[1:3]) for chunk in plan.chunks]) or ["sample"])
    given = "prompt 10, chunks of 4, the first step"
    require(seen == [[(0, 4)]], "the model runs once, on what was planned", given=given, got=f"the model got {seen}")
    require(result == ["sample"], "the model's samples are returned", given=given, got=result)
    require((sequence.cached_token_count, sequence.status) == (4, PREFILLING), "and the chunk counts", given=given, got=repr(sequence))
    require(scheduler.step == 1, "one step has been made", given=given, got=f"scheduler.step is {scheduler.step}")


@order.test("while the model runs, its chunk doesn't count yet", concept="A4")
def _(one_step):
    scheduler, _, sequence = desk()
    seen = []
    one_step(scheduler, lambda plan: seen.append(sequence.cached_token_count) or [])
    require(seen == [0], "nothing is in the cache before the model has computed it", given="prompt 10, the first chunk of 4",
            got=f"cached_token_count was {seen} while the model ran")  # fmt: skip


@order.test("the model raises: the counters are as before", concept="A4")
def _(one_step):
    scheduler, _, sequence = desk()
    one_step(scheduler, lambda plan: [])
    broken(one_step, scheduler)
    require((sequence.cached_token_count, sequence.status) == (4, PREFILLING), "the second chunk was not computed, and doesn't count",
            given="the first chunk of 4 works, the model raises at the second", got=repr(sequence))  # fmt: skip


@order.test("the model raises: the blocks of the step go back", concept="L4")
def _(one_step):
    scheduler, blocks, sequence = desk()
    given = "the model raises in the first step"
    broken(one_step, scheduler)
    got = f"{blocks.num_free} of 16 blocks free, the request holds {sequence.block_table}"
    require(blocks.num_free == 16 and sequence.status is WAITING, "nothing is cached, so nothing is held", given=given, got=got)


@order.test("the model raises: the caller hears of it")
def _(one_step):
    scheduler, *_ = desk()
    heard = broken(one_step, scheduler)
    require(heard == "the error", "what the model raised reaches the caller", given="the model raises in the first step", got=f"the caller got {heard}")


@order.test("the next step does the same work again", concept="A4")
def _(one_step):
    scheduler, _, sequence = desk()
    seen = []
    broken(one_step, scheduler)
    for _ in range(3):
        one_step(scheduler, lambda plan: seen.append(tuple(plan.chunks[0][1:3])) or [])
        if len(seen) == 1:
            broken(one_step, scheduler)
    require(seen == [(0, 4), (4, 4), (8, 2)], "every chunk is computed, once", given="the model raises in the first and in the third call",
            got=f"chunks computed (start, tokens): {seen}")  # fmt: skip
    require(sequence.status is RUNNING and sequence.cached_token_count == 10, "the prompt is complete", got=repr(sequence))
