"""What comes in: generators, readers of public traces, the driver that replays them, goodput and capacity."""

import gc
import json
import time

import pytest
from helpers import is_idle, make_engine, prompt

from course_lib import Engine, EngineConfig
from course_lib.capacity import Capacity, Goodput, Targets, capacity, goodput
from course_lib.runners import FakeRunner, SimulatedRunner
from course_lib.trace import RequestRecord, StepRecord, Trace
from course_lib.workloads import (
    Piece,
    Request,
    agents,
    at_rate,
    chat,
    long_documents,
    merge,
    mix,
    poisson_arrivals,
    rag,
    read_azure,
    read_mooncake,
    replay,
    simulate,
    stall,
)
from course_lib.workloads.replay import garbage_collection_paused

NAN = float("nan")
CONFIG = EngineConfig(num_blocks=2000, max_num_seqs=32, max_num_batched_tokens=1024, max_prefill_chunk_size=256)

# ---- requests -------------------------------------------------------------------------------------


def test_equal_content_has_equal_tokens_and_other_content_differs_from_the_start():
    def tokens(*pieces, vocab_size=32000):
        return Request("r", 0.0, pieces, 1).prompt_for(vocab_size)

    document, other = Piece(5, 100), Piece(6, 100)
    assert tokens(document, Piece(9, 20))[:100] == tokens(document, Piece(8, 30))[:100] == tokens(document)
    assert tokens(document)[:4] != tokens(other)[:4]
    assert tokens(Piece(2**62 - 1, 8)) != tokens(Piece(2**62 - 2, 8))
    assert tokens(Piece(5, 40)) == tokens(document)[:40]
    for vocab_size in (2, 26, 256, 151936):
        for length in (1, 3, 70, 700):
            made = tokens(Piece(123456789, length), vocab_size=vocab_size)
            assert len(made) == length and all(0 <= token < vocab_size for token in made)
    assert tokens(Piece(5, 3), Piece(5, 40_000))[3:] == tokens(Piece(5, 40_000)), "longer than the vocabulary"


def test_a_request_knows_how_long_its_prompt_is():
    assert Request("r", 0.0, (Piece(1, 10), Piece(2, 5)), 1).num_prompt_tokens == 15
    assert Request("r", 0.0, [1, 2, 3], 1).num_prompt_tokens == 3
    assert Request("r", 0.0, "a text", 1).num_prompt_tokens is None
    assert Request("r", 0.0, "a text", 1).prompt_for(100) == "a text"


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"arrival_time": -1.0}, ValueError, "arrival_time=-1.0"),
        ({"arrival_time": NAN}, ValueError, "arrival_time=nan"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0"),
        ({"max_tokens": 10**12}, ValueError, "max_tokens=1000000000000 is too large"),
        ({"prompt": []}, ValueError, "prompt of 'r' is empty"),
        ({"prompt": ""}, ValueError, "prompt of 'r' is empty"),
        ({"prompt": (Piece(1, 0),)}, ValueError, "num_tokens=0"),
        ({"prompt": (Piece(-1, 5),)}, ValueError, "content=-1"),
        ({"prompt": (Piece(1, 10**9),)}, ValueError, "num_tokens=1000000000 is too large"),
        ({"request_id": ""}, ValueError, "request_id=''"),
        ({"request_id": 7}, TypeError, "request_id must be a string"),
    ],
)
def test_a_wrong_request_is_named(fields, error, words):
    with pytest.raises(error, match=words):
        Request(**{"request_id": "r", "arrival_time": 0.0, "prompt": (Piece(1, 5),), "max_tokens": 3} | fields)


def test_workloads_merge_in_order_of_arrival():
    merged = merge(chat(5, 20, 1), rag(3, 20, 2))
    assert [r.arrival_time for r in merged] == sorted(r.arrival_time for r in merged) and len(merged) == 40
    with pytest.raises(ValueError, match="request_id='chat0' comes twice"):
        merge(chat(5, 2, 1), chat(5, 2, 2))


