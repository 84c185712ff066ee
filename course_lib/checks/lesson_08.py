"""Checks of lesson 08: how long a chunk is, who gets one, whose turn it is. And the puzzle of its lesson."""

from __future__ import annotations

from ..block_manager import BlockManager
from ..config import EngineConfig, SamplingParams
from ..engine import Engine
from ..runners.fake import FakeRunner
from ..sequence import PREFILLING, RUNNING, Sequence
from .exercise import Exercise, Wrong, expect, require, shown

# ---- 08.1 -----------------------------------------------------------------------------------------

length = Exercise("08.1", "chunk_length", "How long the next chunk is")
ROOMY = {"free_blocks": 99, "max_chunk": 32, "block_size": 16}


@length.test("a short rest goes in whole")
def _(chunk_length):
    expect(chunk_length, remaining=5, cached=0, tokens_left=64, **ROOMY, gives=5, saying="the 5 tokens that remain")
    expect(
        chunk_length,
        remaining=7,
        cached=64,
        tokens_left=64,
        **ROOMY,
        gives=7,
        saying="the 7 tokens that remain, wherever they begin",
    )


@length.test("never more than the chunk size")
def _(chunk_length):
    expect(chunk_length, remaining=100, cached=0, tokens_left=64, **ROOMY, gives=32, saying="as much as one chunk may have")


@length.test("never more than what is left of the step", concept="C3")
def _(chunk_length):
    got = chunk_length(remaining=100, cached=0, tokens_left=24, **ROOMY)
    require(
        got <= 24,
        "no more tokens than the budget still has",
        given="remaining=100, tokens_left=24, max_chunk=32",
        got=f"returned {shown(got)}",
    )


@length.test("a prompt longer than what is left gets a piece of it", concept="C8")
def _(chunk_length):
    expect(
        chunk_length,
        remaining=100,
        cached=0,
        tokens_left=24,
        **ROOMY,
        gives=24,
        saying="what is left of the budget is used",
    )
    expect(chunk_length, remaining=30, cached=70, tokens_left=1, **ROOMY, gives=1, saying="one token is a chunk, too")


@length.test("no tokens left, no chunk", concept="C17")
def _(chunk_length):
    expect(chunk_length, remaining=100, cached=0, tokens_left=0, **ROOMY, gives=0, saying="0: nothing is scheduled")
    expect(chunk_length, remaining=3, cached=16, tokens_left=0, **ROOMY, gives=0, saying="0: nothing is scheduled")


@length.test("the free part of the last block counts", concept="C10")
def _(chunk_length):
    roomless = {"free_blocks": 0, "max_chunk": 32, "block_size": 16}
    expect(
        chunk_length,
        remaining=5,
        cached=8,
        tokens_left=64,
        **roomless,
        gives=5,
        saying="the 5 tokens fit into the 8 free slots of the block that it holds",
    )
    expect(
        chunk_length,
        remaining=24,
        cached=8,
        tokens_left=64,
        **(roomless | {"free_blocks": 1}),
        gives=24,
        saying="8 slots are there, and one new block is free",
    )
    expect(
        chunk_length,
        remaining=256,
        cached=264,
        tokens_left=999,
        free_blocks=16,
        max_chunk=256,
        block_size=16,
        gives=256,
        saying="the worked number above: 16 new blocks, and 16 are free",
    )


@length.test("a chunk whose blocks aren't free isn't scheduled", concept="C9")
def _(chunk_length):
    roomless = {"free_blocks": 0, "max_chunk": 32, "block_size": 16}
    expect(
        chunk_length,
        remaining=5,
        cached=16,
        tokens_left=64,
        **roomless,
        gives=0,
        saying="its blocks are full and none is free",
    )
    expect(
        chunk_length,
        remaining=32,
        cached=0,
        tokens_left=64,
        **(roomless | {"free_blocks": 1}),
        gives=0,
        saying="two new blocks are needed and one is free: nothing in this step, not even a shorter chunk",
    )
    expect(
        chunk_length,
        remaining=25,
        cached=8,
        tokens_left=64,
        **(roomless | {"free_blocks": 1}),
        gives=0,
        saying="the 25th token needs a second new block",
    )


# ---- 08.2 -----------------------------------------------------------------------------------------

steps = Exercise("08.2", "MyScheduler", "One step, three budgets")


