"""Fits a cost model to step times measured on this machine, and says how far off it is.

    cost = calibrate(ModelRunner("smollm2"))       # runs the real engine for some seconds
    print(cost)                                    # what a step, a token … cost, and the error on steps not fitted
    simulate(config, requests, model="smollm2-135m", chip="laptop", cost=cost)

A roofline doesn't fit a CPU well: reading weights and computing hardly overlap, and a matrix product of a few rows
can run at a fraction of the rate of a large one. So the fitted model is a sum, linear in what is counted:

    seconds = per_step
            + per_row     × min(tokens, 4)     the first rows of a step, computed at a poor rate
            + per_token   × tokens             every row
            + per_pair    × (query, key) pairs of attention
            + per_context × tokens of K/V read
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from .config import EngineConfig, SamplingParams
from .cost_model import StepWork, work_of
from .engine import Engine
from .metrics import percentile
from .trace import Trace
from .validation import check_number

FEW_ROWS = 4  # so few rows are where a CPU's matrix products are worst
MIN_STEPS = 20  # to fit five numbers, half of the steps held out
PLAN = (  # (chunk size, streams that decode beside, tokens of the prompt); the long one tells attention from the rest
    (32, 0, 160), (32, 4, 160), (64, 0, 192), (64, 4, 192), (128, 0, 256), (128, 4, 256),
    (256, 0, 1536), (256, 4, 512), (None, 0, 128), (None, 4, 128), (None, 0, 512), (None, 4, 512),
)  # fmt: skip

Observation = tuple[StepWork, float]  # what a step computed, and the seconds that it took


def features(work: StepWork) -> tuple[int, ...]:
    """What the five coefficients of a FittedCost are multiplied with."""
    return (1, min(work.tokens, FEW_ROWS), work.tokens, work.pairs, work.context)


@dataclass(frozen=True)
class FittedCost:
    """Seconds of a step as a sum; see the module. Errors are relative, of steps that the fit didn't see."""

    per_step: float
    per_row: float
    per_token: float
    per_pair: float
    per_context: float
    median_error: float = 0.0
    p90_error: float = 0.0
    num_steps: int = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        return (self.per_step, self.per_row, self.per_token, self.per_pair, self.per_context)

    def seconds(self, work: StepWork) -> float:
        total = 0.0
        for coefficient, feature in zip(self.coefficients, features(work), strict=True):
            total += coefficient * feature
        return total

    def __str__(self) -> str:
        def ms(seconds: float) -> str:
            return f"{seconds * 1e3:.3g} ms"

        return (
            f"a step {ms(self.per_step)}, each of its first {FEW_ROWS} rows {ms(self.per_row)} more, a token {ms(self.per_token)}, "
            f"1,000 pairs of attention {ms(self.per_pair * 1e3)}, 1,000 tokens of context {ms(self.per_context * 1e3)}; "
            f"error on held-out steps: median {self.median_error:.1%}, P90 {self.p90_error:.1%} ({self.num_steps} steps)"
        )


def observations(trace: Trace) -> list[Observation]:
    """The steps of a trace that computed something, each with its time: what `fit` takes."""
    return [(work_of(step.chunks), step.end - step.start) for step in trace.steps if step.chunks]


def fit(steps: Iterable[Observation]) -> FittedCost:
    """The non-negative coefficients with the least squared relative error over every other step.

    The steps in between are held out, and give the errors. Since errors are relative, a step that took far too long
    (another program had the machine) counts like one that is wholly wrong, not as many times that.
    Raises ValueError for fewer than 20 steps, or a time that isn't above 0.
    """
    steps = list(steps)
    if len(steps) < MIN_STEPS:
        raise ValueError(f"steps has {len(steps)} entries: a fit needs at least {MIN_STEPS}")
    for _, seconds in steps:
        check_number("seconds", seconds, "above 0", lambda x: x > 0)
    fitted, held_out = steps[::2], steps[1::2]
    coefficients = _least_squares(fitted)
    errors = relative_errors(FittedCost(*coefficients), held_out)
    return FittedCost(*coefficients, percentile(errors, 50), percentile(errors, 90), len(held_out))


