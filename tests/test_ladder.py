"""The ladder and the sweep over chunk sizes: the same requests on every rung, numbers worked out by hand, whole runs."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers import prompt

from course_lib import EngineConfig
from course_lib.__main__ import main
from course_lib.bench import WORKLOADS, at_scale, chunks, ladder
from course_lib.bench.ladder_measures import (
    COMPARED,
    effects,
    effects_text,
    figure,
    kv_slots,
    measures,
    table,
    tokens_of,
    value_at,
)
from course_lib.runners import FakeRunner
from course_lib.runners.model import ModelRunner
from course_lib.trace import ChunkRecord, RequestRecord, StepRecord, Trace
from course_lib.workloads import Request

TEXT = prompt(2006)  # as long as the course's document
RUNGS = {rung.name: rung for rung in ladder.rungs()}
IN_ENGINE = [rung for rung in RUNGS.values() if rung.settings is not None]


class EchoModel:
    """A PlainModel to be: its token depends on all tokens that it was shown or has in its cache. Each call takes 1 s."""

    def __init__(self):
        self.calls, self.time = [], 0.0

    def new_cache(self):
        return []

    def __call__(self, token_ids, start_pos, cache=None):
        assert start_pos == (0 if cache is None else len(cache))
        self.calls.append((start_pos, len(token_ids)))
        self.time += 1.0
        text = (cache or []) + token_ids
        if cache is not None:
            cache += token_ids
        return hash(tuple(text)) % 1000

    def now(self):
        return self.time


# ---- the rungs and their workloads ----------------------------------------------------------------


def test_workloads_are_the_same_in_every_call_and_have_the_names_of_the_command():
    made = ladder.workloads(TEXT)
    assert made == ladder.workloads(TEXT)
    assert tuple(made) == WORKLOADS["ladder"]


@pytest.mark.parametrize("scale", [1, ladder.QUICK])
def test_every_request_fits_into_a_reservation_and_its_reservation_into_the_pool(scale):
    longest = ladder.MAX_MODEL_LEN // scale
    for workload in ladder.workloads(TEXT, scale).values():
        assert all(len(r.prompt) + r.max_tokens <= longest for r in workload.requests)
    for rung in ladder.rungs(scale):
        if rung.settings:
            assert EngineConfig(**rung.settings).max_model_len == longest


def test_the_engine_rungs_have_equally_many_slots():
    assert {r.settings["block_size"] * r.settings["num_blocks"] for r in IN_ENGINE} == {ladder.KV_SLOTS}


def test_only_what_a_rung_adds_differs_from_the_rung_before():
    changed = []
    for before, after in pairwise(IN_ENGINE):
        changed.append({name for name, value in after.settings.items() if value != before.settings[name]})
    assert changed == [
        {"max_num_seqs"},
        {"block_size", "num_blocks"},
        {"enable_prefix_caching"},
        {"max_prefill_chunk_size", "max_num_batched_tokens"},
    ]


def test_questions_share_their_documents_and_chats_share_nothing():
    requests = ladder.workloads(TEXT)["rag"].requests
    assert requests[0].prompt[:400] == requests[2].prompt[:400] != requests[1].prompt[:400]
    assert len({tuple(r.prompt) for r in requests}) == len(requests)
    chats = [tuple(r.prompt[:16]) for r in ladder.workloads(TEXT)["chat"].requests]
    assert len(set(chats)) == len(chats)


# ---- the loop without an engine -------------------------------------------------------------------


def test_the_plain_loop_gives_the_same_tokens_with_a_cache_and_without_and_computes_less_with_one():
    requests = [Request("a", 0.0, [1, 2, 3], 3), Request("b", 0.0, [4, 5], 2)]
    naive, cached = EchoModel(), EchoModel()
    without = ladder.one_by_one(naive, requests, keeps_cache=False, now=naive.now)
    with_cache = ladder.one_by_one(cached, requests, keeps_cache=True, now=cached.now)
    assert tokens_of(without) == tokens_of(with_cache)
    assert naive.calls == [(0, 3), (0, 4), (0, 5), (0, 2), (0, 3)]
    assert cached.calls == [(0, 3), (3, 1), (4, 1), (0, 2), (2, 1)]
    assert kv_slots(without)["reserved_peak"] == 0
    assert kv_slots(with_cache)["reserved_peak"] == 5


def test_the_plain_loop_serves_one_after_another_and_counts_from_the_arrival():
    model = EchoModel()
    requests = [Request("late", 1.5, [7] * 4, 2), Request("early", 0.0, [1, 2], 3)]
    row = measures(ladder.one_by_one(model, requests, True, now=model.now), requests)
    assert row["per_request"]["early"] == {"ttft_s": 1.0, "stall_s": 1.0}
    assert row["per_request"]["late"]["ttft_s"] == 2.5  # it waits from 1.5 to 3, and its first token takes a second
    assert row["cut"] is None and row["duration_s"] == 5.0 and row["output_tokens_per_second"] == 1.0


def test_a_cut_run_says_what_is_missing_and_whoever_waits_counts_with_the_wait():
    model = EchoModel()
    requests = [Request("first", 0.0, [1, 2], 5), Request("second", 1.0, [3], 5), Request("never", 90.0, [4], 5)]
    row = measures(ladder.one_by_one(model, requests, False, limit=3.0, now=model.now), requests)
    assert row["cut"] == {"after_s": 3.0, "tokens": 3, "of": 15, "waiting": 1}  # "never" hasn't arrived
    assert row["ttft_s"]["p50"] == 1.5 and row["ttft_s"]["max"] == 2.0  # 1 s, and 2 s of waiting so far
    assert row["per_request"]["second"]["ttft_s"] is None


# ---- numbers from a trace -------------------------------------------------------------------------


def small_trace():
    """Two requests in blocks of 4: "a" has 5 tokens, then 6; "b" 3, is preempted, and ends."""

    def chunk(name, start, num_tokens):
        return ChunkRecord(name, start, num_tokens, "prefill", True)

    return Trace(
        {"block_size": 4},
        {name: RequestRecord(name, name, 5, 2, 0.0, 0) for name in "ab"},
        [
            StepRecord(0, 0.0, 1.0, [chunk("a", 0, 5), chunk("b", 0, 3)], tokens={"a": 1, "b": 1}, blocks_used=3),
            StepRecord(
                1, 1.0, 4.0, [chunk("a", 5, 1)], tokens={"a": 2}, preempted=["b"], finished={"a": "length"}, blocks_used=2
            ),
            StepRecord(2, 4.0, 5.0, [chunk("b", 0, 4)], tokens={"b": 2}, finished={"b": "length"}, blocks_used=1),
        ],
    )


def test_slots_are_reserved_in_blocks_and_what_is_empty_in_them_is_waste():
    slots = kv_slots(small_trace())  # reserved 12, 8, 4; empty 3 + 1, 2, 0; for 1, 3 and 1 s
    assert (slots["reserved_peak"], slots["used_peak"], slots["requests_peak"]) == (12, 8, 2)
    assert slots["reserved_mean"] == pytest.approx((12 + 3 * 8 + 4) / 5)
    assert slots["used_mean"] == pytest.approx((8 + 3 * 6 + 4) / 5)
    assert slots["waste"] == pytest.approx(1 - 30 / 40)


def test_preempted_and_computed_tokens_are_counted():
    row = measures(small_trace(), [Request("a", 0.0, [0] * 5, 2), Request("b", 0.0, [0] * 3, 2)])
    assert (row["preemptions"], row["computed_tokens"], row["output_tokens"]) == (1, 13, 4)
    assert (row["stall_s"], row["itl_s"]["p50"], row["ttft_s"]["max"]) == (4.0, 3.5, 1.0)


def row(rung, index, stall, rate=10.0, cut=None):
    return {"rung": rung, "round": index, "stall_s": stall, "output_tokens_per_second": rate, "cut": cut}


def test_an_effect_is_clear_only_if_all_rounds_agree_and_it_is_more_than_10_percent():
    cases = {
        "better": [(1.0, 0.5), (2.0, 1.5)],
        "worse": [(1.0, 1.2), (1.0, 1.1)],
        "no clear change": [(1.0, 0.5), (1.0, 1.01)],  # the rounds disagree
    }
    for verdict, pairs in cases.items():
        runs = [row(name, i, stall) for i, pair in enumerate(pairs) for name, stall in zip("AB", pair, strict=True)]
        (stall,) = [each for each in effects(runs, ["A", "B"]) if each["measure"] == "longest gap"]
        assert stall["verdict"] == verdict, pairs
    runs = [row("A", 0, 1.0, rate=10), row("B", 0, 0.93, rate=12)]
    found = {each["measure"]: each for each in effects(runs, ["A", "B"])}
    assert found["longest gap"]["verdict"] == "no clear change"  # 7 %
    assert found["output tokens/s"]["verdict"] == "better" and found["output tokens/s"]["ratio"] == 1.2  # more is better


def test_a_ratio_to_a_cut_run_is_a_bound_for_times_to_first_token():
    runs = [row("A", 0, 1.0, cut={"tokens": 1}) | {"ttft_s": {"p50": 4.0}}, row("B", 0, 0.5) | {"ttft_s": {"p50": 1.0}}]
    found = {each["measure"]: each["bound"] for each in effects(runs, ["A", "B"])}
    assert found == {"median TTFT": True, "longest gap": False, "output tokens/s": False}
    assert "better: median TTFT × <0.25" in effects_text(effects(runs, ["A", "B"]))
    runs[1]["ttft_s"]["p50"] = 6.0  # later than the others had waited when they were cut: that says nothing
    assert next(each for each in effects(runs, ["A", "B"]) if each["bound"])["verdict"] == "not known"


# ---- the rungs on an engine -----------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS["ladder"])
def test_every_engine_rung_gives_each_request_the_tokens_it_gets_alone(name):
    requests = ladder.workloads(TEXT, ladder.QUICK)[name].requests
    for rung in ladder.rungs(ladder.QUICK):
        if rung.settings:
            runner = FakeRunner(step_seconds=0.01)
            tokens = tokens_of(ladder.run(runner, rung, requests))
            assert tokens == {r.request_id: runner.solo(list(r.prompt), r.max_tokens) for r in requests}, rung.name


def test_a_reservation_up_front_limits_how_many_run_at_once_and_blocks_do_not():
    requests = [replace(r, arrival_time=0.0) for r in ladder.workloads(TEXT)["chat"].requests]
    rows = {rung.name: measures(ladder.run(FakeRunner(), rung, requests), requests) for rung in IN_ENGINE}
    at_once = {name: each["kv_slots"]["requests_peak"] for name, each in rows.items()}
    assert at_once == {
        "own forward": 1, "continuous batching": 4, "paged attention": 8, "prefix cache": 8, "chunked prefill": 8,
    }  # fmt: skip
    waste = {name: each["kv_slots"]["waste"] for name, each in rows.items()}
    assert waste["continuous batching"] > 0.9 and waste["paged attention"] < 0.2


def test_the_prefix_cache_finds_the_documents_and_only_where_they_are_shared():
    hits = {}
    for name, workload in ladder.workloads(TEXT).items():
        row = measures(ladder.run(FakeRunner(step_seconds=0.01), RUNGS["prefix cache"], workload.requests), workload.requests)
        hits[name] = row["prefix_hit_tokens"]
    assert hits["rag"] == 4 * 400 and hits["mix"] == 2 * 400 and hits["chat"] == hits["document"] == 0


def test_a_step_of_the_last_rung_has_at_most_a_chunk_of_prompt_tokens():
    requests = ladder.workloads(TEXT)["document"].requests
    most = {}
    for name in ("prefix cache", "chunked prefill"):
        trace = ladder.run(FakeRunner(step_seconds=0.02), RUNGS[name], requests)
        most[name] = max(step.prefill_tokens for step in trace.steps)
    assert most["chunked prefill"] <= ladder.CHUNK + ladder.SEQS and most["prefix cache"] >= 1920


def test_the_gpu_is_asked_while_a_run_lasts_and_nobody_where_there_is_none():
    asked = []
    with ladder.Utilisation(lambda: asked.append(1) or 50.0) as gpu:
        while not asked:
            pass
    assert gpu.mean == 50.0
    with ladder.Utilisation() as gpu:
        pass
    assert gpu.mean is None


# ---- whole measurements, on the tiny model --------------------------------------------------------


def test_the_ladder_runs_from_naive_to_chunked_and_all_tokens_are_equal(tiny):
    runner = ModelRunner(tiny)
    workload = ladder.workloads(tiny.tokenizer.encode(ladder.document_text()), ladder.QUICK)["document"]
    result = ladder.measure(runner, ladder.rungs(ladder.QUICK), workload, 2, say=lambda line: None)
    order = [row["rung"] for row in result["runs"]]
    names = list(RUNGS)
    assert order == names + names[1:] + names[:1]  # the order turns
    assert result["different_tokens"] == []
    assert all(row["output_tokens"] == sum(r.max_tokens for r in workload.requests) for row in result["runs"])
    assert {each["measure"] for each in result["effects"]} == set(COMPARED)
    drawn = figure(result, "document")
    assert [axes.get_title() for axes in drawn.axes] == ["median TTFT", "longest gap", "output tokens/s", "KV slots reserved"]
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == names
    text = table(result)
    assert all(name in text for name in names) and "equal in all 14 runs" in text


def test_another_token_is_reported_with_its_place_and_the_gap_of_the_logits(tiny):
    runner, request = ModelRunner(tiny), Request("a", 0.0, [1, 2, 3], 3)
    runs = [{"round": 0, "rung": "own forward"}, {"round": 0, "rung": "KV cache"}]
    (found,) = ladder.differences(runner, [request], runs, [{"a": [5, 9, 7]}, {"a": [5, 6, 7]}])
    gap = found.pop("logit_gap")
    assert found == {"round": 0, "rung": "own forward", "request": "a", "place": 1} and gap > 0
    assert ladder.differences(runner, [request], runs, [{"a": [5]}, {"a": [5, 6, 7]}]) == []  # cut, but not other


def test_the_command_keeps_every_run_and_a_part_does_not_replace_the_whole(tmp_path, capsys):
    assert (
        main(["bench", "ladder", "--quick", "--rounds", "1", "--threads", "1", "--workloads", "chat", "--out", str(tmp_path)])
        == 0
    )
    results = json.loads((tmp_path / "ladder_chat.json").read_text())
    assert set(results["workloads"]) == {"chat"} and len(results["workloads"]["chat"]["runs"]) == len(RUNGS)
    assert {"machine", "threads", "seed", "kv_bytes_per_slot", "rungs", "kv_slots"} <= set(results)
    assert "no clear change" in capsys.readouterr().out


def test_a_workload_of_another_part_leaves_a_part_out(tmp_path, capsys):
    assert (
        main(["bench", "throughput", "ladder", "--workloads", "mix", "--quick", "--rounds", "1", "--out", str(tmp_path)]) == 0
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ladder_mix.json"]


def test_the_command_sweeps_the_chunk_sizes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(at_scale, "sweeps", list)
    assert main(["bench", "chunks", "--quick", "--rounds", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "chunks.json").read_text())
    assert [row["max_prefill_chunk_size"] for row in results["runs"]] == list(chunks.SIZES)
    assert all(len(row["measured"]) == 2 for row in results["runs"])
    assert set(results["errors"]["by_size"]) == {str(size or "whole") for size in chunks.SIZES}
    assert "target 15%" in capsys.readouterr().out
    drawn = chunks.figure(results["runs"], results["document"])
    labels = [line.get_label() for axes in drawn.axes for line in axes.lines if not line.get_label().startswith("_")]
    assert len(labels) == 6 and sum("simulated" in label for label in labels) == 3


# ---- the sweep's own numbers ----------------------------------------------------------------------


def test_the_simulators_errors_are_taken_from_32_tokens_on_and_judged_by_their_median():
    def row(size, predicted, measured, step):
        run = {chunks.GAP: measured}
        return {
            "max_prefill_chunk_size": size,
            "predicted": {chunks.GAP: predicted},
            "measured": [run],
            "step_errors": [{"median": step}],
        }

    rows = [row(size, 1.1, 1.0, 0.05) for size in chunks.SIZES]
    rows[0] = row(16, 9.0, 1.0, 9.0)  # not judged
    errors = chunks.errors_of(rows)
    assert errors["stall"]["median"] == pytest.approx(0.1) and errors["stall"]["met"]
    assert errors["step_time"]["max"] == 0.05 and errors["step_time"]["met"]
    assert errors["by_size"]["16"]["stall"] == pytest.approx(8.0)
    bad = chunks.errors_of([row(size, 1.5, 1.0, 0.2) for size in chunks.SIZES])
    assert not bad["stall"]["met"] and "MISSED" in chunks.errors_text(bad)


def test_at_a_data_centres_size_larger_chunks_stall_longer_and_finish_sooner():
    for each in at_scale.sweeps(sizes=(128, 512, 2048, None)):
        stalls = [row["stall_s"] for row in each["sizes"]]
        ttfts = [row["long_ttft_s"] for row in each["sizes"]]
        assert stalls == sorted(stalls) and stalls[-1] > 10 * stalls[0], each["chip"]
        assert ttfts == sorted(ttfts, reverse=True), each["chip"]
        assert stalls[-1] < ttfts[-1] * 1.01  # a whole prompt stalls everybody for as long as it takes


def test_the_simulated_sweep_is_the_same_every_time():
    asked = {"running": 8, "prompt": 512, "sizes": (64, None), "pairs": at_scale.PAIRS[:1]}
    assert at_scale.sweeps(**asked) == at_scale.sweeps(**asked)
    assert "llama3-8b on h100, 8 streams, a prompt of 512" in at_scale.table(at_scale.sweeps(**asked))


def test_a_missing_number_is_none():
    assert value_at({"a": {"b": None}}, ("a", "b", "c")) is None and value_at({"a": {"b": 2}}, ("a", "b")) == 2
