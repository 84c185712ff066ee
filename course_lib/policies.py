"""Who gets the prefill budget, in which order.

A policy orders the candidates for prefill, and may cap what each one gets in a step. It decides
nothing else: decode goes first, chunks keep within the budgets, and whoever can't get its blocks
stops everyone behind it, whatever the policy.

Write your own by giving a class an `order` method, and pass an object of it as
`EngineConfig(policy=MyPolicy())`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from .config import POLICY_NAMES
from .sequence import Sequence


class Policy:
    """Base of the policies.

    order(prefilling, waiting, step) gets the PREFILLING sequences in arrival order, the WAITING
    ones (preempted first, then by arrival) and the step's number; it returns them in the order in
    which they are to be served. Leaving one out means that it gets nothing in this step.

    share(budget, left, candidates, block_size) is the most that the next one may get, in tokens:
    `budget` is the step's token budget, `left` what is left of it, `candidates` how many sequences
    can still get a chunk.
    """

    name = "custom"

    def order(self, prefilling: SequenceOf[Sequence], waiting: SequenceOf[Sequence], step: int) -> list[Sequence]:
        raise NotImplementedError

    def share(self, budget: int, left: int, candidates: int, block_size: int) -> int:
        return left


class PrefillingFirst(Policy):
    """Finish what was begun, then admit in arrival order.

    A half-filled request holds blocks and shows its user nothing; finishing it frees both.
    Promise: no request that arrived later gets prefill before an older one that could use it.
    """

    name = "prefilling_first"

    def order(self, prefilling, waiting, step):
        return [*prefilling, *waiting]


class WaitingFirst(Policy):
    """Admit newcomers before going on with what was begun.

    Promise: none. While newcomers keep coming, a half-filled request waits for ever and holds its
    blocks. That is its lesson.
    """

    name = "waiting_first"

    def order(self, prefilling, waiting, step):
        return [*waiting, *prefilling]


class _Aged(Policy):
    """Orders by `urgency`, except that requests older than `max_age` steps go first, by arrival.

    Age counts from arrival. (Counting the steps since the last chunk makes everybody old under
    load and turns the policy into first-come.)
    Promise: once a request is `max_age` steps old, no request that arrived after it gets prefill
    before it. Its total wait has no bound: under overload nothing can bound that.
    """

    def __init__(self, max_age: int = 64) -> None:
        self.max_age = max_age

    def urgency(self, sequence: Sequence):
        raise NotImplementedError

    def order(self, prefilling, waiting, step):
        def key(sequence: Sequence):
            aged = step - sequence.arrival_step >= self.max_age
            return (0, sequence.arrival) if aged else (1, self.urgency(sequence), sequence.arrival)

        return sorted([*prefilling, *waiting], key=key)


class ShortestFirst(_Aged):
    """Fewest tokens left to prefill first: the best mean TTFT. Long prompts wait until they are aged."""

    name = "shortest_first"

    def urgency(self, sequence):
        return sequence.remaining_token_count


class Priority(_Aged):
    """The lowest `priority` number first; equal ones by arrival."""

    name = "priority"

    def urgency(self, sequence):
        return sequence.priority


class FairShare(Policy):
    """Split the budget among all that can use it, so that a short prompt isn't stuck behind a long one.

    A share is max(min(block_size, budget // 2), left / candidates): even, but never shredded into
    chunks of a few tokens; what one can't use goes to the next. Who has gone longest without a
    chunk is served first; a newcomer counts as served just before it came, so that a stream of
    newcomers doesn't push aside what was begun.
    Promise: with c candidates that all fit in the sequence and block budgets, and at least one share of
    min(block_size, budget // 2) tokens left by decode in every step, each gets its next chunk within c
    steps, whoever arrives meanwhile.
    """

    name = "fair_share"

    def order(self, prefilling, waiting, step):
        return sorted([*prefilling, *waiting], key=lambda s: (max(s.last_step, s.arrival_step - 1), s.arrival))

    def share(self, budget, left, candidates, block_size):
        return max(min(block_size, budget // 2), -(-left // max(1, candidates)))


POLICIES = {cls.name: cls for cls in (PrefillingFirst, WaitingFirst, ShortestFirst, Priority, FairShare)}
assert set(POLICIES) == set(POLICY_NAMES), "config.POLICY_NAMES must list exactly these policies"


class _OrderOnly(Policy):
    """A policy object that has an `order` method and nothing else."""

    def __init__(self, policy) -> None:
        self.order = policy.order


def make_policy(policy) -> Policy:
    """The policy object for a name; or the object itself, which needs no more than an `order` method."""
    if isinstance(policy, str):
        return POLICIES[policy]()
    return policy if hasattr(policy, "share") else _OrderOnly(policy)
