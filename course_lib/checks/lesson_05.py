"""Checks of lesson 05: a scheduler that counts tokens, and the longest gap."""

from __future__ import annotations

from ..block_manager import BlockManager
from ..config import EngineConfig, SamplingParams
from ..engine import Engine
from ..runners import FakeRunner
from ..sequence import RUNNING, Sequence
from ..trace import RequestRecord, StepRecord, Trace
from .exercise import Exercise, expect, require, shown

# ---- 05.1

whole_prompts = Exercise("05.1", "WholePrompts", "A scheduler that counts tokens")


class Desk:
    """A scheduler of the learner's class with requests that run and that wait, and what it planned.

    run, wait   prompt lengths; they are called run0, run1 … and wait0, wait1 …
    """

    def __init__(self, scheduler: type, *, budget: int, run=(), wait=(), seats: int | None = None, blocks: int = 64) -> None:
        seats = min(budget, 8) if seats is None else seats
        config = EngineConfig(block_size=4, num_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=seats,
                              max_prefill_chunk_size=None, enable_prefix_caching=False)  # fmt: skip
        self.blocks = BlockManager(blocks, 4)
        self.scheduler = scheduler(config, self.blocks)
        self.sequences = []
        for number, length in enumerate(run):
            sequence = Sequence(f"run{number}", list(range(length)), arrival=number)
            self.blocks.allocate(sequence, length)
            sequence.cached_token_count = length
            sequence.generated_token_ids.append(7)
            sequence.transition_to(RUNNING)
            self.scheduler.running.append(sequence)
            self.sequences.append(sequence)
        for number, length in enumerate(wait):
            sequence = Sequence(f"wait{number}", list(range(length)), arrival=10 + number)
            self.scheduler.waiting.append(sequence)
            self.sequences.append(sequence)
        seated = f", {seats} seats" if seats < 8 and seats != budget else ""
        pool = f", {self.blocks.num_free} of {blocks} blocks of 4 free" if blocks < 64 else ""
        self.given = f"budget {budget}{seated}{pool}; running: {len(run)}; waiting prompts: {', '.join(map(str, wait)) or 'none'}"
        before = list(self.scheduler.running), list(self.scheduler.waiting)
        self.plan = self.scheduler.schedule()
        require(hasattr(self.plan, "chunks"), "schedule() returns its SchedulerOutput", given=self.given, got=f"returned {shown(self.plan)}")
        self.require((list(self.scheduler.running), list(self.scheduler.waiting)) == before,
                     "both lists are left as they are: schedule() only plans, the engine moves sequences")  # fmt: skip

    @property
    def tokens(self) -> dict[str, int]:
        """Request -> tokens in the plan."""
        return {chunk[0].request_id: int(chunk[2]) for chunk in self.plan.chunks}

    @property
    def said(self) -> str:
        return "planned " + (", ".join(f"{name}: {count}" for name, count in self.tokens.items()) or "nothing")

    def require(self, condition, saying: str, concept: str | None = None) -> None:
        require(condition, saying, given=self.given, got=self.said, concept=concept)


@whole_prompts.test("one prompt that waits goes in whole")
def _(scheduler):
    desk = Desk(scheduler, budget=64, wait=[3])
    desk.require(desk.tokens == {"wait0": 3}, "a prompt of 3 tokens is computed in one chunk of 3")
    sequence, start, _, kind, is_last = desk.plan.chunks[0]
    desk.require((start, kind, bool(is_last)) == (0, "prefill", True), "its chunk starts at 0, is a prefill, and is its last one")
    desk.require([s.request_id for s in desk.plan.admitted] == ["wait0"], "it stands in plan.admitted")
    desk.require(len(sequence.block_table) == 1, "it has the block that it will write to")


@whole_prompts.test("whoever runs gets one token, at the right place")
def _(scheduler):
    desk = Desk(scheduler, budget=64, run=[8, 5])
    desk.require(desk.tokens == {"run0": 1, "run1": 1}, "each request that runs gets one token")
    places = {chunk[0].request_id: chunk[1] for chunk in desk.plan.chunks}
    desk.require(places == {"run0": 8, "run1": 5}, "a decode is at the position of the one token that has no K/V")
    held = [len(sequence.block_table) for sequence in desk.sequences]
    desk.require(held == [3, 2], "a decode has the block that it will write to: 8 tokens fill two blocks of 4, the ninth needs a third")


@whole_prompts.test("a prompt arrives, and those who run get their token all the same", concept="C1")
def _(scheduler):
    desk = Desk(scheduler, budget=64, run=[5, 6], wait=[4])
    desk.require(desk.tokens == {"run0": 1, "run1": 1, "wait0": 4}, "there is room in the step for two decodes and the prompt")


