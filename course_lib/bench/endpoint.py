"""`python -m course_lib bench --url http://…`: the demo's workload on any OpenAI-compatible server, seen from the client.

Four streams run, a long document arrives, and the same numbers and the same timeline are made of what a client
sees: when its requests were sent, and when each token came. Prompts are sent as token ids, so that every server
reads the same ones. A server that returns token ids (vLLM does) is also compared with this engine, token by token.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from .. import demo
from ..trace import ChunkRecord, RequestRecord, StepRecord, Trace
from . import machine

TIMEOUT = 600.0  # seconds without a byte
SAME_STEP = 0.002  # seconds: tokens of different requests that follow within it were sampled in one step, most likely


class EndpointError(Exception):
    """The server can't be reached, or doesn't answer as an OpenAI-compatible one does."""


@dataclass
class ClientStream:
    """One request as its client saw it: times on the client's clock, in seconds."""

    name: str
    prompt_tokens: int
    max_tokens: int
    sent: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens in it)
    token_ids: list[int] | None = None  # None: the server doesn't tell
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.events)


def kept(streams: dict[str, ClientStream]) -> dict[str, dict]:
    """The streams as they are kept in JSON, their times counted from the first request; `restored` reads them back."""
    begin = min(stream.sent for stream in streams.values())
    return {
        name: {
            "prompt_tokens": stream.prompt_tokens, "max_tokens": stream.max_tokens, "sent": stream.sent - begin,
            "events": [[when - begin, count] for when, count in stream.events],
        }
        for name, stream in streams.items()
    }  # fmt: skip


def restored(streams: dict[str, dict]) -> dict[str, ClientStream]:
    """What `kept` made, as streams again: without their texts and token ids."""
    return {
        name: ClientStream(name, each["prompt_tokens"], each["max_tokens"], each["sent"], [tuple(event) for event in each["events"]])
        for name, each in streams.items()
    }


