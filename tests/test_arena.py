"""The policy arena: the same traffic for everybody, points that can be explained, and no points for foul play."""

import json
import re
import time

import pytest

from course_lib.arena import arena, built_in_scores, leaderboard, play, rounds, score
from course_lib.arena.board import leaderboard_file, read_leaderboard
from course_lib.arena.pictures import excerpt
from course_lib.arena.score import PATIENCE
from course_lib.checks import NotDone
from course_lib.policies import FairShare, Policy, PrefillingFirst, ShortestFirst


class Sorted(Policy):
    """Policies of tests: an order by one key."""

    name = "test"

    def __init__(self, key):
        self.key = key

    def order(self, prefilling, waiting, step):
        return sorted([*prefilling, *waiting], key=self.key)


def always(answer):
    """A policy whose order() returns answer(prefilling, waiting)."""

    class Always:
        name = "test"

        def order(self, prefilling, waiting, step):
            return answer(prefilling, waiting)

    return Always()


@pytest.fixture(autouse=True)
def one_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress.json"))


def problem_of(policy):
    result = arena(policy)
    assert result.points == 0 and result.scores == {}
    return result.problem


# ---- the rounds and the points


def test_a_copy_of_a_built_in_policy_gets_exactly_its_points():
    class Copy:
        name = "copy"

        def order(self, prefilling, waiting, step):
            return [*prefilling, *waiting]

    result = arena(Copy())
    for name, points in built_in_scores()["prefilling_first"].items():
        mine = result.scores[name]
        assert (mine.points, mine.median_ttft, mine.p99_itl, mine.fairness) == (
            points.points,
            points.median_ttft,
            points.p99_itl,
            points.fairness,
        )


def test_the_referee_changes_nothing_for_a_policy_with_shares():
    assert arena(FairShare()).scores == built_in_scores()["fair_share"]


def test_the_policies_differ_in_every_round():
    for game in rounds():
        points = {name: round(scores[game.name].points, 1) for name, scores in built_in_scores().items()}
        assert len(set(points.values())) >= 3, f"{game.name}: {points}"


def test_no_built_in_policy_is_the_best_everywhere():
    best = [max(built_in_scores().items(), key=lambda entry: entry[1][game.name].points)[0] for game in rounds()]
    assert len(set(best)) >= 3, best


def test_points_are_the_share_of_requests_that_met_both_targets():
    game = next(game for game in rounds() if game.name == "bursts")
    result = score(game, PrefillingFirst())
    times, good = result.trace.token_times(), 0
    for name, row in times.items():
        gaps = [later - earlier for earlier, later in zip(row, row[1:], strict=False)]
        good += (
            row[0] - result.trace.requests[name].arrival_time <= game.targets.ttft and max(gaps, default=0) <= game.targets.itl
        )
    assert result.points == pytest.approx(100 * good / len(times))  # no gap here lies between the P99 and the longest
    assert not result.starved


def test_all_requests_are_served_in_every_round():
    for game in rounds():
        trace = built_in_scores()["prefilling_first"][game.name].trace
        assert len(trace.requests) == len(game.requests)
        assert all(request.finish_reason == "length" for request in trace.requests.values())


def test_fairness_is_one_when_all_are_slowed_down_alike_and_small_when_few_bear_it_all():
    rush = {name: scores["rush"].fairness for name, scores in built_in_scores().items()}
    assert 0 < min(rush.values()) < max(rush.values()) <= 1
    assert rush["fair_share"] > rush["prefilling_first"]  # behind a document a chat waits many times its own time


# ---- starving


def test_shortest_first_without_ageing_starves_a_document_and_that_halves_the_round():
    result = arena(Sorted(lambda s: s.remaining_token_count))
    rush = result.scores["rush"]
    assert rush.points == pytest.approx(50 * rush.attainment)
    assert all(victim.name.startswith("doc") and victim.hunger > PATIENCE * 0.5 for victim in rush.starved)
    assert any("starves somebody in rush: doc" in line for line in result.verdict)


@pytest.mark.parametrize("policy", ["prefilling_first", "shortest_first", "fair_share"])
def test_a_policy_that_lets_the_old_ones_go_on_starves_nobody(policy):
    assert all(not scored.starved for scored in built_in_scores()[policy].values())