@whole_prompts.test("the prompt fits the budget, but not what the decodes leave of it", concept="C3")
def _(scheduler):
    desk = Desk(scheduler, budget=10, run=[5, 6, 7], wait=[8])
    decodes = {name for name in desk.tokens if name.startswith("run")}
    desk.require(len(decodes) == 3, "each of the three that run gets its token, whoever waits", concept="C2")
    if "wait0" in desk.tokens:  # was it compared with the budget, or weren't its tokens counted at all?
        counted = "wait0" not in Desk(scheduler, budget=10, run=[5], wait=[15]).tokens
        desk.require(False, "the step doesn't get larger than its budget: the prompt waits", concept=None if counted else "C4")


@whole_prompts.test("a prompt longer than the whole budget, while somebody runs", concept="C4")
def _(scheduler):
    desk = Desk(scheduler, budget=10, run=[5], wait=[15])
    desk.require("run0" in desk.tokens, "who runs gets a token, whoever waits", concept="C2")
    desk.require("wait0" not in desk.tokens, "two requests, but 16 tokens: the prompt waits until the step is empty")


@whole_prompts.test("a prompt longer than the whole budget, behind one that goes in", concept="C3")
def _(scheduler):
    desk = Desk(scheduler, budget=10, wait=[2, 15])
    desk.require(desk.tokens == {"wait0": 2}, "nobody runs, but the step isn't empty any more: the long prompt waits")


@whole_prompts.test("two prompts that fit one by one, but not together", concept="C4")
def _(scheduler):
    desk = Desk(scheduler, budget=10, wait=[6, 6])
    desk.require(desk.tokens == {"wait0": 6}, "the second prompt isn't in this step")


@whole_prompts.test("a prompt fits exactly into what is left", concept="C3")
def _(scheduler):
    desk = Desk(scheduler, budget=10, run=[5, 6], wait=[8])
    desk.require(desk.tokens == {"run0": 1, "run1": 1, "wait0": 8}, "two decodes and 8 prompt tokens are a full step of 10")


@whole_prompts.test("more requests run than the budget has tokens", concept="C3")
def _(scheduler):
    desk = Desk(scheduler, budget=3, run=[5, 6, 7, 9], wait=[2], seats=3)
    desk.require(sum(desk.tokens.values()) <= 3, "the step doesn't get larger than its budget")


@whole_prompts.test("the seats count those that run", concept="C18")
def _(scheduler):
    desk = Desk(scheduler, budget=32, run=[5, 6], wait=[3, 3, 3], seats=4)
    desk.require(desk.tokens == {"run0": 1, "run1": 1, "wait0": 3, "wait1": 3}, "four seats: two are taken, two prompts go in")


@whole_prompts.test("the tokens fit, the blocks don't", concept="C9")
def _(scheduler):
    desk = Desk(scheduler, budget=32, run=[7], wait=[12], blocks=4)
    desk.require(desk.tokens == {"run0": 1}, "nothing is planned for a prompt that can't have all its blocks")
    desk.require(desk.blocks.num_free == 2 and not desk.sequences[1].block_table, "and it has taken none")


@whole_prompts.test("blocks for either the decode or the prompt", concept="C2")
def _(scheduler):
    desk = Desk(scheduler, budget=32, run=[8], wait=[8], blocks=4)
    desk.require(desk.tokens == {"run0": 1}, "who runs takes its third block first; the prompt's two blocks aren't there any more")


@whole_prompts.test("a prompt that doesn't go in takes no blocks", concept="B7")
def _(scheduler):
    saying = "the prompt waits, and who waits holds no blocks"
    desk = Desk(scheduler, budget=10, run=[5], wait=[12])
    desk.require(desk.tokens == {"run0": 1} and not desk.sequences[1].block_table, saying)
    desk = Desk(scheduler, budget=10, run=[5], wait=[3], seats=1)
    desk.require(desk.tokens == {"run0": 1} and not desk.sequences[1].block_table, saying)


@whole_prompts.test("nobody passes a head that has no blocks", concept="C9")
def _(scheduler):
    desk = Desk(scheduler, budget=32, run=[7], wait=[12, 4], blocks=4)
    desk.require(desk.tokens == {"run0": 1}, "the prompt of 4 would fit, but an older one waits for blocks before it")


@whole_prompts.test("a decode needs a block, and none is free", concept="C9")
def _(scheduler):
    desk = Desk(scheduler, budget=32, run=[8, 7], blocks=4)
    desk.require(desk.tokens == {"run1": 1}, "who has no slot for its token gets none in this step; the others do")


@whole_prompts.test("a prompt longer than the whole budget, and nobody runs", concept="C8")
def _(scheduler):
    desk = Desk(scheduler, budget=10, wait=[15, 2])
    desk.require("wait0" in desk.tokens, "it isn't left waiting for ever: an empty step takes it")
    desk.require(desk.tokens == {"wait0": 15}, "it goes in whole, and alone")


@whole_prompts.test("nobody passes the one at the head")
def _(scheduler):
    desk = Desk(scheduler, budget=10, run=[5], wait=[12, 2])
    desk.require(desk.tokens == {"run0": 1}, "the prompt of 2 would fit, but an older one waits before it")


