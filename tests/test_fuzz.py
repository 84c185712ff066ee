"""Random runs of `fuzz.py`, over every policy, from fixed seeds."""

import pytest
from fuzz import Round

from course_lib.config import POLICY_NAMES


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_random_rounds_end_with_the_right_tokens_and_all_books_in_order(policy):
    steps = ended = preempted = 0
    for seed in range(40):
        round_ = Round(seed, policy)
        try:
            round_.run(round_.rng.choice([3, 10, 30]), round_.rng.choice([0.1, 0.5, 1.0]))
        except BaseException as error:
            error.add_note(f"seed {seed}, policy {policy}, {round_.config}")
            raise
        steps += round_.steps
        ended += len(round_.ended)
        preempted += sum(len(step.preempted) for step in round_.engine.trace.steps)
    assert steps > 2000 and ended > 300 and preempted > 20  # about half of what these seeds give
