"""Run a policy through all rounds, whatever it does."""

from __future__ import annotations

import copy
import traceback
from pathlib import Path

from ..checks.exercise import NotDone
from ..checks.run import TimeLimit, TimeUp, file_text
from .board import remember
from .referee import Foul, Referee
from .result import Result
from .rounds import rounds
from .score import Score, built_in_scores, score

SECONDS = 20.0  # of this machine's time for a round; an honest policy needs less than one


def arena(policy: object, *, save: bool = True) -> Result:
    """Score a policy in all rounds, against the built-in ones. It doesn't raise what the policy raises, but for a stub's NotDone.

    policy  an object with an `order` method, as EngineConfig(policy=…) takes it
    save    remember the points for `leaderboard()`
    """
    if isinstance(policy, type) or not callable(getattr(policy, "order", None)):
        hint = f": write {policy.__name__}() instead of {policy.__name__}" if isinstance(policy, type) else ""
        raise TypeError(f"policy must be an object with an order() method, got {policy!r:.100}{hint}")
    name = str(getattr(policy, "name", "custom"))
    name = type(policy).__name__ if name == "custom" else name
    name = f"{name} (yours)" if name in built_in_scores() else name
    scores: dict[str, Score] = {}
    problem = ""
    for game in rounds():
        try:
            with TimeLimit(SECONDS):
                scores[game.name] = score(game, Referee(copy.deepcopy(policy)))
        except TimeUp:
            problem = f"In {game.name} it was stopped after {SECONDS:g} seconds: does a loop in it ever end?"
        except Foul as foul:
            problem = f"In {game.name} {foul}"
        except (KeyboardInterrupt, NotDone):
            raise
        except BaseException as error:  # whatever its code raises, SystemExit too
            problem = f"In {game.name} it raised {_described(error)}"
        if problem:
            scores = {}
            break
    result = Result(name, scores, problem)
    if save:
        remember(result)
    return result


def _described(error: BaseException) -> str:
    """What was raised, and the last line of the policy's own code on the way."""
    here = Path(__file__).resolve().parents[1]
    own = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).resolve().is_relative_to(here)]
    text = f"{type(error).__name__}: {error}".rstrip(": ")[:300]
    return (
        f"{text}, in {own[-1].name}, line {own[-1].lineno} of {file_text(own[-1].filename)}:  {own[-1].line}" if own else text
    )
