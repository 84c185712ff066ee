"""Real traffic in the simulator: the targets are the paper's, searches find what a table of rates finds, results are the same twice."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from course_lib.__main__ import main
from course_lib.bench import traffic
from course_lib.bench.traffic import Search, Setting, Trials, decode_step, numbers, percentile_of_counted
from course_lib.capacity import highest_rate
from course_lib.metrics import metrics, percentile
from course_lib.workloads import read_azure, read_mooncake, simulate

CHIP = ("a100", "mistral-7b")


@pytest.fixture
def azure(tmp_path):
    """A small trace with Azure's columns, heavy enough for a queue to grow; every tenth prompt is long."""
    rng, path = random.Random(0), tmp_path / "small.csv"
    rows = [f"2023-11-16 18:15:{i:02}.500,{6000 if i % 10 == 9 else rng.randrange(500, 2500)},{rng.randrange(5, 40)}" for i in range(60)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def mooncake(tmp_path):
    """A small trace with Mooncake's fields: every third request goes on from one of the three before it."""
    path = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 700 * i, "input_length": 5000, "output_length": 30, "hash_ids": [*range(9 * (i // 3), 9 * (i // 3) + 9), 10_000 + i]}
        for i in range(60)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_the_targets_are_those_of_the_paper():
    """Sarathi-Serve, table 3: 0.1 s and 0.5 s for Mistral-7B on an A100; ours come from the cost model, by their definition."""
    strict, relaxed = (times * decode_step(*CHIP) for times, _ in traffic.SLOS.values())
    assert strict == pytest.approx(0.1, rel=0.05) and relaxed == pytest.approx(0.5, rel=0.05)


def test_a_runs_numbers_are_those_of_metrics(azure):
    requests = read_azure(azure)
    trace = Setting(*CHIP, chunk=512).serve(requests, 6000)
    run, expected = numbers(trace), metrics(trace)
    assert (run["p50_ttft"], run["p99_ttft"]) == (expected.ttft.p50, expected.ttft.p99)
    assert (run["p50_itl"], run["p99_itl"]) == (expected.itl.p50, expected.itl.p99)
    assert (run["longest_gap"], run["steps"], run["output_tokens"]) == (expected.stall, expected.num_steps, expected.output_tokens)
    assert 0 <= run["p50_delay"] < run["p50_ttft"]


@pytest.mark.parametrize("count", [1, 2, 7, 100, 101])
def test_counted_values_have_the_percentiles_of_all_values(count):
    rng = random.Random(count)
    values = [rng.randrange(5) / 3 for _ in range(count)]
    for percent in (0.1, 50, 90, 99, 100):
        assert percentile_of_counted(Counter(values), percent) == percentile(values, percent)


def test_the_delay_ends_when_a_request_is_first_computed():
    """Two prompts at once, a budget of one: the second waits for the first's step, and the first for nothing."""
    requests = [replace(request, arrival_time=0.0) for request in traffic.at_rate(TWO, 1.0)]
    trace = Setting(*CHIP, chunk=512).serve(requests, 512)
    assert [step.admitted for step in trace.steps[:2]] == [["a"], ["b"]]
    assert numbers(trace)["p50_delay"] == pytest.approx(trace.steps[1].start / 2)


TWO = [traffic.Request(name, time, (512 * [1]), 3) for name, time in (("a", 0.0), ("b", 1.0))]


def test_a_whole_prompt_has_a_budget_that_it_fits_in(azure):
    trace = Setting(*CHIP, chunk=None).serve(read_azure(azure), 6000)
    assert max(chunk.num_tokens for step in trace.steps for chunk in step.chunks) == 6000
    chunked = Setting(*CHIP, chunk=512).serve(read_azure(azure), 6000)
    assert max(sum(chunk.num_tokens for chunk in step.chunks) for step in chunked.steps) == 512


def test_prefill_first_never_mixes(azure):
    busy = traffic.at_rate(read_azure(azure), 20.0)
    alone, mixed = (
        [len({chunk.kind for chunk in step.chunks}) for step in Setting(*CHIP, chunk=None, prefill_first=first).serve(busy, 6000).steps]
        for first in (True, False)
    )
    assert max(alone) == 1 and max(mixed) == 2


@pytest.mark.parametrize("limit", [0.07, 1.0, 3.0, 11.3, 127.9])
def test_a_search_ends_just_below_the_limit(limit):
    tried = []
    found = highest_rate(lambda rate: tried.append(rate) or rate <= limit, 4.0, 0.05)
    assert limit / 1.05 <= found <= limit and len(tried) == len(set(tried)) <= 13


def test_a_search_without_an_end_stops():
    assert highest_rate(lambda rate: False, 4.0, 0.05, doublings=3) == 0.0
    with pytest.raises(ValueError, match="up to 32"):
        highest_rate(lambda rate: True, 4.0, 0.05, doublings=3)


def test_no_rate_is_simulated_twice(azure, monkeypatch):
    served = []
    monkeypatch.setattr(traffic, "simulate", lambda config, requests, **kw: served.append(requests[-1].arrival_time) or simulate(config, requests, **kw))
    trials = Trials(Setting(*CHIP, chunk=512), read_azure(azure), 6000)
    first = trials.capacity({"p99_ttft": 1.0}, 4.0, 4)
    assert trials.capacity({"p99_ttft": 1.0, "p99_itl": 9.0}, 4.0, 4) == first > 0
    assert len(served) == len(set(served)) == len(trials.points)


def small_search(settings):
    return Search(*CHIP, ttft=2.0, start=4.0, doublings=4, settings=settings)


def test_chunks_carry_more_than_whole_prompts_under_the_strict_target(azure):
    search = small_search(lambda budget: [Setting(*CHIP, None), Setting(*CHIP, budget)])
    result = search.run("azure", read_azure(azure), 6000, lambda text: None)
    rates = {(row["slo"], row["name"]): row["rate"] for row in result["capacities"]}
    assert rates["strict", "chunks of 512"] > 1.5 * rates["strict", "whole prompts"]
    assert rates["relaxed", "whole prompts"] > rates["strict", "whole prompts"]
    for row in result["capacities"]:  # each is the highest rate tried that met both targets
        tried = next(each["tried"] for each in result["points"] if each["setting"] == row["setting"])
        met = [point["rate"] for point in tried if point["p99_itl"] <= row["itl"] and point["p99_ttft"] <= result["ttft"]]
        assert row["rate"] == max(met)


def test_a_search_gives_the_same_numbers_twice(azure):
    search = small_search(lambda budget: traffic.policies_and_baselines(*CHIP)(budget)[1:3])
    first, second = (json.dumps(search.run("azure", read_azure(azure), 6000, lambda text: None)) for _ in range(2))
    assert first == second


def test_the_prefix_cache_finds_what_mooncakes_hashes_say_is_the_same(mooncake):
    requests = read_mooncake(mooncake)
    off, on = (numbers(Setting("h100", "llama3-8b", 512, prefix_cache=cache, block_size=512).serve(requests, 5000)) for cache in (False, True))
    assert off["prefix_hit_rate"] == 0
    assert on["prefix_hit_rate"] == pytest.approx(2 / 3 * 9 * 512 / 5000)  # two of three requests find nine blocks
    assert on["p50_ttft"] < 0.5 * off["p50_ttft"]


def test_the_command_keeps_every_point_and_tells_the_traces(azure, mooncake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(traffic, "AZURE", [small_search(lambda budget: [Setting(*CHIP, None, prefill_first=True), Setting(*CHIP, budget)])])
    cached = Setting(*CHIP, 512, prefix_cache=True, block_size=512)
    monkeypatch.setattr(traffic, "MOONCAKE", [Search(*CHIP, 2.0, 4.0, 4, lambda budget: [cached])])
    assert main(["bench", "traffic", "--traces", str(azure), str(mooncake), "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "traffic.json").read_text())
    assert results["traces"]["azure"]["requests"] == 60 and results["traces"]["mooncake"]["file"] == "small.jsonl"
    assert [len(search["capacities"]) for search in results["searches"]] == [4, 2]
    assert [(run["name"], run["rate"]) for run in results["replays"]] == [("chunks of 512", None), ("whole prompts", None)]
    strict = results["searches"][0]["capacities"][1]
    assert [(run["name"], run["rate"], run["met"]) for run in results["on_all"]] == [("chunks of 512", strict["rate"], True)], "its slice is all of it"
    tried = {each["name"]: [point["rate"] for point in each["tried"]] for each in results["searches"][0]["points"]}
    assert strict["rate"] in tried["chunks of 512"] and all(len(rates) > 3 for rates in tried.values())
    assert "raw numbers" in capsys.readouterr().out


def test_the_whole_trace_is_tried_downwards_until_the_targets_are_met(azure):
    setting = Setting(*CHIP, 512)
    row = {"slo": "strict", "itl": 0.1, "setting": vars(setting), "rate": 12.0}
    runs = traffic.on_the_whole_trace({"trace": "azure", "ttft": 2.0, "capacities": [row]}, read_azure(azure), 6000)
    assert [run["met"] for run in runs] == [False] * (len(runs) - 1) + [True] and len(runs) > 1
    assert [run["rate"] for run in runs] == pytest.approx([12.0 * traffic.DESCENT**k for k in range(len(runs))])
    assert runs[-1]["p99_ttft"] <= 2.0 < runs[-2]["p99_ttft"]


def test_a_trace_too_short_for_a_queue_is_said(azure, capsys):
    azure.write_text("".join(azure.read_text().splitlines(keepends=True)[:5]))
    assert main(["bench", "traffic", "--traces", str(azure)]) == 2
    assert "give a longer workload" in capsys.readouterr().err


def test_without_traces_the_command_says_what_it_needs(capsys):
    assert main(["bench", "traffic"]) == 2
    assert "--traces" in capsys.readouterr().out


@pytest.mark.parametrize("name, text, says", [
    ("bad.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:47,-3,5\n", "bad.csv, line 3: ContextTokens='-3'"),
    ("bad.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}\n', "bad.jsonl, line 1: hash_ids has 1 numbers"),
    ("bad.txt", "", "must end in .csv"),
    ("none.csv", None, "No such file"),
])  # fmt: skip
def test_a_wrong_file_is_named_with_its_line(tmp_path, capsys, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["bench", "traffic", "--traces", str(tmp_path / name)]) == 2
    assert says in capsys.readouterr().err