def test_a_slow_request_that_gets_a_chunk_in_every_step_has_not_starved():
    """Fair share gives the documents their tokens in many small shares: as late as without ageing, never without progress."""
    fair = built_in_scores()["fair_share"]["rush"]
    greedy = arena(Sorted(lambda s: s.remaining_token_count)).scores["rush"]
    assert fair.worst.ttft > 0.8 * greedy.worst.ttft
    assert fair.worst.hunger < 0.5 < greedy.worst.hunger


def test_whoever_leaves_requests_out_is_found_out():
    result = arena(always(lambda prefilling, waiting: [s for s in [*prefilling, *waiting] if len(s.prompt_token_ids) < 4096]))
    assert result.problem == ""
    assert result.scores["rush"].starved
    assert "starves somebody in rush" in str(result)


# ---- foul play


class Loops:
    def order(self, prefilling, waiting, step):
        while True:
            pass


def test_an_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(play, "SECONDS", 0.5)
    begin = time.monotonic()
    assert problem_of(Loops()) == "In rush it was stopped after 0.5 seconds: does a loop in it ever end?"
    assert time.monotonic() - begin < 10


def test_an_exception_is_shown_with_the_policys_own_line():
    def fails(prefilling, waiting):
        return waiting[99999]

    problem = problem_of(always(fails))
    assert problem.startswith("In rush it raised IndexError: list index out of range, in fails, line ")
    assert problem.endswith("test_arena.py:  return waiting[99999]")


def test_leaving_the_program_is_no_way_out():
    def leaves(prefilling, waiting):
        raise SystemExit(0)

    assert "SystemExit" in problem_of(always(leaves))


def test_a_policy_that_is_not_written_yet_is_no_foul():
    def stub(prefilling, waiting):
        raise NotDone("11.2 order")

    with pytest.raises(NotDone):
        arena(always(stub))
    assert read_leaderboard() == {}


def set_to(name, value):
    def sets(prefilling, waiting):
        for sequence in waiting:
            setattr(sequence, name, value)
        return [*prefilling, *waiting]

    return sets


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda prefilling, waiting: None, "order() returned None: is there a return in it?"),
        (lambda prefilling, waiting: [*waiting, *waiting], "twice"),
        (lambda prefilling, waiting: ["r1"], "order() returned 'r1' which is not waiting for prefill"),
        (lambda prefilling, waiting: (waiting.reverse(), waiting)[1], "it changed the list that it was given"),
        (set_to("arrival_step", -1000), "it tried to set arrival_step of a sequence"),
        (set_to("prompt_token_ids", [1]), "it tried to set prompt_token_ids of a sequence"),
        (lambda prefilling, waiting: [s.transition_to("running") for s in waiting], "it asked for transition_to() of a sequence"),
        (lambda prefilling, waiting: sorted(waiting, key=lambda s: s.max_new_tokens), "it asked for max_new_tokens: a scheduler doesn't know"),
        (lambda prefilling, waiting: sorted(waiting, key=lambda s: s.params.max_tokens), "it asked for params"),
    ],
    ids=["none", "twice", "stranger", "in place", "sets a counter", "sets the prompt", "changes a state", "oracle", "oracle's params"],
)  # fmt: skip
def test_foul_play_gets_no_points_and_is_told_why(answer, told):
    assert told in problem_of(always(answer))


@pytest.mark.parametrize(("share", "told"), [(100_000, "100000 tokens of a step that has 512"), (2.5, "share() returned 2.5")])
def test_a_share_above_the_budget_or_of_half_tokens_is_foul(share, told):
    class Greedy(PrefillingFirst):
        name = "greedy"

        def share(self, budget, left, candidates, block_size):
            return share

    assert told in problem_of(Greedy())


def test_a_prompt_cant_be_changed_through_a_view_and_names_tell_nothing():
    seen = []

    def looks(prefilling, waiting):
        for sequence in waiting[:1]:
            seen.append((type(sequence.prompt_token_ids), sequence.request_id, sequence.trace_name))
        return [*prefilling, *waiting]

    assert arena(always(looks)).problem == ""
    assert {kind for kind, *_ in seen} == {tuple}
    assert all(name == trace_name and name[0] == "r" and name[1:].isdigit() for _, name, trace_name in seen)