def at_work(
    scheduler: type,
    *,
    budget: int = 64,
    chunk: int = 64,
    seqs: int = 8,
    blocks: int = 64,
    running=(),
    prefilling=(),
    waiting=(),
):
    """A scheduler in the middle of its work. running: (name, prompt); prefilling: (name, prompt, cached); waiting: (name, prompt)."""
    config = EngineConfig(num_blocks=blocks, max_num_batched_tokens=budget, max_prefill_chunk_size=chunk, max_num_seqs=seqs,
                          enable_prefix_caching=False, kv_watermark=0.0)  # fmt: skip
    made = scheduler(config, BlockManager(blocks, config.block_size))
    begun = [(name, prompt, prompt) for name, prompt in running] + list(prefilling)
    for arrival, (name, prompt, *cached) in enumerate([*begun, *waiting]):
        sequence = Sequence(name, [3] * prompt, SamplingParams(max_tokens=99), arrival=arrival)
        made.add(sequence)
        if cached:
            made.waiting.remove(sequence)
            made.block_manager.allocate(sequence, cached[0])
            sequence.cached_token_count = cached[0]
            sequence.transition_to(RUNNING if cached[0] == prompt else PREFILLING)
            (made.running if cached[0] == prompt else made.prefilling).append(sequence)
            if cached[0] == prompt:
                sequence.generated_token_ids.append(5)
    return made


def in_words(made) -> str:
    config = made.config
    parts = [f"budget {config.max_num_batched_tokens} tokens, chunk size {config.max_prefill_chunk_size}, "
             f"{config.max_num_seqs} sequences, {made.block_manager.num_free} of {made.block_manager.num_blocks} blocks free"]  # fmt: skip
    for name, queue in (("RUNNING", made.running), ("PREFILLING", made.prefilling), ("WAITING", made.waiting)):
        if queue:
            parts.append(
                f"{name}: "
                + ", ".join(
                    f"{s.request_id} ({s.cached_token_count} of {len(s.prompt_token_ids)} prompt tokens cached)"
                    for s in queue
                )
            )
    return "\n".join(parts)


class Step:
    """What the learner's schedule() chose: {name: tokens}, and how to complain about it."""

    def __init__(self, made) -> None:
        self.given = in_words(made)
        queues = [[s.request_id for s in queue] for queue in (made.running, made.prefilling, made.waiting)]
        out = made.schedule()
        chunks = getattr(out, "chunks", None)
        require(
            chunks is not None, "schedule() returns the SchedulerOutput", given=self.given, got=f"returned {shown(out)}"
        )
        self.tokens = {chunk[0].request_id: chunk[2] for chunk in chunks}
        self.got = "scheduled " + (", ".join(f"{chunk[0].request_id}: {chunk[2]}" for chunk in chunks) or "nothing")
        self.total = sum(chunk[2] for chunk in chunks)
        self.tables = {s.request_id: list(s.block_table) for s in made.running + made.prefilling + made.waiting}
        after = [[s.request_id for s in queue] for queue in (made.running, made.prefilling, made.waiting)]
        self.require(
            after == queues, "the queues are as they were: the engine moves requests, after the forward pass", "C13"
        )
        self.require(all(chunk[2] > 0 for chunk in chunks), "a chunk has at least one token", "C17")
        self.require(len(self.tokens) == len(chunks), "one chunk a request", None)
        for sequence, start, size, *_ in chunks:
            self.require(start == sequence.cached_token_count, f"{sequence.request_id} goes on where its cache ends", None)
            held = len(sequence.block_table) * made.block_size
            what = "token" if sequence.status is RUNNING else "chunk"
            self.require(held >= start + size, f"blocks for {sequence.request_id}'s {what}, allocated before it runs", "C9")

    def require(self, condition, saying: str, concept: str | None) -> None:
        require(condition, saying, given=self.given, got=self.got, concept=concept)


@steps.test("one that runs gets one token, and a short prompt goes in whole")
def _(scheduler):
    step = Step(at_work(scheduler, running=[("A", 20)]))
    step.require(step.tokens == {"A": 1}, "A gets its token", None)
    step = Step(at_work(scheduler, waiting=[("B", 20)]))
    step.require(step.tokens == {"B": 20}, "all of B's prompt", None)


