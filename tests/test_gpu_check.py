"""The command gpu-check. Where there is no GPU, its dry run: all of it but the times."""

import argparse
import json
import sys

import pytest

from course_lib import gpu_check
from course_lib.__main__ import main

pytest.importorskip("triton", reason="needs the package triton, which is not installed here")


@pytest.mark.long
def test_a_dry_run_goes_through_everything(tmp_path, capsys):
    out = tmp_path / "new folder" / "check.json"
    assert main(["gpu-check", "--dry-run", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "the times mean nothing" in text and "All results agree." in text
    report = json.loads(out.read_text())
    assert "passed" in report["tests"]["summary"] or "skipped" in report["tests"]["summary"]
    assert report["machine"]["triton"] and report["machine"]["torch"] and report["machine"]["seed"] == 0
    rows = report["rows"]
    assert {row["kind"] for row in rows} == {"ceiling", "attention", "attention, what if", "store_kv", "engine", "parity"}
    assert not [row for row in rows if "error" in row]
    measured = [(row["kind"], row["shape"]) for row in rows if row["who"] == "ours" and row.get("seconds", 0) > 0]
    assert len(measured) == 9  # 5 shapes of attention, 2 of store_kv, 2 of the engine
    ways = [row["who"] for row in rows if row["kind"] == "engine" and row["shape"] == "decode 2"]
    assert ways == ["ours", "ours, without graphs", "ours, torch_paged", "torch.compile"]
    (parity,) = (row for row in rows if row["kind"] == "parity")
    assert parity["tokens"] == 6 and parity["gap"] <= parity["bound"] and 0 < parity["bound"] < 3
    for row in rows:
        assert "absent" in row or row["who"] in text
        if row["who"].startswith(("SDPA", "Flex", "PyTorch")):
            assert row["difference"] < gpu_check.MAX_DIFFERENCE


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu-check"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().out


def test_without_triton_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert main(["gpu-check", "--dry-run"]) == 2
    assert "the package triton isn't installed" in capsys.readouterr().out


# In place of gpu_jobs.py: three jobs, of which the second kills its process in one of two ways.
JOBS = """
import json, sys
for number in range(int(sys.argv[1]), 3):
    about = {"kind": "attention", "model": "m", "shape": f"shape {number}"}
    print(json.dumps({"job": number, **about, "who": "ours"}), flush=True)
    if number == 1:
        if sys.argv[2] == "an error":
            print(json.dumps({"row": {**about, "who": "ours", "error": "illegal address"}}), flush=True)
        sys.exit("what the library said last")
    print("a library prints something", flush=True)
    print(json.dumps({"row": {**about, "who": "ours", "seconds": 1e-3, "bytes": 10**6, "flops": 0}}), flush=True)
"""


@pytest.mark.parametrize("end", ["an error", "a sudden end"])
def test_a_job_that_kills_its_process_costs_a_row_and_the_rest_goes_on(end, monkeypatch):
    monkeypatch.setattr(gpu_check, "jobs_command", lambda first, dry_run: [sys.executable, "-c", JOBS, str(first), end])
    rows = [line["row"] for line in gpu_check.measurements(dry_run=True) if "row" in line]
    assert [row["shape"] for row in rows] == ["shape 0", "shape 1", "shape 2"]
    assert ("illegal address" if end == "an error" else "ended with 1: what the library said last") in rows[1]["error"]


def check_that(monkeypatch, tests, *rows):
    """The exit code of a check whose tests and measurements end like this."""
    monkeypatch.setattr(gpu_check, "what_is_missing", lambda dry_run: None)
    monkeypatch.setattr(gpu_check, "run_tests", lambda dry_run: {"exit code": tests[0], "summary": tests[1], "output": ""})
    about = {"kind": "attention", "model": "m", "shape": "decode 1 × 512"}
    lines = [
        {"machine": {"gpu": "a GPU"}},
        {"row": {"kind": "ceiling", "model": "", "shape": "", "who": "copy", "seconds": 1.0, "bytes": 4e12}},
    ]
    lines += [{"row": about | row} for row in rows]
    monkeypatch.setattr(gpu_check, "measurements", lambda dry_run: lines)
    return gpu_check.main(argparse.Namespace(dry_run=False, out=None))


PARITY = {"kind": "parity", "shape": "greedy", "tokens": 9, "best": 8, "gap": 0.4, "bound": 0.5}
MEASURED = {"who": "ours", "seconds": 1e-6, "bytes": 2e6, "flops": 0}


def test_a_good_check_shows_shares_of_the_ceiling_and_writes_its_numbers(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    absent = {"who": "FlashInfer, paged", "absent": "No module named 'flashinfer'"}
    assert check_that(monkeypatch, (0, "9 passed"), MEASURED, MEASURED | {"who": "SDPA", "difference": 0.001}, absent) == 0
    text = capsys.readouterr().out
    assert "2000 GB/s      50% of the ceiling" in text  # 2 MB in a microsecond, of 4 TB/s
    assert "not measured: FlashInfer, paged (No module named 'flashinfer')" in text
    report = json.loads((tmp_path / gpu_check.DEFAULT_OUT).read_text())
    assert [row["who"] for row in report["rows"]] == ["copy", "ours", "SDPA", "FlashInfer, paged"]


@pytest.mark.parametrize(
    ("tests", "row", "words"),
    [
        ((1, "1 failed, 8 passed"), {}, "1 failed"),
        ((0, "9 skipped"), {}, "No test ran"),
        ((0, "9 passed"), {"who": "SDPA", "difference": 0.1}, "differs from SDPA by 10.0%"),
        ((0, "9 passed"), {"who": "SDPA", "difference": float("nan")}, "differs from SDPA by nan%"),
        ((0, "9 passed"), PARITY | {"gap": 0.6}, "a token is 0.600 below the best, rounding explains 0.500"),
        ((0, "9 passed"), PARITY | {"gap": float("nan")}, "a token is nan below the best"),
    ],
)
def test_what_is_wrong_fails_the_check(tests, row, words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_that(monkeypatch, tests, MEASURED | row) == 1
    assert words in capsys.readouterr().out


def test_a_kernel_that_does_not_run_fails_the_check_and_a_peer_does_not(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    failed = {"who": "ours", "error": "OutOfResources: shared memory"}
    assert check_that(monkeypatch, (0, "9 passed"), failed) == 1
    assert "OutOfResources" in capsys.readouterr().out
    assert check_that(monkeypatch, (0, "9 passed"), failed | {"who": "FlashInfer"}, MEASURED) == 0
    assert check_that(monkeypatch, (0, "9 passed"), {"who": "ours", "left out": "needs 900 GB"}) == 0
    assert check_that(monkeypatch, (0, "9 passed"), failed | {"who": "torch.compile"}, MEASURED, MEASURED | PARITY) == 0