@whole_prompts.test("in the real engine everybody gets the tokens that they would get alone")
def _(scheduler):
    config = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=3, max_num_batched_tokens=24, max_prefill_chunk_size=None,
                          enable_prefix_caching=False)  # fmt: skip
    runner = FakeRunner()
    engine = Engine(runner, config, scheduler=scheduler)
    prompts = {f"r{n}": [n] * length for n, length in enumerate((9, 20, 3, 24, 5))}
    for name, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(max_tokens=5), request_id=name)
    got: dict[str, list[int]] = {name: [] for name in prompts}
    for _ in range(200):
        for output in engine.step():
            got[output.request_id] += output.new_token_ids
        engine.check_invariants()
    given = "five prompts of 9, 20, 3, 24 and 5 tokens, budget 24, 3 seats"
    for name, prompt in prompts.items():
        require(len(got[name]) == 5, "every request gets its 5 tokens", given=given, got=f"{name} got {len(got[name])} in 200 steps")
        require(got[name] == runner.solo(prompt, 5), "its tokens are those of a run alone", given=given, got=f"{name} differs")


# ---- 05.2

stall = Exercise("05.2", "longest_gaps", "The longest gap")


def trace_of(ends: list[float], token_id: int = 5, **tokens: list[int]) -> Trace:
    """A trace: when each step ends, and in which steps (by number) each request gets a token."""
    trace = Trace()
    for name in tokens:
        trace.requests[name] = RequestRecord(name, name, 3, 9, 0.0, 0)
    begin = 0.0
    for number, end in enumerate(ends):
        got = {name: token_id for name, steps in tokens.items() if number in steps}
        trace.steps.append(StepRecord(index=number, start=begin, end=end, tokens=got))
        begin = end
    return trace


def ask(longest_gaps, ends: list[float], gives: dict, saying: str, token_id: int = 5, **tokens: list[int]) -> None:
    lines = "; ".join(f"{name} gets the token {token_id} in the steps {steps}" for name, steps in tokens.items())
    given = f"steps that end at {ends}; {lines}"
    got = longest_gaps(trace_of(ends, token_id, **tokens))

    def identity():
        return got

    try:
        expect(identity, gives=gives, saying=saying)
    except Exception as wrong:
        wrong.given = given
        raise


@stall.test("one request, a token in every step")
def _(longest_gaps):
    ask(longest_gaps, [1.0, 2.0, 5.0, 6.0], {"Ana": 3.0}, "the longest time between two tokens, in seconds", Ana=[0, 1, 2, 3])


@stall.test("a token whose id is 0 is a token too")
def _(longest_gaps):
    ask(longest_gaps, [1.0, 3.0], {"Ana": 2.0}, "whoever has an entry in step.tokens got a token, whatever its id", token_id=0, Ana=[0, 1])


@stall.test("the time to the first token is no gap")
def _(longest_gaps):
    ask(longest_gaps, [9.0, 10.0, 11.5], {"Ana": 1.5}, "a gap lies between two tokens; before the first there is none", Ana=[0, 1, 2])


@stall.test("two requests, each with its own gaps")
def _(longest_gaps):
    ask(longest_gaps, [1.0, 2.0, 4.0, 5.0], {"Ana": 2.0, "Ben": 3.0}, "a gap is between two tokens of the same request",
        Ana=[0, 1, 2, 3], Ben=[1, 3])  # fmt: skip


@stall.test("preempted in between: that is a wait too")
def _(longest_gaps):
    ask(longest_gaps, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], {"Ben": 4.0}, "steps without a token of this request are a part of its gap", Ben=[0, 1, 5])


@stall.test("not the mean, not the last one")
def _(longest_gaps):
    ends = [1.0, 2.0, 3.0, 60.0, *(60.0 + n for n in range(1, 30))]
    ask(longest_gaps, ends, {"Ana": 57.0}, "one long gap among many short ones is what the reader felt", Ana=list(range(len(ends))))


@stall.test("fewer than two tokens: there is no gap")
def _(longest_gaps):
    ask(longest_gaps, [1.0, 2.0], {"Ana": None, "Ben": None}, "None for one token, and for none", Ana=[1], Ben=[])


@stall.test("a real run agrees")
def _(longest_gaps):
    config = EngineConfig(block_size=4, num_blocks=12, max_num_batched_tokens=32, max_num_seqs=8, max_prefill_chunk_size=8,
                          enable_prefix_caching=False)  # fmt: skip
    engine = Engine(FakeRunner(), config)
    for number in range(4):
        engine.add_request([number] * (5 + number), SamplingParams(max_tokens=9), request_id=f"r{number}")
    while engine.has_unfinished_requests():
        engine.step()
    times = engine.trace.token_times()
    pairs = {name: [times[name][i] - times[name][i - 1] for i in range(1, len(times[name]))] for name in times}
    expect(lambda: longest_gaps(engine.trace), gives={name: max(gaps) for name, gaps in pairs.items()},
           saying="four requests in a pool that is too small for all: some were preempted")  # fmt: skip