@steps.test("a step has no more tokens than the budget", concept="C3")
def _(scheduler):
    step = Step(at_work(scheduler, budget=48, waiting=[("B", 100)]))
    step.require(step.total <= 48, "at most 48 tokens in the step", "C3")
    step = Step(at_work(scheduler, budget=48, running=[("A", 20)], waiting=[("B", 100)]))
    step.require(step.total <= 48, "at most 48 tokens in the step, A's among them", "C3")
    step = Step(at_work(scheduler, waiting=[("A", 40), ("B", 40)]))
    step.require(step.total <= 64, "at most 64 tokens in the step: two prompts of 40 are more", "C4")


@steps.test("a prompt above the budget is begun", concept="C8")
def _(scheduler):
    step = Step(at_work(scheduler, budget=48, waiting=[("B", 100)]))
    step.require(step.tokens == {"B": 48}, "the budget is filled with B's first 48 tokens", "C8")


@steps.test("a chunk has at most max_prefill_chunk_size tokens", concept="C3")
def _(scheduler):
    step = Step(at_work(scheduler, budget=128, chunk=32, waiting=[("B", 100)]))
    step.require(step.tokens == {"B": 32}, "the budget has room for all of B, but a chunk has at most 32 tokens", "C3")


@steps.test("decode and prefill share a step", concept="C1")
def _(scheduler):
    step = Step(at_work(scheduler, running=[("A", 20)], waiting=[("B", 10)]))
    step.require("A" in step.tokens, "A gets its token, although a prompt has arrived", "C1")
    step.require("B" in step.tokens, "B gets its prompt in, although A runs", "C11")


@steps.test("decode is served before prefill", concept="C2")
def _(scheduler):
    step = Step(at_work(scheduler, running=[("A", 20), ("B", 20)], waiting=[("C", 500)]))
    step.require({"A", "B"} <= step.tokens.keys(), "A and B get their token, and C what is left", "C2")
    step.require(step.tokens.get("C", 62) == 62, "C gets what A and B left: 62 tokens", "C2")


@steps.test("no chunk of nothing", concept="C17")
def _(scheduler):
    Step(at_work(scheduler, budget=4, chunk=4, seqs=4, prefilling=[("A", 20, 10), ("B", 20, 10)]))


@steps.test("PREFILLING before WAITING", concept="C6")
def _(scheduler):
    step = Step(at_work(scheduler, budget=16, prefilling=[("A", 100, 16)], waiting=[("B", 100)]))
    step.require(step.tokens == {"A": 16}, "A goes on: it holds memory and has nothing to show yet", "C6")


@steps.test("of two that are half-filled, the older", concept="C13")
def _(scheduler):
    step = Step(at_work(scheduler, budget=16, prefilling=[("A", 100, 16), ("B", 100, 16)]))
    step.require(step.tokens == {"A": 16}, "A came first, and stays first", "C13")
    made = at_work(scheduler, budget=16, prefilling=[("A", 100, 16), ("B", 100, 16)])
    made.prefilling[0].last_step, made.prefilling[1].last_step = 3, 2
    step = Step(made)
    step.require(step.tokens == {"A": 16}, "A came first, and stays first, although it had a chunk in the last step", "C13")


@steps.test("a chunk whose blocks aren't free isn't scheduled", concept="C9")
def _(scheduler):
    step = Step(at_work(scheduler, blocks=6, running=[("R", 31)], prefilling=[("A", 200, 32)]))
    step.require("A" not in step.tokens, "A's next 63 tokens need 4 new blocks, and 2 are free", "C9")
    step.require(step.tokens == {"R": 1}, "R's token needs no new block", "C9")


@steps.test("a decode at a block border gets its block", concept="C9")
def _(scheduler):
    step = Step(at_work(scheduler, running=[("R", 32)]))
    step.require(step.tokens == {"R": 1}, "R's 32 tokens fill two blocks, and a third is free for the next one", "C9")


@steps.test("a reader without a block is left out, and nobody else", concept="C9")
def _(scheduler):
    step = Step(at_work(scheduler, blocks=4, running=[("A", 32), ("B", 20)]))
    step.require(step.tokens == {"B": 1}, "A needs a new block and none is free; B's last block has room, so B gets its token", "C9")


