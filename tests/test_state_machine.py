"""A user who does anything at any time, found by Hypothesis, against an engine with a tiny pool.

Adds with shared prefixes, salts and priorities, steps, streams, cancels, preempts, runners that fail; every
policy. The books are checked after each action. At the end everything is run to its end, and every
request that was accepted must have ended once, with the tokens that it would have got alone.

COURSE_FUZZ_MINUTES=30 looks that long, at other examples every time, and prints how much it saw.
"""

import os
import random
import time

from helpers import Watch, check_books, is_idle, limit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from course_lib import Engine, EngineConfig
from course_lib.config import POLICY_NAMES
from course_lib.runners import FakeRunner

VOCABULARY = 50
MINUTES = float(os.environ.get("COURSE_FUZZ_MINUTES", "0"))
COMMON = dict(
    deadline=None, database=None, print_blob=True, stateful_step_count=50, suppress_health_check=list(HealthCheck)
)


class Injected(Exception):
    """What a failing forward pass raises here."""


class FailingRunner(FakeRunner):
    """Fails the next call when told to, before or after it has written its K/V."""

    fail_next: str | None = None

    def execute(self, batch):
        when, self.fail_next = self.fail_next, None
        if when == "before":
            raise Injected
        samples = super().execute(batch)
        if when == "after":
            raise Injected
        return samples


@st.composite
def configs(draw):
    """Pools of a few blocks, budgets of a few tokens."""
    budget = draw(st.sampled_from([1, 2, 4, 7, 16, 33, 64]))
    return EngineConfig(
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        num_blocks=draw(st.sampled_from([4, 6, 10, 16, 30])),
        max_num_seqs=draw(st.integers(1, min(budget, 6))),
        max_num_batched_tokens=budget,
        max_prefill_chunk_size=draw(st.sampled_from([None, 1, 3, 7, 16, 25, 64])),
        enable_prefix_caching=draw(st.booleans()),
        max_decode_share=draw(st.sampled_from([1.0, 0.5, 0.25, 0.01])),
        kv_watermark=draw(st.sampled_from([0.0, 0.01, 0.1, 0.3])),
        max_num_partial_prefills=draw(st.sampled_from([None, 1, 2])),
        policy=draw(st.sampled_from(POLICY_NAMES)),
    )


