"""The command `python -m course_lib simulate`."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course_lib.__main__ import main
from course_lib.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["simulate", "--running", "4", "--prompt", "600", "--chunk", "whole", "100"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47.99,396,9\n2023-11-16 18:15:48,879,5\n"
MOONCAKE = "".join(
    json.dumps({"timestamp": 2000 * i, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2 + i]}) + "\n"
    for i in range(3)
)


def run(capsys, *argv):
    code = main([*argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(text):
    """The table as {first column: {column: value}}; the header is the line that starts with "prefill"."""
    lines = text.rstrip().splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("prefill  "))
    names, *found = [re.split(r" {2,}", line.strip()) for line in lines[header:]]
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in found}


def ms(text):
    return float(text.removesuffix(" ms").replace(",", ""))


def test_the_default_is_the_courses_scale_and_shows_the_trade_off_within_a_second(capsys):
    begin = time.process_time()  # of this program alone
    code, out, _ = run(capsys, "simulate")
    assert time.process_time() - begin < 1.0 and code == 0
    assert "llama3-8b on h100: 128 streams, then a prompt of 8,192 tokens" in out
    table = rows(out)
    whole, chunked = table["whole"], table["chunks of 1024"]
    assert ms(whole["long prompt's TTFT"]) < ms(chunked["long prompt's TTFT"]) < 1.3 * ms(whole["long prompt's TTFT"])
    assert ms(whole["longest gap"]) > 5 * ms(chunked["longest gap"])
    assert ms(whole["P99 ITL"]) > 5 * ms(chunked["P99 ITL"]) > ms(chunked["median ITL"])
    assert out.count("D decode: a token") == 2 and "\nlong  " in out


def test_the_command_needs_no_torch():
    code = "import sys; from course_lib.__main__ import main; main(['simulate']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    ("command", "codes"),
    [(["simulate"], [141]), (["simulate", "--help"], [0, 141]), (["simulate", "--chunk", "x"], [2])],
)
def test_a_reader_that_has_seen_enough_gets_no_traceback(command, codes, buffered):
    """As `… | head -1` does: the pipe is closed while there is more to write."""
    process = subprocess.Popen(
        [sys.executable, *([] if buffered else ["-u"]), "-m", "course_lib", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )  # fmt: skip
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in codes
    assert "BrokenPipe" not in errors and "Broken pipe" not in errors and "Traceback" not in errors


def test_the_contrast_adds_prefill_before_decode(capsys):
    _, out, _ = run(capsys, *SMALL, "--contrast")
    table = rows(out)
    assert list(table) == ["whole", "chunks of 100, prefill first", "chunks of 100"]
    assert ms(table["chunks of 100, prefill first"]["longest gap"]) > 3 * ms(table["chunks of 100"]["longest gap"])


def test_the_streams_have_a_head_start_and_outlast_the_long_prompt(tmp_path, capsys):
    run(capsys, *SMALL, "--chunk", "25", "--json", str(tmp_path / "t.json"))
    trace = Trace.from_json((tmp_path / "t.json").read_text())
    long, times = trace.requests["long"], trace.token_times()
    streams = [name for name in times if name != "long"]
    assert len(streams) == 4
    for name in streams:
        assert sum(t <= long.arrival_time for t in times[name]) == 8
        assert times[name][-1] > times["long"][0]


def test_the_gaps_are_those_after_the_long_prompt_came_not_of_the_streams_own_start(tmp_path, capsys):
    file = tmp_path / "t.json"  # 20 streams of 900 prompt tokens, two in a step: the first ones see the others' prefill
    options = ["--running", "20", "--context", "900", "--prompt", "500", "--chunk", "whole", "--budget", "2000"]
    _, out, _ = run(capsys, "simulate", *options, "--json", str(file))
    trace = Trace.from_json(file.read_text())
    arrival = trace.requests["long"].arrival_time
    lengths = [(step.end - step.start) * 1e3 for step in trace.steps if step.end > arrival]
    assert ms(rows(out)["whole"]["longest gap"]) == pytest.approx(max(lengths), abs=0.06)
    gaps_before = [(step.end - step.start) * 1e3 for step in trace.steps if step.end <= arrival and step.decode_tokens]
    assert max(gaps_before) > 2 * max(lengths)


def test_every_trace_is_written_in_a_file_that_can_be_read_back(tmp_path, capsys):
    _, out, _ = run(capsys, *SMALL, "--json", str(tmp_path / "run.json"))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["run-chunks-of-100.json", "run-whole.json"] and all(name in out for name in files)
    traces = [Trace.from_json((tmp_path / name).read_text()) for name in files]
    assert [trace.config["max_prefill_chunk_size"] for trace in traces] == [100, None]
    assert [len(trace.requests) for trace in traces] == [5, 5]


def test_the_same_options_print_the_same(capsys):
    assert run(capsys, "simulate", "--rate", "4", "--requests", "30", "--seed", "3") == run(
        capsys, "simulate", "--rate", "4", "--requests", "30", "--seed", "3"
    )
    assert run(capsys, "simulate", "--rate", "4", "--requests", "30") != run(
        capsys, "simulate", "--rate", "4", "--requests", "30", "--seed", "3"
    )


def test_a_stream_alone_or_nobody_beside_the_long_prompt(capsys):
    code, out, _ = run(capsys, "simulate", "--running", "0", "--prompt", "500", "--chunk", "100")
    assert code == 0 and rows(out)["chunks of 100"]["longest gap"] == "-"
    assert run(capsys, "simulate", "--running", "1", "--prompt", "500")[0] == 0


@pytest.mark.parametrize("running", [0, 1, 16, 128, 131])
def test_the_long_prompt_has_a_row_of_its_own(capsys, running):
    _, out, _ = run(capsys, "simulate", "--running", str(running), "--prompt", "300", "--chunk", "64", "--context", "5")
    assert re.search(r"^long +\|", out, re.MULTILINE), out
    assert len(re.findall(r"^chat", out, re.MULTILINE)) <= 9


def test_options_reach_the_engine(tmp_path, capsys):
    file = tmp_path / "t.json"
    run(capsys, "simulate", "--running", "6", "--prompt", "900", "--chunk", "50", "--budget", "64", "--policy", "fair_share",
        "--decode-share", "0.5", "--blocks", "300", "--json", str(file), "--model", "qwen3-0.6b", "--chip", "rtx4090")  # fmt: skip
    config = Trace.from_json(file.read_text()).config
    expected = {"max_prefill_chunk_size": 50, "max_num_batched_tokens": 64, "policy": "fair_share", "max_decode_share": 0.5,
                "num_blocks": 300, "max_num_seqs": 7}  # fmt: skip
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize(("name", "text"), [("azure.csv", AZURE), ("mooncake.jsonl", MOONCAKE)])
def test_a_public_trace_is_replayed(tmp_path, capsys, name, text):
    path = tmp_path / name
    path.write_text(text)
    code, out, _ = run(capsys, "simulate", "--trace", str(path), "--json", str(tmp_path / "t.json"), "--chunk", "256")
    assert code == 0 and f"3 requests in {1 if 'azure' in name else 4} s ({name})" in out
    assert set(rows(out)["chunks of 256"]) == {
        "median TTFT", "P99 TTFT", "longest gap", "P99 ITL", "median ITL", "goodput, req/s", "tokens/s", "steps",
    }  # fmt: skip
    trace = Trace.from_json((tmp_path / "t.json").read_text())
    assert [r.prefix_hit_tokens for r in trace.requests.values()] == ([0, 0, 0] if "azure" in name else [0, 1024, 1024])
    _, out, _ = run(capsys, "simulate", "--trace", str(path), "--rate", "0.01", "--requests", "2", "--chunk", "256")
    assert "2 requests in 100 s" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "llama3-80b"], "error: model='llama3-80b' is unknown (did you mean 'llama3-8b'?)"),
        (["--chip", "b300"], "error: chip='b300' is unknown"),
        (["--model", "yi-34b", "--chip", "rtx4090"], "error: model='yi-34b' doesn't fit on chip='rtx4090'"),
        (["--policy", "fairest"], "error: policy='fairest' is unknown"),
        (["--decode-share", "2"], "error: max_decode_share=2.0 is not allowed"),
        (["--decode-share", "nan"], "error: max_decode_share=nan is not allowed"),
        (["--running", "-1"], "error: --running=-1 is too small"),
        (["--budget", "100"], "error: --budget 100 is less than the 129 sequences"),
        (["--blocks", "10"], "error: request 'long': prompt has 8192 tokens, max_model_len is 160"),
        (["--blocks", "99999999"], "error: num_blocks=99999999 is more than fits beside the weights"),
        (["--prompt", "200000"], "error: request 'long': prompt has 200000 tokens, max_model_len is 131072"),
        (["--budget", "4000"], "error: request 'long': prompt has 8192 tokens, max_num_batched_tokens is 4000"),
        (["--rate", "0"], "error: rate=0.0 is not allowed"),
        (["--rate", "nan"], "error: rate=nan is not allowed"),
        (["--rate", "3", "--seed", "-1"], "error: seed=-1 is too small"),
        (["--rate", "3", "--ttft", "0"], "error: ttft=0.0 is not allowed"),
        (["--trace", "nowhere.csv"], "error: [Errno 2] No such file or directory: 'nowhere.csv'"),
        (["--trace", "trace.txt"], "error: --trace trace.txt: the name must end in .csv (Azure) or .jsonl (Mooncake)"),
        (["--json", "no/such/folder/t.json"], "error: [Errno 2] No such file or directory: 'no/such/folder/t"),
    ],
)
def test_a_wrong_option_gets_one_line_and_code_2(capsys, options, words):
    code, _, err = run(capsys, "simulate", *options)
    assert code == 2 and err.startswith(words) and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chunk", "0"], "argument --chunk: '0' is neither a number of tokens from 1 on nor the word whole"),
        (["--chunk", "half"], "argument --chunk: 'half' is neither"),
        (["--chunk"], "argument --chunk: expected at least one argument"),
        (["--prompt", "0"], "argument --prompt: value=0 is too small"),
        (["--requests", "-5"], "argument --requests: value=-5 is too small"),
        (["--rate", "fast"], "argument --rate: invalid float value: 'fast'"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
    ],
)
def test_what_is_no_value_is_refused_by_the_parser(capsys, options, words):
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *options])
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_a_bad_trace_file_is_named(tmp_path, capsys):
    path = tmp_path / "bad.csv"
    path.write_text(AZURE.replace("396", "-396"))
    code, _, err = run(capsys, "simulate", "--trace", str(path))
    assert code == 2 and "bad.csv, line 3: ContextTokens='-396' is not right" in err and err.count("\n") == 1