def relative_errors(cost, steps: Iterable[Observation]) -> list[float]:
    """|predicted - measured| / measured of each step, for any cost model."""
    return [abs(cost.seconds(work) - seconds) / seconds for work, seconds in steps]


def _least_squares(steps: list[Observation]) -> list[float]:
    """Non-negative least squares on relative errors, by trying every subset of the features.

    With five features that is 31 small systems of normal equations; the best solution without a negative
    coefficient is the optimum.
    """
    rows = [[feature / seconds for feature in features(work)] for work, seconds in steps]
    width = len(rows[0])
    sizes = [max(row[i] for row in rows) for i in range(width)]  # features differ by orders of magnitude: scaled to 1
    rows = [[value / size for value, size in zip(row, sizes, strict=True)] for row in rows]
    best, least = [0.0] * width, float(len(rows))  # all zero: each relative error is 1
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            matrix = [[_dot(row[i] * row[j] for row in rows) for j in chosen] for i in chosen]
            solution = _solve(matrix, [_dot(row[i] for row in rows) for i in chosen])
            if solution is None or min(solution) < 0:
                continue
            error = _dot((_dot(row[i] * x for i, x in zip(chosen, solution, strict=True)) - 1) ** 2 for row in rows)
            if error < least:
                least, best = error, [0.0] * width
                for i, x in zip(chosen, solution, strict=True):
                    best[i] = x / sizes[i]
    return best


def _dot(values: Iterable[float]) -> float:
    """Their sum, one after the other. (`sum` of floats differs between Python 3.11 and 3.12.)"""
    total = 0.0
    for value in values:
        total += value
    return total


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None when the rows depend on one another."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-12:
            return None
        for r in range(len(rows)):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def calibrate(runner, *, seconds: float = 15.0) -> FittedCost:
    """Measure steps of many kinds with this runner for about `seconds`, and fit a cost model to them.

    Prompts in chunks of 32, 64, 128, 256 and whole, alone and beside 4 streams that decode (PLAN). All of it is
    repeated while there is time, at least twice, and of each step the fastest run counts: what other programs
    took of the machine is not the step's cost. (So a busy machine will be slower than the model says.)
    """
    check_number("seconds", seconds, "above 0", lambda x: x > 0)
    plan = [(chunk, streams, min(tokens, runner.max_model_len // 2)) for chunk, streams, tokens in PLAN]
    _measure(runner, *plan[-1])  # the first steps of a process are slow: not counted
    begin, repeats, fastest = runner.now(), 0, []
    while repeats < 2 or runner.now() - begin < seconds:
        steps = [step for settings in plan for step in _measure(runner, *settings)]
        repeats += 1
        pairs = zip(fastest or steps, steps, strict=True)
        fastest = [(work, min(before, now)) for (work, before), (_, now) in pairs]
    return fit(fastest)


def _measure(runner, chunk: int | None, streams: int, prompt_tokens: int) -> list[Observation]:
    """A prompt arrives beside `streams` short requests that decode, and gets three tokens. Always the same steps."""
    rng = random.Random(prompt_tokens)

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(runner.vocab_size) for _ in range(num_tokens)]

    config = EngineConfig(
        num_blocks=(prompt_tokens + 64 * (streams + 1)) // 16 + streams + 2, max_num_batched_tokens=1024, max_num_seqs=16,
        max_prefill_chunk_size=chunk, enable_prefix_caching=False, kv_watermark=0.0,
    )  # fmt: skip
    engine = Engine(runner, config)
    for _ in range(streams):
        engine.add_request(prompt(rng.randrange(8, 32)), SamplingParams(max_tokens=32, ignore_eos=True))
    for _ in range(3 if streams else 0):
        engine.step()
    last = engine.add_request(prompt(prompt_tokens), SamplingParams(max_tokens=3, ignore_eos=True))
    while last in engine.snapshot():
        engine.step()
    return observations(engine.trace)