def tokens_of(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


class EngineMachine(RuleBasedStateMachine):
    seen = dict.fromkeys(("runs", "steps", "requests", "cancels", "failures", "preemptions"), 0)

    @initialize(config=configs(), shuffle=st.integers(0, 5))
    def begin(self, config, shuffle):
        self.runner = FailingRunner(vocab_size=VOCABULARY)
        self.engine = Engine(self.runner, config)
        self.engine.block_manager.shuffle_free_blocks(shuffle)
        self.watch = Watch(self.engine)
        self.engine.on_step = self.on_step
        self.cancel_during: str | None = None
        self.asked: dict[str, tuple[list[int], int]] = {}  # accepted: prompt, and how many tokens it may get
        self.got: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}  # delivered
        self.cancelled: set[str] = set()
        self.streams: dict[str, object] = {}
        self.number = 0
        self.seen["runs"] += 1

    # ---- what the user does ----

    @rule(
        prefix=st.integers(0, 2),
        shared=st.sampled_from([0.0, 0.0, 0.2, 0.5, 0.8]),
        own=st.sampled_from([0.02, 0.1, 0.3, 0.9, 1.1]),
        tail=st.integers(0, 20),
        max_tokens=st.sampled_from([1, 2, 5, 20]),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(0, 2),
        as_stream=st.booleans(),
    )
    def add(self, prefix, shared, own, tail, max_tokens, salt, priority, as_stream):
        """`shared` and `own`: lengths of the two parts of the prompt, in parts of the longest that is accepted."""
        engine = self.engine
        longest = min(engine.max_model_len - 1, 150) if own < 1 else engine.max_model_len - 1
        own = min(own, 1 - shared) if own < 1 else own
        prompt = tokens_of(prefix, int(shared * longest)) + tokens_of(100 + tail, 1 + int(own * longest))
        name = f"q{self.number}"
        before = engine.snapshot()
        how = dict(request_id=name, priority=priority, cache_salt=salt)
        try:
            if as_stream:
                self.streams[name] = engine.stream(prompt, limit(max_tokens), **how)
            else:
                assert engine.add_request(prompt, limit(max_tokens), **how) == name
        except ValueError as refused:
            assert str(len(prompt)) in str(refused)
            assert engine.snapshot() == before
            return
        self.number += 1
        self.asked[name] = (prompt, min(max_tokens, engine.max_model_len - len(prompt)))
        self.got[name] = []
        self.seen["requests"] += 1

    @rule(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), max_tokens=st.sampled_from([3, 9, 30]))
    def add_some(self, sizes, max_tokens):
        """Short prompts with long outputs: they grow until the pool is full."""
        for i, size in enumerate(sizes):
            self.add(i, 0.0, size / 20, i, max_tokens, None, 0, False)

    @rule(count=st.sampled_from([1, 1, 2, 5]))
    def step(self, count):
        for _ in range(count):
            self.seen["steps"] += 1
            try:
                outputs = self.engine.step()
            except Injected:
                self.seen["failures"] += 1
                outputs = []
            self.take(outputs)
            check_books(self.engine)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def next_of_a_stream(self, data):
        name = data.draw(st.sampled_from(sorted(self.streams)))
        steps = self.engine.scheduler.step
        try:
            self.take([next(self.streams[name])], only=name)
        except StopIteration:
            assert name in self.ends
            del self.streams[name]
        except Injected:
            self.seen["failures"] += 1
        self.seen["steps"] += self.engine.scheduler.step - steps

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def drop_a_stream(self, data):
        name = data.draw(st.sampled_from(sorted(self.streams)))
        del self.streams[name]
        assert name not in self.engine.snapshot(), "it goes on, and nobody listens"
        self.cancelled.add(name)  # or its end is still to be delivered

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked)))
        live = name in self.engine.snapshot()
        assert self.engine.cancel(name) is live
        if live:
            self.cancelled.add(name)
            self.seen["cancels"] += 1

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel_during_the_next_step(self, data):
        self.cancel_during = data.draw(st.sampled_from(sorted(self.asked)))

    @precondition(lambda self: self.engine.scheduler.prefilling or self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        scheduler = self.engine.scheduler
        names = sorted(s.request_id for s in scheduler.prefilling + scheduler.running)
        self.engine.preempt(data.draw(st.sampled_from(names)))

    @rule(when=st.sampled_from(["before", "after"]))
    def fail_the_next_step(self, when):
        self.runner.fail_next = when

    @rule()
    def poison_what_is_free(self):
        self.runner.poison(self.engine.block_manager.free_blocks(), self.engine.config.block_size)

    # ---- what must hold ----

    def on_step(self, output):
        self.watch(output)
        self.watch.outputs.clear()
        self.seen["preemptions"] += len(output.preempted)
        name, self.cancel_during = self.cancel_during, None
        if name is not None and self.engine.cancel(name):
            self.cancelled.add(name)
            self.seen["cancels"] += 1

    def take(self, outputs, only=None):
        for output in outputs:
            name = output.request_id
            assert only is None or name == only
            assert name not in self.ends, "an output after the end"
            self.got[name] += output.new_token_ids
            assert output.finished == (output.finish_reason is not None)
            if output.finished:
                self.ends[name] = output.finish_reason
                prompt, most = self.asked[name]
                solo = self.runner.solo(prompt, most)
                if output.finish_reason == "cancelled":
                    assert name in self.cancelled and not output.new_token_ids
                    assert output.token_ids == solo[: len(output.token_ids)]
                else:
                    assert output.finish_reason == "length"
                    assert output.token_ids == solo

    @invariant()
    def books(self):
        if hasattr(self, "engine"):
            check_books(self.engine)
            unfinished = set(self.engine.snapshot())
            assert unfinished <= set(self.asked) - set(self.ends)
            assert self.engine.has_unfinished_requests() == bool(set(self.asked) - set(self.ends))

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        self.runner.fail_next = None
        tokens = sum(len(prompt) + most for prompt, most in self.asked.values())
        for _ in range(20 * tokens):  # with the smallest budget a step computes one token; some are recomputed
            if not engine.has_unfinished_requests():
                break
            self.seen["steps"] += 1
            self.take(engine.step())
            check_books(engine)
        assert set(self.ends) == set(self.asked), f"never ended: {set(self.asked) - set(self.ends)}"
        for name, (prompt, most) in self.asked.items():
            if self.ends[name] == "length":
                assert self.got[name] == self.runner.solo(prompt, most), "every token was delivered, and once"
        for stream in self.streams.values():
            assert list(stream) == []
        assert is_idle(engine) and engine.step() == []


def test_whatever_a_user_does_every_request_ends_with_the_right_tokens():
    seen = EngineMachine.seen
    seen.update(dict.fromkeys(seen, 0))
    if not MINUTES:
        run_state_machine_as_test(EngineMachine, settings=settings(max_examples=130, derandomize=True, **COMMON))
        assert seen["requests"] > 800 and min(seen["preemptions"], seen["failures"], seen["cancels"]) > 30
        return
    end = time.monotonic() + 60 * MINUTES
    try:
        while time.monotonic() < end:
            run_state_machine_as_test(EngineMachine, settings=settings(max_examples=200, **COMMON))
    finally:
        print(f"\nsaw {seen}")
