"""The client for OpenAI-compatible servers, against a small server of our own that streams what FakeRunner says."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from course_lib import demo
from course_lib.bench.endpoint import ClientStream, Endpoint, EndpointError, client_trace, differing, measures, run_workload
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