def test_every_round_gets_a_fresh_copy_of_the_policy():
    class Remembers(PrefillingFirst):
        name = "remembers"

        def __init__(self):
            self.last = -1

        def order(self, prefilling, waiting, step):
            assert step > self.last, "a step of an earlier round is remembered"
            self.last = step
            return super().order(prefilling, waiting, step)

    policy = Remembers()
    assert arena(policy).problem == "" and policy.last == -1


def test_a_class_instead_of_an_object_is_an_error_that_says_what_to_write():
    with pytest.raises(TypeError, match=r"write ShortestFirst\(\) instead of ShortestFirst"):
        arena(ShortestFirst)
    with pytest.raises(TypeError, match="must be an object with an order"):
        arena("shortest_first")


# ---- what is shown and remembered


def test_the_table_the_bars_and_the_worst_request_say_the_same():
    result = arena(Sorted(lambda s: s.remaining_token_count))
    text = str(result)
    assert [line.split()[0] for line in text.splitlines() if line.split()[1:2] == ["test"]] == [game.name for game in rounds()]
    assert result.verdict[0].startswith(f"test: {result.points:.1f} points")
    html = result._repr_mimebundle_()["text/html"]
    assert html.count("<tr") == 1 + len(rounds()) * (1 + len(built_in_scores()))
    assert all(html.count(f">{game.name}<") == 1 for game in rounds()), "a round is named once"
    assert re.findall(r'<td style="text-align:(\w+);white-space:nowrap', html)[:4] == ["left", "left", "right", "right"]
    assert html.count("<td") == html.count("nowrap")
    bars, worst = result.bars(), result.worst("rush")
    for game in rounds():
        assert f"test {result.scores[game.name].points:.1f}" in bars.alt
    assert f"{result.scores['rush'].worst.name} (worst)" in worst.svg and "test in rush" in worst.alt
    with pytest.raises(ValueError, match="round='x' is no round of the arena: use rush, bursts, agents, public"):
        result.worst("x")


def test_an_excerpt_ends_where_its_last_step_does():
    result = arena(Sorted(lambda s: s.remaining_token_count))
    score = result.scores["rush"]
    part = excerpt(score.trace, score.worst.name)
    last = part.steps[-1]
    assert last.end == score.trace.token_times()[score.worst.name][0]
    assert all(r.finish_time is None or r.finish_time <= last.end for r in part.requests.values())
    assert any(score.trace.requests[name].finish_time > last.end for name in part.requests if name in score.trace.requests)
    assert f"test in rush, excerpt: steps {part.steps[0].index} to {last.index}" in result.worst("rush").svg


def test_the_picture_without_a_round_shows_where_it_lost_most():
    result = arena(Sorted(lambda s: s.remaining_token_count))
    lost = {g.name: result.scores[g.name].points - max(s[g.name].points for s in built_in_scores().values()) for g in rounds()}
    assert f"test in {min(lost, key=lost.get)}" in result.worst().alt


def test_without_points_there_is_no_picture():
    result = arena(always(lambda prefilling, waiting: None))
    assert str(result) == "test: no points. In rush order() returned None: is there a return in it?"
    with pytest.raises(ValueError, match="test has no points and no picture"):
        result.bars()


def test_the_leaderboard_remembers_in_one_file_beside_the_progress(tmp_path):
    arena(Sorted(lambda s: s.remaining_token_count))
    assert leaderboard_file() == tmp_path / ".course_arena.json"
    assert set(json.loads(leaderboard_file().read_text())) == {"test"}
    lines = leaderboard().splitlines()[1:]
    points = [float(line.split()[2]) for line in lines]
    assert points == sorted(points, reverse=True) and sum("built in" in line for line in lines) == 4
    before = read_leaderboard()
    assert arena(Sorted(lambda s: s.arrival), save=False).points != before["test"]["points"]
    assert read_leaderboard() == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"mine": 3}', '{"mine": {"points": "many"}}', '{"mine": {"points": 1, "rounds": {"rush": "x"}, "when": ""}}'])
def test_a_broken_leaderboard_counts_as_empty(content):
    leaderboard_file().write_text(content, encoding="utf-8")
    assert read_leaderboard() == {}
    assert len(leaderboard().splitlines()) == 5


def test_a_policy_named_like_a_built_in_one_doesnt_take_its_place():
    assert arena(ShortestFirst(max_age=10)).name == "shortest_first (yours)"
