"""A random user of an engine: adds, cancels, preempts, fails, with tiny pools and every policy.

    python tests/fuzz.py --steps 1000000 --seed 1     prints what it saw

After each step the engine's invariants are checked; at the end of each round every accepted request
must have ended with exactly the tokens that it would have produced alone.
"""

from __future__ import annotations

import argparse
import math
import random
import time

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.config import POLICY_NAMES
from course_lib.runners import FakeRunner


class FlakyRunner(FakeRunner):
    """Fails at random calls, at the given rate, before or after it has written its K/V."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__(vocab_size=50)
        self._rng, self._rate = rng, rate

    def execute(self, batch):
        failing = self._rng.random() < self._rate
        if failing and self._rng.random() < 0.5:
            raise RuntimeError("injected before the forward pass")
        samples = super().execute(batch)
        if failing:
            raise RuntimeError("injected after the forward pass")
        return samples


def random_config(rng: random.Random, policy: str) -> EngineConfig:
    """Small and awkward: pools of a few blocks, budgets of a few tokens."""
    budget = rng.choice([1, 2, 4, 7, 16, 33, 64, 160])
    chunk = rng.choice([None, 1, 3, 7, 16, 25, 64, 200])
    return EngineConfig(
        block_size=rng.choice([1, 2, 4, 16]),
        num_blocks=rng.choice([4, 6, 8, 10, 16, 40]),
        max_num_seqs=rng.randint(1, min(budget, 9)),
        max_num_batched_tokens=budget,
        max_prefill_chunk_size=chunk,
        enable_prefix_caching=rng.random() < 0.5,
        max_decode_share=rng.choice([1.0, 1.0, 0.5, 0.25, 0.01]),
        kv_watermark=rng.choice([0.0, 0.01, 0.1, 0.3]),
        max_num_partial_prefills=rng.choice([None, None, 1, 2]),
        policy=policy,
    )


class Round:
    """One engine from the first request to the last."""

    def __init__(self, seed: int, policy: str, fail_rate: float = 0.02, record_trace: bool = True) -> None:
        self.rng = rng = random.Random(seed)
        self.config = random_config(rng, policy)
        self.runner = FlakyRunner(rng, fail_rate if rng.random() < 0.5 else 0.0)
        self.engine = Engine(self.runner, self.config, on_step=self._maybe_cancel, record_trace=record_trace)
        self.engine.block_manager.shuffle_free_blocks(seed)
        self.prefixes = [[rng.randrange(50) for _ in range(60)] for _ in range(3)]
        self.prompts: dict[str, tuple[list[int], int]] = {}  # accepted: prompt and token limit
        self.ended: dict[str, object] = {}
        self.steps = self.failures = self.cancels = self.rejected = 0
        self.waits: dict[str, int] = {}

    def _maybe_cancel(self, scheduled) -> None:
        if self.rng.random() < 0.02 and self.prompts:
            self._cancel()

    def _cancel(self) -> None:
        self.cancels += self.engine.cancel(self.rng.choice(list(self.prompts)))

    def add(self) -> None:
        rng, engine = self.rng, self.engine
        longest = engine.max_model_len - 1
        length = min(longest, rng.choice([rng.randint(1, 12), rng.randint(1, 80), longest]))
        prompt = (rng.choice(self.prefixes) + [rng.randrange(50) for _ in range(longest)])[:length]
        if rng.random() < 0.4:
            prompt = [rng.randrange(50) for _ in range(length)]
        limit = rng.choice([1, 2, 5, 30])
        try:
            request_id = engine.add_request(
                prompt,
                SamplingParams(max_tokens=limit),
                priority=rng.randint(0, 2),
                cache_salt=rng.choice([None, None, "a"]),
            )
        except ValueError:
            self.rejected += 1
            return
        assert request_id not in self.prompts or request_id in self.ended
        self.prompts[request_id] = (prompt, min(limit, engine.max_model_len - length))
        self.ended.pop(request_id, None)

    def step(self) -> None:
        engine = self.engine
        self.steps += 1
        try:
            outputs = engine.step()
        except RuntimeError as error:
            assert "injected" in str(error), error
            self.failures += 1
            outputs = []
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the end"
            assert len(output.new_token_ids) <= 1
            if output.finished:
                self.ended[output.request_id] = output
                prompt, limit = self.prompts[output.request_id]
                expected = self.runner.solo(prompt, limit)
                if output.finish_reason == "cancelled":
                    expected = expected[: len(output.token_ids)]
                assert output.token_ids == expected, (output, self.config)
        engine.check_invariants()
        self._check_decode_wait()
        if self.rng.random() < 0.3:
            self.runner.poison(engine.block_manager.free_blocks(), self.config.block_size)

    def _check_decode_wait(self) -> None:
        """No RUNNING request waits longer than the decode share allows."""
        scheduler = self.engine.scheduler
        cap = max(1, math.floor(self.config.max_decode_share * self.config.max_num_batched_tokens))
        for s in scheduler.running:
            bound = math.ceil(self.config.max_num_seqs / cap)
            assert scheduler.step - 1 - s.last_step <= bound, (s, scheduler.step, self.config)

    def run(self, num_requests: int, add_rate: float) -> None:
        rng = self.rng
        while num_requests or self.engine.has_unfinished_requests():
            if num_requests and rng.random() < add_rate:
                num_requests -= 1
                self.add()
            if rng.random() < 0.01 and self.prompts:
                self._cancel()
            if rng.random() < 0.01:
                holders = self.engine.scheduler.prefilling + self.engine.scheduler.running
                if holders:
                    self.engine.preempt(rng.choice(holders).request_id)
            self.step()
            assert self.steps < 200_000, f"no end in sight: {self.config}"
        assert self.engine.block_manager.num_used == 0
        assert set(self.ended) == set(self.prompts), "a request was lost"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    totals = dict.fromkeys(("rounds", "steps", "requests", "failures", "cancels", "rejected", "preemptions"), 0)
    begin = time.time()
    while totals["steps"] < args.steps:
        seed = args.seed * 1_000_000 + totals["rounds"]
        policy = POLICY_NAMES[totals["rounds"] % len(POLICY_NAMES)]
        round_ = Round(seed, policy)
        try:
            round_.run(round_.rng.choice([3, 10, 30]), round_.rng.choice([0.1, 0.5, 1.0]))
        except BaseException:
            print(f"seed {seed}, policy {policy}: {round_.config}")
            raise
        totals["rounds"] += 1
        totals["steps"] += round_.steps
        totals["requests"] += len(round_.prompts)
        totals["failures"] += round_.failures
        totals["cancels"] += round_.cancels
        totals["rejected"] += round_.rejected
        totals["preemptions"] += sum(len(step.preempted) for step in round_.engine.trace.steps)
    print(f"{totals} in {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
