"""The demo command, on the tiny model: the same code that shows the stall on SmolLM2."""

import json
import re
import xml.etree.ElementTree as ET

from course_lib import demo
from course_lib.__main__ import main


def test_the_demo_compares_both_settings_with_transformers_and_writes_what_it_measured(tmp_path, capsys):
    svg, measured = tmp_path / "stall.svg", tmp_path / "stall.json"
    code = main(["demo", "--model", "tiny", "--chunk", "100", "--repeat", "2", "--svg", str(svg), "--json", str(measured)])
    text = capsys.readouterr().out
    assert code == 0
    assert "Token ids of all runs are equal; they are equal to those of transformers' generate()." in text
    for words in ("prefill in one piece", "prefill in chunks of 100", "longest gap in a stream, s", "medians of 2 runs", "Ana"):
        assert words in text
    assert ET.parse(svg).getroot().tag.endswith("svg")
    runs = json.loads(measured.read_text())["runs"]
    assert {name: len(values) for name, values in runs.items()} == {"prefill in one piece": 2, "prefill in chunks of 100": 2}


def test_a_wrong_answer_fails_the_demo(monkeypatch, capsys):
    monkeypatch.setattr(demo, "transformers_tokens", lambda runner, workload: {})
    assert main(["demo", "--model", "tiny"]) == 1
    assert "DIFFERENT from" in capsys.readouterr().out


def test_the_document_arrives_when_every_stream_has_its_head_start(tiny):
    from course_lib import ModelRunner

    chats = {"a": [1, 2, 3], "b": list(range(40))}
    workload = demo.Workload(chats, list(range(100, 200)), stream_tokens=12, document_tokens=3, head_start=5)
    seen = []
    run = demo.run(ModelRunner(tiny), workload, 30, lambda engine, outputs: seen.append(len(outputs)))
    # b's 40 prompt tokens take two chunks of 30, so its tokens come in steps 1 to 5, and the document before step 6.
    assert run.trace.requests[demo.DOCUMENT].arrival_step == 6 and len(seen) == len(run.trace.steps) + 1
    chunks = [c.num_tokens for step in run.trace.steps for c in step.chunks if c.request == demo.DOCUMENT and c.kind == "prefill"]
    assert chunks == [30, 30, 30, 10]
    assert {name: len(ids) for name, ids in run.token_ids.items()} == workload.num_tokens


def test_a_live_panel_redraws_its_lines_on_a_terminal(tiny):
    import io

    from course_lib import ModelRunner

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    workload = demo.Workload({"a": [65, 66], "b": [67]}, list(range(97, 122)) * 4, stream_tokens=6, document_tokens=2, head_start=2)
    demo.run(ModelRunner(tiny), workload, 40, demo.LivePanel(out, width=60))
    text = out.getvalue()
    assert max(len(line.replace("\x1b[2K", "")) for line in re.sub("\x1b\\[[0-9]+A", "", text).splitlines()) <= 60
    assert "[WAITING: 0 of 100 prompt tokens]" in text
    assert "\x1b[3A" in text, "three requests: it goes up three lines"
    assert "[PREFILLING: 40 of 100 prompt tokens]" in text