@steps.test("the token of one that was left out goes to the prompts", concept="C11")
def _(scheduler):
    step = Step(at_work(scheduler, budget=8, blocks=4, running=[("A", 32)], prefilling=[("P", 32, 17)]))
    step.require(step.tokens == {"P": 8}, "A finds no block and takes no token of the budget: all 8 are P's", "C11")


@steps.test("nobody passes one that waits for blocks", concept="C6")
def _(scheduler):
    step = Step(at_work(scheduler, blocks=6, running=[("R", 31)], prefilling=[("A", 200, 32)], waiting=[("W", 10)]))
    step.require("W" not in step.tokens, "W gets nothing: small newcomers would take for ever what A waits for", "C6")


@steps.test("half-filled ones count as sequences in flight", concept="C18")
def _(scheduler):
    step = Step(at_work(scheduler, seqs=2, running=[("R", 20)], prefilling=[("A", 24, 16)], waiting=[("W", 8)]))
    step.require("W" not in step.tokens, "two sequences are in flight, R and A: there's no room for W", "C18")
    step.require(not step.tables["W"], "W gets no seat, so it takes no blocks either: look for a seat first", "C18")
    step = Step(at_work(scheduler, seqs=2, running=[("R", 20)], waiting=[("V", 8), ("W", 8)]))
    step.require("W" not in step.tokens, "V takes the last of two seats", "C18")
    step = Step(at_work(scheduler, seqs=1, prefilling=[("A", 24, 16)]))
    step.require("A" in step.tokens, "A has its seat already, and goes on", "C18")


@steps.test("work is left as long as anyone is in any queue", concept="C14")
def _(scheduler):
    for where, queues in (
        ("one request RUNNING", {"running": [("A", 20)]}),
        ("one request WAITING", {"waiting": [("A", 20)]}),
        ("one request PREFILLING", {"prefilling": [("A", 20, 16)]}),
    ):
        got = at_work(scheduler, **queues).has_unfinished()
        require(got, "there's work to do", given=where, got=f"has_unfinished() returned {shown(got)}")
    got = at_work(scheduler).has_unfinished()
    require(not got, "there's nothing to do", given="three empty queues", got=f"has_unfinished() returned {shown(got)}")


@steps.test("a whole run in the engine: everybody gets their tokens")
def _(scheduler):
    runner = FakeRunner()
    config = EngineConfig(
        num_blocks=64, max_num_batched_tokens=40, max_prefill_chunk_size=25, max_num_seqs=4, enable_prefix_caching=False
    )
    engine = Engine(runner, config, scheduler=scheduler)
    prompts = {f"r{number}": [number] * prompt for number, prompt in enumerate((5, 130, 40, 16, 33, 70))}
    for name, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(max_tokens=6), request_id=name)
    tokens: dict[str, list[int]] = {}
    for _step in range(300):
        for output in engine.step():
            tokens[output.request_id] = output.token_ids
        engine.check_invariants()
        if not engine.has_unfinished_requests():
            break
    for name, prompt in prompts.items():
        if tokens.get(name) != runner.solo(prompt, 6):
            raise Wrong(
                "the tokens that the request gets when it's alone",
                given=f"six requests in the engine; {name} has {len(prompt)} prompt tokens",
                got=f"{name} got {shown(tokens.get(name))}",
            )


@steps.cost("what one leaves of the budget, the next can use", concept="C11")
def _(scheduler):
    step = Step(at_work(scheduler, waiting=[("A", 40), ("B", 40), ("C", 40)]))
    step.require(step.total == 64, "64 tokens in the step: A's 40, and 24 of B's", "C11")


# ---- 08.3 -----------------------------------------------------------------------------------------

turns = Exercise("08.3", "choose_decodes", "Whose turn it is")


def readers(*last_steps: int) -> list[Sequence]:
    made = []
    for arrival, last_step in enumerate(last_steps):
        sequence = Sequence("ABCDEFGHIJ"[arrival], [1], arrival=arrival)
        sequence.last_step = last_step
        made.append(sequence)
    return made


def names(got) -> str:
    return "".join(sorted(sequence.request_id for sequence in got))


