"""What the engine's tests share: prompts, engines over a FakeRunner, loops that end, and the books.

`check_books` and `check_output` say the laws of the engine a second time, in other words than
`Engine.check_invariants`, so that a fault in the one is seen by the other.
"""

from __future__ import annotations

import random
from collections import Counter

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.runners import FakeRunner
from course_lib.scheduler import REASONS
from course_lib.sequence import PREFILLING, RUNNING, WAITING

MAX_STEPS = 20_000  # of any run here: far more than each needs, so that a hang is a failure


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids; another seed, another text."""
    rng = random.Random(seed)
    return [rng.randrange(32000) for _ in range(num_tokens)]


def limit(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def make_engine(runner=None, *, on_step=None, parts: dict | None = None, **settings) -> Engine:
    """An engine over a FakeRunner. `settings` are EngineConfig's, `parts` are Engine's.

    256 blocks, so that checking the books after every step is quick.
    """
    settings.setdefault("num_blocks", 256)
    runner = FakeRunner() if runner is None else runner
    return Engine(runner, EngineConfig(**settings), on_step=on_step, **(parts or {}))


class Watch:
    """`on_step` of an engine: checks every scheduler output against the laws, and keeps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: list = []
        engine.on_step = self

    def __call__(self, output) -> None:
        check_output(self.engine, output)
        self.outputs.append(output)

    def scheduled(self) -> list[dict[str, int]]:
        """Per step, request id -> tokens."""
        return [{c.sequence.request_id: c.num_tokens for c in out.chunks} for out in self.outputs]

    def reasons(self) -> list[dict[str, str]]:
        return [dict(out.reasons) for out in self.outputs]

    def preempted(self) -> list[list[str]]:
        return [[s.request_id for s in out.preempted] for out in self.outputs]


class RecordingRunner(FakeRunner):
    """Also keeps, per call and request, the token ids and the positions that it was given."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.seen: list[dict[str, tuple[list[int], list[int]]]] = []
        self.sampled: list[list[str]] = []

    def execute(self, batch):
        starts = batch.query_start_loc
        self.seen.append(
            {
                s.request_id: (batch.token_ids[a:b], batch.positions[a:b])
                for s, a, b in zip(batch.sequences, starts, starts[1:], strict=False)
            }
        )
        self.sampled.append([s.request_id for s in batch.sampled])
        return super().execute(batch)


def step(engine: Engine):
    """One step, and the books after it."""
    outputs = engine.step()
    check_books(engine)
    return outputs


def steps(engine: Engine, count: int) -> list:
    """All outputs of `count` steps."""
    return [output for _ in range(count) for output in step(engine)]


def run_to_end(engine: Engine, max_steps: int = MAX_STEPS) -> dict[str, object]:
    """Step until everything was delivered; the last output of each request, by id.

    Every request may have only one terminal output and nothing after it, and its new tokens
    joined must be the end of its tokens.
    """
    last: dict[str, object] = {}
    new: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            break
        for output in step(engine):
            known = last.get(output.request_id)
            assert known is None or not known.finished, f"{output.request_id}: an output after its end"
            last[output.request_id] = output
            new.setdefault(output.request_id, []).extend(output.new_token_ids)
            tokens = new[output.request_id]
            assert not tokens or output.token_ids[-len(tokens) :] == tokens, "new tokens are not the newest"
    assert not engine.has_unfinished_requests(), f"no end in {max_steps} steps: {engine.snapshot()}"
    return last


def is_idle(engine: Engine) -> bool:
    """Nothing held: all blocks free, all reference counts 0, no request left."""
    manager = engine.block_manager
    return manager.num_free == manager.num_blocks and not any(manager.ref_counts) and not engine.has_unfinished_requests()


def goes_on(engine: Engine, seed: int = 99) -> None:
    """The engine still serves: an ordinary request gets the tokens that it would get alone."""
    tokens = prompt(20, seed)
    request_id = engine.add_request(tokens, limit(3))
    last = run_to_end(engine)[request_id]
    assert (last.token_ids, last.finish_reason) == (engine.runner.solo(tokens, 3), "length")


def check_books(engine: Engine) -> None:
    """The laws that hold between two steps."""
    engine.check_invariants()
    scheduler, manager, size = engine.scheduler, engine.block_manager, engine.config.block_size
    holders = scheduler.prefilling + scheduler.running
    held = Counter(block for s in holders for block in s.block_table)
    assert manager.num_free + manager.num_used == manager.num_blocks
    assert manager.num_used == len(held)
    assert {block: count for block, count in enumerate(manager.ref_counts) if count} == held
    assert held.keys().isdisjoint(manager.free_blocks())
    assert len(holders) <= engine.config.max_num_seqs
    for s in scheduler.unfinished():
        known = len(s.prompt_token_ids) + len(s.generated_token_ids)
        assert len(s.block_table) == -(-s.cached_token_count // size)
        assert s.prefilled_token_count == min(s.cached_token_count, len(s.prompt_token_ids))
        if s in scheduler.waiting:
            assert s.status is WAITING and s.cached_token_count == 0
        elif s in scheduler.prefilling:
            assert s.status is PREFILLING and 0 < s.cached_token_count < known
        else:
            assert s.status is RUNNING and s.cached_token_count == known - 1 and s.generated_token_ids


def check_output(engine: Engine, output) -> None:
    """The laws of one scheduling decision."""
    config, scheduler = engine.config, engine.scheduler
    unfinished = {s.request_id: s for s in scheduler.unfinished()}
    scheduled = [chunk.sequence.request_id for chunk in output.chunks]
    assert len(set(scheduled)) == len(scheduled), "two chunks of one sequence"
    assert sum(chunk.num_tokens for chunk in output.chunks) <= config.max_num_batched_tokens
    assert not set(scheduled) & set(output.reasons), "a sequence got tokens and a reason"
    assert set(scheduled) | set(output.reasons) == set(unfinished), "a sequence got neither tokens nor a reason"
    assert set(output.reasons.values()) <= set(REASONS)
    in_flight = {s.request_id for s in scheduler.prefilling + scheduler.running + output.admitted}
    assert len(in_flight) <= config.max_num_seqs
    for chunk in output.chunks:
        s, end = chunk.sequence, chunk.start_pos + chunk.num_tokens
        assert chunk.num_tokens >= 1
        assert chunk.is_last == (end == len(s.prompt_token_ids) + len(s.generated_token_ids))
        assert len(s.block_table) == -(-end // config.block_size), "blocks are allocated per chunk"
        if s.status is RUNNING:
            assert (chunk.kind, chunk.num_tokens, chunk.is_last) == ("decode", 1, True)
        else:
            assert chunk.kind == "prefill"
        if config.max_prefill_chunk_size is not None:
            assert chunk.num_tokens <= config.max_prefill_chunk_size
        if s.status is not WAITING:
            assert chunk.start_pos == s.cached_token_count
        elif not config.enable_prefix_caching:
            assert chunk.start_pos == 0
        else:
            assert chunk.start_pos % config.block_size == 0
    admitted = [s.request_id for s in output.admitted]
    assert admitted == [r for r in scheduled if unfinished[r].status is WAITING]
    if output.preempted and admitted:  # only the progress rule may do that, and then for one sequence alone
        assert scheduled == admitted and len(admitted) == 1
    victims = {s.request_id for s in output.preempted} - set(admitted)
    assert all(output.reasons[r] == "kv_blocks" for r in victims), "a victim's reason is kv_blocks"


SUMMARY: dict[str, list[str]] = {}  # tables that the test run prints at its end, by title
