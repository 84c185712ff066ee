"""Stands between the scheduler and a policy: a policy may look at everything that a real scheduler knows, and change nothing."""

from __future__ import annotations

from ..policies import Policy, make_policy
from ..sequence import Sequence


class Foul(Exception):
    """What a policy must not do; the message says what it did."""


class View:
    """A sequence as a policy sees it: to look at, not to change."""

    __slots__ = ("_View__sequence",)
    HIDDEN = ("params", "max_new_tokens")

    def __init__(self, sequence: Sequence) -> None:
        object.__setattr__(self, "_View__sequence", sequence)

    def __getattr__(self, name: str):
        if name in View.HIDDEN:
            raise Foul(f"it asked for {name}: a scheduler doesn't know how an answer will turn out")
        value = getattr(self.__sequence, name)
        if callable(value) and name != "token_ids":
            raise Foul(f"it asked for {name}() of a sequence: a policy orders sequences, it doesn't change them")
        return tuple(value) if type(value) is list else value

    def __setattr__(self, name: str, value: object) -> None:
        raise Foul(f"it tried to set {name} of a sequence: a policy orders sequences, it doesn't change them")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    @property
    def request_id(self) -> str:
        return f"r{self.__sequence.arrival}"

    trace_name = request_id

    def __repr__(self) -> str:
        return f"<sequence {self.request_id}, {self.remaining_token_count} tokens to prefill>"


class Referee(Policy):
    """Stands between the scheduler and a policy: hands out views, checks what comes back."""

    def __init__(self, policy: object) -> None:
        self.policy = make_policy(policy)
        self._views: dict[int, tuple[View, Sequence]] = {}  # by the sequence's id(); it's kept, so the id stays its own

    def order(self, prefilling, waiting, step):
        given = [[self._view(s) for s in queue] for queue in (prefilling, waiting)]
        handed = [list(queue) for queue in given]
        answer = self.policy.order(*handed, step)
        if handed != given:
            raise Foul("it changed the list that it was given: return a new one, sorted(…) instead of .sort()")
        if answer is None:
            raise Foul("order() returned None: is there a return in it?")
        known = {
            id(view): s
            for views, queue in zip(given, (prefilling, waiting), strict=True)
            for view, s in zip(views, queue, strict=True)
        }
        result = []
        for view in answer:
            sequence = known.pop(id(view), None)
            if sequence is None:
                again = any(view is other for views in given for other in views)
                raise Foul(f"order() returned {view!r:.80} " + ("twice" if again else "which is not waiting for prefill"))
            result.append(sequence)
        return result

    def share(self, budget, left, candidates, block_size):
        share = self.policy.share(budget, left, candidates, block_size)
        if type(share) is not int:
            raise Foul(f"share() returned {share!r:.80}: it must be a whole number of tokens")
        if share > budget:
            raise Foul(f"share() returned {share} tokens of a step that has {budget}")
        return share

    def _view(self, sequence: Sequence) -> View:
        if id(sequence) not in self._views:
            self._views[id(sequence)] = (View(sequence), sequence)
        return self._views[id(sequence)][0]