def expect_turn(
    choose_decodes, last_steps, gives: str, saying: str, *, budget: int = 8, share: float = 0.5, prefill_waits: bool = True
) -> None:
    got = names(choose_decodes(readers(*last_steps), prefill_waits, budget, share))
    given = f"running A, B, C … with last_step {list(last_steps)}, prefill_waits={prefill_waits}, budget={budget}, share={share}"
    require(got == gives, saying, given=given, got=f"chose {', '.join(got) or 'nobody'}")


@turns.test("with room for all, all get their token")
def _(choose_decodes):
    expect_turn(choose_decodes, [4, 4, 4], "ABC", "three are below the cap of four")
    expect_turn(choose_decodes, [], "", "nobody runs, nobody is chosen")


@turns.test("no more than the share of the budget")
def _(choose_decodes):
    got = choose_decodes(readers(4, 4, 4, 4, 4, 4), True, 8, 0.5)
    require(
        len(list(got)) == 4,
        "four of six: half of a budget of 8",
        given="six run, budget=8, share=0.5",
        got=f"chose {names(got)}",
    )


@turns.test("those left out come first the next time", concept="C1")
def _(choose_decodes):
    expect_turn(choose_decodes, [7, 7, 7, 7, 6, 6], "ABEF", "E and F were left out in step 7; then the oldest")
    expect_turn(choose_decodes, [7, 7, 6, 6, 7, 7], "ABCD", "the worked number above")


@turns.test("of equal ones the older", concept="C1")
def _(choose_decodes):
    expect_turn(choose_decodes, [5, 5, 5, 5, 5], "AB", "A and B arrived first", budget=4)


@turns.test("at least one reader gets a token", concept="C1")
def _(choose_decodes):
    expect_turn(choose_decodes, [3, 2, 3], "B", "one token, however small the share is", share=0.05)


@turns.test("nobody waits more than ceil(running / cap) steps", concept="C1")
def _(choose_decodes):
    running = readers(*[0] * 7)
    for step in range(1, 20):
        chosen = names(choose_decodes(list(running), True, 6, 0.5))
        for sequence in running:
            if sequence.request_id in chosen:
                sequence.last_step = step
        late = [sequence.request_id for sequence in running if step - sequence.last_step >= 3]
        require(
            not late,
            "seven run and three get a token in each step: each has one in every three steps",
            given=f"{step} steps of them",
            got=f"{', '.join(late)} got none in the last three",
        )


@turns.cost("no cap when no prefill waits", concept="C11")
def _(choose_decodes):
    expect_turn(
        choose_decodes, [4, 4, 4, 4, 4, 4], "ABCDEF", "nobody else wants the rest of the budget", prefill_waits=False
    )


# ---- the puzzle of the lesson ---------------------------------------------------------------------


def three_budgets():
    """The inside of `plan(running, prefilling, waiting, tokens, seats, blocks)` of lesson 08, shuffled."""
    from ..lab.parsons import Parsons

    lines = [
        "    if need > blocks: break",
        "    step[r.name] = size",
        "for r in prefilling + waiting:",
        "    size = min(r.left, CHUNK, tokens)",
        "    if r in waiting and seats == 0: break",
        "step, tokens = {r.name: 1 for r in running}, tokens - len(running)",
        "    tokens, seats, blocks = tokens - size, seats - (r in waiting), blocks - need",
        "    need = blocks_for(r.cached + size) - blocks_for(r.cached)",
        "seats -= len(running) + len(prefilling)",
        "    if size == 0: break",
    ]
    loop = "Which request does this line talk about, before there is a loop?"
    rules = [
        ("F", "C", "Who was promised tokens first, and how many are left when the prompts' turn comes?"),
        ("I", "C", "How many seats are taken before the first newcomer is looked at?"),
        *[("C", letter, loop) for letter in "ABDEGHJ"],
        ("D", "J", "Which size does it look at: this request's, or that of the one before?"),
        ("D", "H", "For a chunk of which size are these blocks?"),
        ("H", "A", "Whose need does it compare with the free blocks?"),
        ("E", "B", "A newcomer is in the step now. Was a seat free for it?"),
        ("J", "B", "What does it put into the step when no token is left?"),
        ("A", "B", "The chunk is in the step now. Were its blocks free?"),
        *[
            (letter, "G", "Does everything that it takes away go to a chunk that is sure to be computed?")
            for letter in "EJA"
        ],
    ]
    return Parsons(lines, rules, "Put the lines in order: they plan one step with three budgets.")