def test_a_workload_can_be_squeezed_to_another_rate():
    requests = chat(2, 101, 0)
    faster = at_rate(requests, 10)
    assert faster[0].arrival_time == 0 and faster[-1].arrival_time == pytest.approx(100 / 10)
    first, last = requests[0].arrival_time, requests[-1].arrival_time
    expected = [(r.arrival_time - first) / (last - first) for r in requests]
    assert [r.arrival_time / faster[-1].arrival_time for r in faster] == pytest.approx(expected), "the pattern stays"
    assert [(r.request_id, r.prompt, r.max_tokens) for r in faster] == [
        (r.request_id, r.prompt, r.max_tokens) for r in requests
    ]
    for rate in (0, -1, NAN):
        with pytest.raises(ValueError, match="rate="):
            at_rate(requests, rate)
    for alone in ([], requests[:1]):
        with pytest.raises(ValueError, match="no time between them"):
            at_rate(alone, 1)


# ---- generators -----------------------------------------------------------------------------------

GENERATORS = {
    "chat": lambda seed: chat(5, 40, seed),
    "rag": lambda seed: rag(5, 40, seed),
    "agents": lambda seed: agents(2, 8, seed),
    "long_documents": lambda seed: long_documents(5, 40, seed),
    "mix": lambda seed: mix(5, 40, seed),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_gives_the_same_for_the_same_seed_and_else_something_else(name):
    make = GENERATORS[name]
    requests = make(3)
    assert requests == make(3) != make(4)
    assert len(requests) == len({r.request_id for r in requests}) == 40
    assert [r.arrival_time for r in requests] == sorted(r.arrival_time for r in requests)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generated_request_is_served_to_its_end(name):
    trace = simulate(CONFIG, GENERATORS[name](0), model="qwen3-0.6b", chip="rtx4090")
    assert len(trace.requests) == 40 and {r.finish_reason for r in trace.requests.values()} == {"length"}
    assert sum(len(step.tokens) for step in trace.steps) == sum(r.max_tokens for r in GENERATORS[name](0))


def test_poisson_arrivals_have_their_rate_and_the_spread_of_a_poisson_process():
    times = poisson_arrivals(4.0, 20_000, seed=1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.03) and deviation == pytest.approx(mean, rel=0.03), (
        "exponential: both are 1 / rate"
    )
    assert poisson_arrivals(4.0, 5, seed=1, start=10.0)[0] == 10.0 + times[0]


def test_the_stall_is_streams_at_time_0_and_one_long_prompt_later():
    *streams, long = stall(3, 500, arrival=2.0, context=7, output_tokens=11, long_output_tokens=5)
    assert [(r.arrival_time, r.num_prompt_tokens, r.max_tokens) for r in streams] == [(0.0, 7, 11)] * 3
    assert (long.request_id, long.arrival_time, long.num_prompt_tokens, long.max_tokens) == ("long", 2.0, 500, 5)
    assert len({r.prompt for r in streams}) == 3


def hit_tokens(requests):
    trace = simulate(CONFIG, requests, model="qwen3-0.6b", chip="rtx4090")
    return {name: record.prefix_hit_tokens for name, record in trace.requests.items()}


def test_retrieval_shares_its_documents_and_nothing_else():
    requests = rag(0.5, 30, seed=0, documents=3, document_tokens=160, question_tokens=(20, 20))
    hits, seen = hit_tokens(requests), set()
    for request in requests:
        document = request.prompt[0].content
        assert hits[request.request_id] == (160 if document in seen else 0)
        seen.add(document)
    assert len(seen) == 3
    counts = [sum(r.prompt[0].content == content for r in rag(1, 300, seed=0, documents=5)) for content in range(1, 6)]
    assert counts[0] > counts[1] > counts[2] > max(counts[3:]), "the first document is asked for most"


def test_agents_share_their_instructions_and_each_its_own_history():
    requests = agents(0.2, 2, seed=0, turns=3, system_tokens=64, turn_tokens=(32, 32), pause=1.0)
    assert [len(r.prompt) for r in requests if r.request_id.startswith("agent0")] == [2, 3, 4]
    hits = hit_tokens(requests)
    assert hits["agent0.0"] == 0 and hits["agent1.0"] == 64
    assert (hits["agent0.1"], hits["agent0.2"]) == (96, 128)


def test_chats_share_nothing_also_when_workloads_are_merged():
    assert set(
        hit_tokens(merge(chat(1, 20, 0), chat(1, 20, 0 + 1, name="other"), long_documents(1, 20, 2, name="third"))).values()
    ) == {0}


def test_every_tenth_of_long_documents_is_one():
    requests = long_documents(5, 40, 0, every=10, document_tokens=(4000, 5000), prompt_tokens=(10, 20))
    longs = [i for i, r in enumerate(requests) if r.num_prompt_tokens >= 4000]
    assert longs == [9, 19, 29, 39] and [requests[i].request_id for i in longs] == ["doc0", "doc1", "doc2", "doc3"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: poisson_arrivals(0, 5), "rate=0"),
        (lambda: poisson_arrivals(NAN, 5), "rate=nan"),
        (lambda: poisson_arrivals(1, 0), "count=0"),
        (lambda: chat(1, 5, -1), "seed=-1"),
        (lambda: chat(1, 5, prompt_tokens=(9, 8)), r"range \(9, 8\) is empty"),
        (lambda: chat(1, 5, prompt_tokens=(0, 0)), "num_tokens=0"),
        (lambda: rag(1, 5, documents=0), "documents=0"),
        (lambda: agents(1, 5, turns=0), "turns=0"),
        (lambda: agents(1, 5, pause=-1), "pause=-1"),
        (lambda: long_documents(1, 5, every=0), "every=0"),
        (lambda: mix(1, 3), "count=3"),
        (lambda: stall(-1, arrival=0.0), "running=-1"),
        (lambda: stall(1, 0, arrival=0.0), "num_tokens=0"),
    ],
)
def test_a_generator_names_what_it_does_not_take(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---- public traces --------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:15:51.2224670,879,55"""

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3500, "input_length": 1536, "output_length": 3, "hash_ids": [0, 1, 3]},
    {"timestamp": 3500, "input_length": 512, "output_length": 4, "hash_ids": [9]},
]


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_the_azure_format_is_read(tmp_path):
    requests = read_azure(write(tmp_path / "azure.csv", AZURE))
    assert [(r.request_id, r.num_prompt_tokens, r.max_tokens) for r in requests] == [
        ("azure0", 374, 44), ("azure1", 396, 109), ("azure2", 879, 55),
    ]  # fmt: skip
    assert [r.arrival_time for r in requests] == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-6)
    assert len({r.prompt[0].content for r in requests}) == 3
    assert read_azure(tmp_path / "azure.csv", limit=2) == requests[:2]
    assert read_azure(str(tmp_path / "azure.csv"), limit=99) == requests


def test_azures_later_traces_have_a_time_zone_and_other_columns_may_be_there(tmp_path):
    text = "id,GeneratedTokens,TIMESTAMP,ContextTokens\n1,5,2024-05-10 00:00:00.009930+00:00,10\n\n2,6,2024-05-10 00:00:02.009930+00:00,20\n"
    requests = read_azure(write(tmp_path / "a.csv", "\ufeff" + text))
    assert [(r.arrival_time, r.num_prompt_tokens, r.max_tokens) for r in requests] == [(0.0, 10, 5), (2.0, 20, 6)]


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:15:46.68,374,44\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: column TIMESTAMP is missing: the columns are none"),
        ("\n\n", "line 1: column TIMESTAMP is missing"),
        ("TIMESTAMP,ContextTokens\n", "line 1: column GeneratedTokens is missing: the columns are TIMESTAMP, ContextTokens"),
        (GOOD, "line 1: column TIMESTAMP is missing"),
        (HEADER, "there is no request in it"),
        (HEADER + GOOD + "2023-11-16 18:15:47,5\n", "line 3: field GeneratedTokens is missing"),
        (HEADER + "2023-11-16 18:15:47,5,6,7\n", r"line 2: \['7'\] is more than the columns take"),
        (HEADER + "yesterday,5,6\n", "line 2: TIMESTAMP='yesterday' is not right"),
        (HEADER + "2023-13-16 18:15:47,5,6\n", "line 2: TIMESTAMP='2023-13-16 18:15:47'"),
        (HEADER + ",5,6\n", "line 2: TIMESTAMP=''"),
        (HEADER + "2023-11-16 18:15:47,five,6\n", "line 2: ContextTokens='five' is not right"),
        (HEADER + "2023-11-16 18:15:47,5.5,6\n", "line 2: ContextTokens='5.5'"),
        (HEADER + "2023-11-16 18:15:47,nan,6\n", "line 2: ContextTokens='nan'"),
        (HEADER + "2023-11-16 18:15:47,,6\n", "line 2: ContextTokens=''"),
        (HEADER + "2023-11-16 18:15:47,-5,6\n", "line 2: ContextTokens='-5'.*at least 1"),
        (HEADER + "2023-11-16 18:15:47,5,0\n", "line 2: GeneratedTokens='0'.*at least 1"),
        (HEADER + "2023-11-16 18:15:47,99999999999,6\n", "line 2: ContextTokens='99999999999'.*at most 10000000"),
        (HEADER + f"2023-11-16 18:15:47,{'9' * 9000},6\n", "line 2: ContextTokens='999"),
        (
            HEADER + GOOD + "2023-11-16 18:15:45,5,6\n",
            "line 3: TIMESTAMP='2023-11-16 18:15:45' is before the one of the line above",
        ),
        (
            HEADER + GOOD + "2023-11-16 18:15:47+00:00,5,6\n",
            "line 3: TIMESTAMP='2023-11-16 18:15:47\\+00:00' can't be compared",
        ),
        (HEADER + GOOD + '2023-11-16 18:15:47,"5,6\n', "after line 2: not a CSV file"),
        (HEADER.encode() + b"2023-11-16 18:15:47,\xff,6\n", "after line 0: not a text file in UTF-8"),
    ],
)
def test_a_bad_azure_file_is_named_with_line_field_and_value(tmp_path, text, words):
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ValueError, match=words) as error:
        read_azure(path)
    assert "bad.csv" in str(error.value) and len(str(error.value)) < 400


def test_the_mooncake_format_is_read(tmp_path):
    requests = read_mooncake(write(tmp_path / "m.jsonl", lines(MOONCAKE)))
    assert [(r.request_id, r.arrival_time, r.num_prompt_tokens, r.max_tokens) for r in requests] == [
        ("mooncake0", 0.0, 1100, 5), ("mooncake1", 2.5, 1536, 3), ("mooncake2", 2.5, 512, 4),
    ]  # fmt: skip
    assert requests[0].prompt == (Piece(0, 512), Piece(1, 512), Piece(2, 76))
    assert read_mooncake(tmp_path / "m.jsonl", limit=1) == requests[:1]


def test_mooncakes_hash_ids_drive_the_prefix_cache(tmp_path):
    requests = read_mooncake(write(tmp_path / "m.jsonl", lines(MOONCAKE) + "\n"))
    assert hit_tokens(requests) == {"mooncake0": 0, "mooncake1": 1024, "mooncake2": 0}


def changed(**fields):
    return lines([MOONCAKE[0], {k: v for k, v in (MOONCAKE[1] | fields).items() if v != "gone"}])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no request in it"),
        ("\n \n", "there is no request in it"),
        (lines(MOONCAKE)[:-20], "line 3: not a JSON object, perhaps cut off"),
        ("[1, 2]\n", "line 1: .* is not a JSON object"),
        ("null\n", "line 1: None is not a JSON object"),
        ("[" * 100_000 + "\n", "line 1: not a JSON object"),
        (changed(timestamp="gone"), "line 2: field timestamp is missing: the fields are input_length"),
        (changed(hash_ids="gone"), "line 2: field hash_ids is missing"),
        (changed(timestamp=-1), "line 2: timestamp=-1 is not right"),
        (changed(timestamp=NAN), "line 2: timestamp=nan is not right"),
        (changed(timestamp="3500"), "line 2: timestamp='3500' is not right"),
        (changed(timestamp=None), "line 2: timestamp=None is not right"),
        (changed(timestamp=10**400), "line 2: timestamp=1000"),
        (changed(timestamp=999), "line 2: timestamp=999 is before the one of the line above"),
        (changed(input_length=0), "line 2: input_length=0 is not right"),
        (changed(input_length=1535.0), "line 2: input_length=1535.0 is not right"),
        (changed(input_length=True), "line 2: input_length=True is not right"),
        (changed(input_length=10**9), "line 2: input_length=1000000000 is not right.*at most 10000000"),
        (changed(output_length=-3), "line 2: output_length=-3 is not right"),
        (changed(output_length=NAN), "line 2: output_length=nan is not right"),
        (changed(hash_ids=[0, 1]), "line 2: hash_ids has 2 numbers, input_length=1536 needs 3"),
        (changed(hash_ids=[0, 1, 2, 3]), "line 2: hash_ids has 4 numbers"),
        (changed(hash_ids=[0, -1, 2]), r"line 2: hash_ids\[1\]=-1 must be"),
        (changed(hash_ids=[0, 1, "2"]), r"line 2: hash_ids\[2\]='2' must be"),
        (changed(hash_ids=[0, 1, 2**62]), r"line 2: hash_ids\[2\]=4611686018427387904 must be"),
        (changed(hash_ids={"a": 1}), "line 2: hash_ids=.* is not a list"),
        (changed(hash_ids=None), "line 2: hash_ids=None is not a list"),
        (b'{"timestamp": 0, "x": "\xff"}\n', "not a text file in UTF-8"),
    ],
)
def test_a_bad_mooncake_file_is_named_with_line_field_and_value(tmp_path, text, words):
    path = write(tmp_path / "bad.jsonl", text)
    with pytest.raises(ValueError, match=words) as error:
        read_mooncake(path)
    assert "bad.jsonl" in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("read", [read_azure, read_mooncake])
def test_a_reader_names_a_wrong_limit_and_a_file_that_is_not_there(tmp_path, read):
    path = write(tmp_path / "x", AZURE if read is read_azure else lines(MOONCAKE))
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit={limit} is too small"):
            read(path, limit)
    with pytest.raises(TypeError, match="limit must be an integer"):
        read(path, 1.5)
    with pytest.raises(FileNotFoundError, match="not_there"):
        read(tmp_path / "not_there")


# ---- replay ---------------------------------------------------------------------------------------


def request(name, arrival, num_tokens=10, max_tokens=3, **fields):
    return Request(name, arrival, prompt(num_tokens, len(name)), max_tokens, **fields)


def test_requests_come_in_when_their_time_has_come():
    engine = make_engine(FakeRunner())  # a step takes 1 s
    trace = replay(engine, [request("b", 1.5), request("a", 0.0), request("c", 2.0)])
    assert [(r.name, r.arrival_time, r.arrival_step) for r in trace.requests.values()] == [
        ("a", 0.0, 0),
        ("b", 1.5, 2),
        ("c", 2.0, 2),
    ]
    assert is_idle(engine) and {r.finish_reason for r in trace.requests.values()} == {"length"}


def test_requests_of_one_moment_come_in_in_their_order():
    trace = replay(make_engine(), [request(name, 1.0) for name in "badc"])
    assert list(trace.requests) == list("badc")


def test_ttft_counts_from_the_arrival_and_not_from_the_end_of_the_step_that_was_running():
    engine = make_engine(FakeRunner())
    replay(engine, [request("a", 0.0, max_tokens=5), request("b", 0.25)])
    assert engine.metrics().requests["b"].ttft == 2.0 - 0.25


@pytest.mark.parametrize("runner", [FakeRunner(), SimulatedRunner()])
def test_an_idle_virtual_clock_jumps_to_the_next_arrival(runner):
    engine = Engine(runner, EngineConfig(num_blocks=100))
    runner.advance_to(100.0)
    trace = replay(engine, [request("a", 0.0), request("b", 5000.0)])
    assert trace.requests["a"].arrival_time == 100.0 and trace.requests["b"].arrival_time == 5100.0
    starts = [step.start for step in trace.steps]
    assert len(starts) == 6 and starts[0] == 100.0 and starts[3] == 5100.0


class RealClock(FakeRunner):
    """A FakeRunner whose clock is the machine's."""

    advance_to = None

    def __getattribute__(self, name):
        if name == "advance_to":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def now(self):
        return time.perf_counter()


def test_an_idle_real_clock_is_waited_for():
    engine = make_engine(RealClock())
    begin = time.perf_counter()
    trace = replay(engine, [request("a", 0.0), request("b", 0.3)])
    assert 0.3 <= time.perf_counter() - begin < 3.0
    b = trace.requests["b"]
    assert trace.steps[b.arrival_step].start >= b.arrival_time == pytest.approx(trace.requests["a"].arrival_time + 0.3)


def test_a_clock_that_stands_still_is_no_endless_loop():
    class Still(RealClock):
        def now(self):
            return 7.0

    with pytest.raises(RuntimeError, match="Still's clock stands still.*advance_to"):
        replay(make_engine(Still()), [request("a", 0.01)])


def test_a_step_limit_stops_the_replay_and_leaves_the_rest_in_the_engine():
    engine = make_engine()
    trace = replay(engine, [request("a", 0.0, max_tokens=10)], max_steps=4)
    assert len(trace.steps) == 4 and engine.has_unfinished_requests() and trace.requests["a"].finish_reason is None
    for limit in (0, -1):
        with pytest.raises(ValueError, match="max_steps="):
            replay(engine, [], max_steps=limit)


def test_a_request_that_the_engine_refuses_is_named():
    with pytest.raises(ValueError, match="request 'big': prompt has 5000 tokens, max_model_len is 4096"):
        replay(make_engine(), [request("a", 0.0), request("big", 1.0, 5000)])


def test_outputs_of_every_step_are_shown_to_who_asks():
    seen = []
    replay(make_engine(), [request("a", 0.0), request("b", 0.0, max_tokens=1)], on_outputs=seen.append)
    assert [[out.request_id for out in outputs] for outputs in seen] == [["a", "b"], ["a"], ["a"]]


def test_texts_priorities_and_salts_reach_the_engine(tiny):
    from course_lib import ModelRunner

    engine = Engine(ModelRunner(tiny), EngineConfig(num_blocks=64))
    texts = [
        Request("a", 0.0, "the same text, twice the same text", 2),
        Request("b", 0.2, "the same text, twice the same text", 2, cache_salt="x"),
    ]
    trace = replay(engine, [*texts, Request("c", 0.4, "the same text, twice the same text", 2, priority=3)])
    assert {name: (r.prefix_hit_tokens, r.priority) for name, r in trace.requests.items()} == {
        "a": (0, 0),
        "b": (0, 0),
        "c": (32, 3),
    }


def test_an_empty_workload_is_an_empty_trace():
    assert replay(make_engine(), []).steps == []


def test_an_id_that_is_used_again_keeps_its_own_arrival():
    engine = make_engine()
    replay(engine, [request("a", 0.5)])
    trace = replay(engine, [request("a", 0.5)])
    assert [(name, r.arrival_time) for name, r in trace.requests.items()] == [("a", 0.5), ("a#2", 0.5 + 3.0 + 0.5)]


def test_without_a_trace_a_replay_still_serves():
    engine = make_engine(parts={"record_trace": False})
    assert replay(engine, [request("a", 0.0)]).steps == [] and is_idle(engine)


def test_pauses_of_the_garbage_collector_may_overlap():
    first, second = garbage_collection_paused(), garbage_collection_paused()
    with first:
        second.__enter__()
        assert not gc.isenabled()
    assert not gc.isenabled(), "the second one goes on"
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_simulate_is_pure_and_leaves_the_garbage_collector_as_it_was():
    workload = chat(5, 30, 1)
    assert simulate(CONFIG, workload).to_json() == simulate(CONFIG, workload).to_json()
    assert gc.isenabled()
    with pytest.raises(ValueError):
        simulate(CONFIG, [request("big", 0.0, 40_000)])
    assert gc.isenabled()
    gc.disable()
    try:
        simulate(CONFIG, workload)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_prefix_cache_under_pressure_leaves_no_reference_cycles_behind():
    engine = Engine(SimulatedRunner("qwen3-0.6b", "rtx4090"), EngineConfig(num_blocks=64, max_num_seqs=8))
    gc.collect()
    gc.disable()
    try:
        replay(engine, chat(50, 60, 0, prompt_tokens=(200, 400)))
        assert gc.collect() < 500, "60 prompts of some 19 blocks were cached and evicted"
    finally:
        gc.enable()


# ---- goodput and capacity -------------------------------------------------------------------------


def trace_of(**token_times):
    """A trace of requests a, b … that arrived at time 0, with tokens at these times; a step ends at each of them."""
    trace = Trace({})
    for name in token_times:
        trace.requests[name] = RequestRecord(name, name, 10, 9, 0.0, 0, finish_reason="length")
    times = sorted({time for times in token_times.values() for time in times})
    for index, end in enumerate(times):
        tokens = {name: 1 for name, times in token_times.items() if end in times}
        trace.steps.append(StepRecord(index, end - 0.5, end, tokens=tokens))
    return trace


def test_goodput_counts_the_requests_that_meet_both_targets():
    trace = trace_of(good=[1, 2, 3], late=[3, 4, 5], stalled=[1, 2, 8], short=[1])
    result = goodput(trace, Targets(ttft=2, itl=1.5))
    assert (result.requests_per_second, result.attainment) == (2 / 8, 0.5)
    assert (result.finished, result.requests) == (4, 4)
    assert not result.meets(Targets(2, 1.5)) and result.meets(Targets(3, 6)) and not result.meets(Targets(3, 5.5))


def test_percent_lets_some_gaps_be_long():
    times = [1.0 + i for i in range(100)] + [105.0]  # 99 gaps of 1 s, one of 5 s
    trace = trace_of(a=times)
    assert goodput(trace, Targets(2, 1.5, percent=90)).attainment == 1
    assert goodput(trace, Targets(2, 1.5, percent=100)).attainment == 0
    assert goodput(trace, Targets(2, 1.5, percent=100)).itl == 5


def test_what_was_cancelled_or_never_ended_is_no_goodput():
    trace = trace_of(a=[1, 2], b=[1, 2])
    trace.requests["b"].finish_reason = "cancelled"
    result = goodput(trace, Targets(9, 9))
    assert (result.attainment, result.finished) == (0.5, 1) and not result.meets(Targets(9, 9))
    assert goodput(Trace({}), Targets(1, 1)) == Goodput(0.0, 0.0, None, None, 0, 0)


@pytest.mark.parametrize(
    ("values", "words"),
    [((0, 1), "ttft=0"), ((1, -1), "itl=-1"), ((1, NAN), "itl=nan"), ((1, 1, 0), "percent=0"), ((1, 1, 101), "percent=101")],
)
def test_targets_are_checked(values, words):
    with pytest.raises(ValueError, match=words):
        Targets(*values)


def server_that_breaks_at(limit):
    """Meets a TTFT of 1 s up to `limit` requests a second."""

    def serve(requests):
        rate = (len(requests) - 1) / requests[-1].arrival_time
        return trace_of(a=[0.5 if rate <= limit else 5.0])

    return serve


@pytest.mark.parametrize("limit", [0.013, 0.9, 1.0, 7.3, 999.0])
def test_the_search_finds_the_highest_rate_from_any_start(limit):
    found = capacity(chat(1, 20, 0), server_that_breaks_at(limit), Targets(1, 1), start=1.0, tolerance=0.01)
    assert isinstance(found, Capacity) and limit * 0.99 <= found.rate <= limit
    assert found.rate == max(rate for rate, _, met in found.tried if met)
    assert len(found.tried) < 30


def test_the_search_ends_when_no_rate_meets_the_targets_or_every_rate_does():
    assert capacity(chat(1, 20, 0), server_that_breaks_at(0.0), Targets(1, 1)).rate == 0.0
    with pytest.raises(ValueError, match="the targets are met at every rate up to"):
        capacity(chat(1, 20, 0), server_that_breaks_at(1e12), Targets(1, 1))
    for field in ("start", "tolerance"):
        with pytest.raises(ValueError, match=f"{field}=0"):
            capacity(chat(1, 20, 0), server_that_breaks_at(1), Targets(1, 1), **{field: 0})


def test_chunks_beside_decodes_serve_more_requests_within_the_targets_than_whole_prompts():
    workload, targets = long_documents(1, 50, 0, every=5), Targets(ttft=2.0, itl=0.1)

    def serve(chunk):
        config = EngineConfig(
            num_blocks=20_000, max_num_seqs=64, max_num_batched_tokens=8192 if chunk is None else chunk,
            max_prefill_chunk_size=chunk, enable_prefix_caching=False,
        )  # fmt: skip
        return lambda requests: simulate(config, requests, model="mistral-7b", chip="a100")

    whole, chunked = (capacity(workload, serve(chunk), targets, start=2.0, tolerance=0.1) for chunk in (None, 512))
    assert chunked.rate > 1.5 * whole.rate > 0
    assert capacity(workload, serve(512), targets, start=2.0, tolerance=0.1) == chunked, "the same seed, the same answer"