class Endpoint:
    """An OpenAI-compatible server at `url`, like "http://127.0.0.1:8000".

    Raises ValueError for anything that is no http address, EndpointError when the server doesn't answer.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url!r} must be an address like http://127.0.0.1:8000")
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"
        self.extras = {"ignore_eos": True, "return_token_ids": True}  # vLLM's own; left out where they aren't known
        self.model = model or self._only_model()

    def _open(self, method: str, path: str, body: dict | None = None):
        connection = self._connection(self._host, self._port, timeout=TIMEOUT)
        try:
            data = json.dumps(body).encode() if body is not None else None
            connection.request(method, f"{self._base}/v1/{path}", data, {"Content-Type": "application/json"})
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EndpointError(f"{self.url} doesn't answer: {type(error).__name__}: {error}") from None

    def _only_model(self) -> str:
        connection, response = self._open("GET", "models")
        try:
            text = response.read()
            if response.status != 200:
                raise EndpointError(f"{self.url}/v1/models answers {response.status}: {_short(text)}")
            return json.loads(text)["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise EndpointError(f"{self.url}/v1/models lists no model: {_short(text)}") from None
        finally:
            connection.close()

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[tuple[str, list[int] | None]]:
        """Send a prompt of token ids, greedily; yields (text, token ids or None) for each piece, as it comes."""
        extras = self.extras
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **extras}
        connection, response = self._open("POST", "completions", body)
        if response.status in (400, 422) and extras:  # perhaps it doesn't know vLLM's fields
            connection.close()
            self.extras = {}
            yield from self.stream(prompt, max_tokens)
            return
        try:
            if response.status != 200:
                raise EndpointError(f"{self.url}/v1/completions answers {response.status}: {_short(response.read())}")
            for line in response:
                data = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield self._piece(data)
        except (OSError, http.client.HTTPException) as error:
            raise EndpointError(f"{self.url} broke off: {type(error).__name__}: {error}") from None
        finally:
            connection.close()

    def _piece(self, data: str) -> tuple[str, list[int] | None]:
        try:
            found = json.loads(data)
            if "error" in found:
                raise EndpointError(f"{self.url} answers: {_short(str(found['error']))}")
            choice = (found.get("choices") or [{}])[0]
            return choice.get("text") or "", choice.get("token_ids")
        except (ValueError, AttributeError, KeyError):
            raise EndpointError(f"{self.url} sent no JSON of a completion: {_short(data)}") from None


def _short(text: str | bytes) -> str:
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return " ".join(text.split())[:300]


def run_workload(endpoint: Endpoint, workload: demo.Workload, clock=time.perf_counter) -> dict[str, ClientStream]:
    """Send the chats at once, the document when each chat has its head start; returns all streams at their end.

    Raises the first EndpointError of any of them.
    """
    prompts = workload.chats | {demo.DOCUMENT: workload.document}
    streams = {name: ClientStream(name, len(prompt), workload.num_tokens[name]) for name, prompt in prompts.items()}
    started = threading.Semaphore(0)  # one for each chat that has its head start, or has ended
    errors: list[BaseException] = []

    def follow(stream: ClientStream) -> None:
        waits = stream.name != demo.DOCUMENT
        try:
            stream.sent = clock()
            ids: list[int] | None = []
            for text, token_ids in endpoint.stream(prompts[stream.name], stream.max_tokens):
                if token_ids is None and not text:
                    continue  # a last piece with nothing but the reason
                stream.events.append((clock(), 1 if token_ids is None else len(token_ids)))
                stream.text += text
                ids = None if token_ids is None or ids is None else ids + token_ids
                if waits and stream.num_tokens >= workload.head_start:
                    waits = False
                    started.release()
            stream.token_ids = ids
        except BaseException as error:  # raised again below, in the thread of the caller
            errors.append(error)
        if waits:
            started.release()

    threads = [threading.Thread(target=follow, args=(stream,), daemon=True) for stream in streams.values()]
    *chats, document = threads
    for thread in chats:
        thread.start()
    for _ in chats:
        started.acquire()
    if not errors:
        document.start()
        document.join()
    for thread in chats:
        thread.join()
    if errors:
        raise errors[0]
    return streams


def client_trace(streams: dict[str, ClientStream]) -> Trace:
    """What the clients saw as a trace: a step ends when tokens come, and a prompt counts to the step of its first token.

    When the server really computed a prompt can't be seen from outside. Tokens of different requests of which
    each comes within SAME_STEP seconds of the one before are one step.
    """
    trace = Trace({"policy": "seen from the client"})
    for stream in streams.values():
        trace.requests[stream.name] = RequestRecord(stream.name, stream.name, stream.prompt_tokens, stream.max_tokens, stream.sent, 0)
    events = sorted((when, stream.name, count) for stream in streams.values() for when, count in stream.events)
    seen = dict.fromkeys(streams, 0)
    start = min(stream.sent for stream in streams.values())
    groups: list[list[tuple[float, str]]] = []
    for when, name, count in events:
        for _ in range(count):  # several tokens in one message: several steps at one time
            if not groups or when - groups[-1][-1][0] > SAME_STEP or any(name == other for _, other in groups[-1]):
                groups.append([])
            groups[-1].append((when, name))
    for index, group in enumerate(groups):
        step = StepRecord(index, start, group[-1][0])
        for _, name in group:
            prompt, record = streams[name].prompt_tokens, trace.requests[name]
            if not seen[name]:
                step.chunks.append(ChunkRecord(name, 0, prompt, "prefill", True))
                step.admitted.append(name)
            else:
                step.chunks.append(ChunkRecord(name, prompt + seen[name] - 1, 1, "decode", True))
            ids = streams[name].token_ids
            step.tokens[name] = ids[seen[name]] if ids else 0
            seen[name] += 1
            if seen[name] == streams[name].num_tokens:
                record.finish_reason, record.finish_time, record.finish_step = "length", step.end, index
                step.finished[name] = "length"
        trace.steps.append(step)
        start = step.end
    for record in trace.requests.values():
        record.arrival_step = next((step.index for step in trace.steps if step.end >= record.arrival_time), 0)
    return trace


def measures(streams: dict[str, ClientStream], trace: Trace) -> dict[str, float]:
    """The numbers of the demo's table, from the client's side."""
    return demo.measures_of(trace, sum(stream.num_tokens for stream in streams.values()))


def main(args) -> int:
    """Drive the server, print its table beside this engine's, and compare tokens where the server tells them."""
    import sys

    from .. import ModelRunner
    from ..lab import compare, timeline_text

    runner = ModelRunner("smollm2")
    workload = demo.Workload.standard(runner.tokenizer)
    try:
        endpoint = Endpoint(args.url, args.model)
        print(f"{endpoint.url}, model {endpoint.model}")
        run_workload(endpoint, demo.Workload(workload.chats, workload.document[:64], 4, 4, 1))  # warm up
        served = [run_workload(endpoint, workload) for _ in range(args.rounds)]
    except (ValueError, EndpointError) as error:
        print(error, file=sys.stderr)
        return 2
    traces = [client_trace(streams) for streams in served]
    rows = [measures(streams, trace) for streams, trace in zip(served, traces, strict=True)]
    ours = demo.run(runner, workload, args.chunk)
    own = ours.measures()
    print(timeline_text(traces[0], width=demo.terminal_width(), color=sys.stdout.isatty()))
    print(f"\n{'':36}{'server':>12}{'this engine, in process':>28}")
    for name in own:
        print(f"{name:36}{median(row[name] for row in rows):12.2f}{own[name]:28.2f}")
    print(f"(server: medians of {args.rounds} runs; this engine: one run, {ours.title}, the server idle beside it)")
    differ = differing(served, ours.token_ids)
    print(_verdict(differ))
    results = {"url": endpoint.url, "model": endpoint.model, "server": rows, "this engine": own, "differing": differ}
    path = machine.save("url", results, args.out)
    print(f"raw numbers: {path}")
    if args.svg:
        picture = compare(traces[0], ours.trace, titles=(f"{endpoint.url}, seen from the client", f"this engine, {ours.title}"))
        Path(args.svg).write_text(picture, encoding="utf-8")
        print(f"timelines: {args.svg}")
    return 1 if differ else 0


def differing(served: list[dict[str, ClientStream]], ours: dict[str, list[int]]) -> list[str] | None:
    """The requests whose tokens aren't ours in some run; None when the server tells no token ids."""
    if any(stream.token_ids is None for streams in served for stream in streams.values()):
        return None
    return sorted({name for streams in served for name, stream in streams.items() if stream.token_ids != ours[name]})


def _verdict(differ: list[str] | None) -> str:
    if differ is None:
        return "The server returns no token ids: its tokens can't be compared with ours."
    names = ", ".join(differ)
    return f"Token ids: DIFFERENT in {names}." if differ else "Token ids: equal to ours in every request."
