"""The trace: it says what happened, it survives JSON, and Perfetto can draw it."""

import json
import math
import random
from collections import Counter, defaultdict

import pytest
from fuzz import FlakyRunner, random_config

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.config import POLICY_NAMES
from course_lib.runners import FakeRunner
from course_lib.trace import Trace

IDS = ["a", "b", "c", "d", "e", "a#2"]  # used again and again; the last looks like the trace's own names


class Shadow:
    """A random run, and what was seen of each step while it ran: the trace must tell the same."""

    def __init__(self, seed, policy="prefilling_first", num_requests=25, fail_rate=0.05):
        self.rng = rng = random.Random(seed)
        self.config = random_config(rng, policy)
        self.engine = Engine(FlakyRunner(rng, fail_rate), self.config, on_step=self.on_step)
        self.engine.block_manager.shuffle_free_blocks(seed)
        self.names = {}  # id -> name in the trace, of the newest request with that id
        self.steps = []  # per step that didn't fail
        self.ends = {}  # name -> finish reason
        self.failures = 0
        while num_requests or self.engine.has_unfinished_requests():
            free = [i for i in IDS if i not in self.engine.snapshot() and i not in self.undelivered()]
            if num_requests and free and rng.random() < 0.5:
                num_requests -= self.add(rng.choice(free))
            if rng.random() < 0.05:
                self.engine.cancel(rng.choice(IDS))
            if rng.random() < 0.05:
                held = [i for i, s in self.engine.snapshot().items() if s.status in ("PREFILLING", "RUNNING")]
                if held:
                    self.engine.preempt(rng.choice(held))
            self.step()
            assert len(self.steps) + self.failures < 20_000, f"no end in sight: {self.config}"
        self.trace = self.engine.trace

    def undelivered(self):
        return [i for i, name in self.names.items() if name not in self.ends]

    def add(self, request_id):
        length = min(self.rng.randint(1, 60), self.engine.max_model_len - 1)
        prompt = [self.rng.randrange(3) for _ in range(length)]  # 3 token ids: prefixes are often equal
        try:
            self.engine.add_request(prompt, SamplingParams(max_tokens=self.rng.randint(1, 12)), request_id=request_id)
        except ValueError:  # an unchunked prompt above the budget, say
            return 0
        self.names[request_id] = list(self.engine.trace.requests)[-1]
        return 1

    def on_step(self, scheduled):
        """Between scheduling and the forward pass: who holds which block, who waits and why."""
        owners = defaultdict(list)
        for request_id, state in self.engine.snapshot().items():
            for block in state.block_table:
                owners[block].append(self.names[request_id])
        self.steps.append(
            {
                "owners": {block: sorted(names) for block, names in owners.items()},
                "reasons": {self.names[i]: reason for i, reason in scheduled.reasons.items()},
                "chunks": [(self.names[c.sequence.request_id], *c[1:]) for c in scheduled.chunks],
                "admitted": [self.names[s.request_id] for s in scheduled.admitted],
                "preempted": [self.names[s.request_id] for s in scheduled.preempted],
                "tokens": {},
                "finished": {},
            }
        )
        if self.rng.random() < 0.05:
            self.engine.cancel(self.rng.choice(IDS))

    def step(self):
        before = len(self.steps)
        begin = self.engine.runner.now()
        try:
            outputs = self.engine.step()
        except RuntimeError as error:
            assert "injected" in str(error)
            self.failures += 1
            self.steps.pop()
            return
        for output in outputs:
            name = self.names[output.request_id]
            if len(self.steps) > before:
                if output.new_token_ids:
                    self.steps[-1]["tokens"][name] = output.new_token_ids[0]
                if output.finished:
                    self.steps[-1]["finished"][name] = output.finish_reason
            if output.finished:
                assert name not in self.ends
                self.ends[name] = output.finish_reason
        if len(self.steps) > before:
            self.steps[-1]["times"] = (begin, self.engine.runner.now())
            for request_id, state in self.engine.snapshot().items():
                assert state.reason == self.steps[-1]["reasons"].get(self.names[request_id])
        self.engine.check_invariants()


@pytest.fixture(scope="module")
def shadows():
    """Random runs over every policy, with failures, cancels, preemptions and ids used twice."""
    runs = [Shadow(seed, POLICY_NAMES[seed % len(POLICY_NAMES)]) for seed in range(40)]
    assert sum(run.failures for run in runs) > 20
    assert sum(len(step["preempted"]) for run in runs for step in run.steps) > 20
    assert sum(reason == "cancelled" for run in runs for reason in run.ends.values()) > 20
    return runs


def test_owners_are_those_that_held_the_blocks_during_the_forward_pass(shadows):
    for run in shadows:
        for index, seen in enumerate(run.steps):
            owners = run.trace.owners_at(index)
            assert {block: sorted(names) for block, names in owners.items()} == seen["owners"], (index, run.config)


def test_reasons_are_those_that_the_scheduler_gave(shadows):
    for run in shadows:
        for index, seen in enumerate(run.steps):
            assert run.trace.reasons_at(index) == seen["reasons"], (index, run.config)


def test_block_counts_are_those_during_the_forward_pass(shadows):
    for run in shadows:
        for index, (step, seen) in enumerate(zip(run.trace.steps, run.steps, strict=True)):
            assert step.blocks_used == len(seen["owners"])
            cached = run.trace.cached_at(index)
            assert len(cached) == step.blocks_cached and cached.isdisjoint(seen["owners"])
            assert step.blocks_used + step.blocks_free == run.config.num_blocks
            assert 0 <= step.blocks_cached <= step.blocks_free  # cached blocks count as free


def test_chunks_tokens_and_times_are_those_that_were_seen(shadows):
    for run in shadows:
        for step, seen in zip(run.trace.steps, run.steps, strict=True):
            assert [tuple(chunk) for chunk in step.chunks] == seen["chunks"]
            assert step.admitted == seen["admitted"]
            assert set(step.preempted) >= set(seen["preempted"])  # and perhaps those preempted between two steps
            assert step.tokens == seen["tokens"]
            assert (step.start, step.end) == seen["times"]
            assert step.prefill_tokens + step.decode_tokens == sum(chunk[2] for chunk in seen["chunks"])
        assert [step.index for step in run.trace.steps] == list(range(len(run.steps)))


def test_every_end_is_in_the_trace(shadows):
    for run in shadows:
        assert {name: r.finish_reason for name, r in run.trace.requests.items()} == run.ends
        for name, request in run.trace.requests.items():
            assert request.arrival_time <= request.finish_time
            assert request.arrival_step <= request.finish_step
            assert name == request.request_id or name.startswith(request.request_id + "#")
        for step, seen in zip(run.trace.steps, run.steps, strict=True):
            for name, reason in step.finished.items():
                assert run.ends[name] == reason


def test_no_request_waits_or_holds_blocks_once_it_has_ended(shadows):
    for run in shadows:
        last = len(run.trace.steps) - 1
        for name, request in run.trace.requests.items():
            index = request.finish_step + 1
            if index <= last:
                assert name not in run.trace.reasons_at(index)
                assert all(name not in names for names in run.trace.owners_at(index).values())


def test_an_id_that_is_used_again_gets_a_name_of_its_own():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20))
    for request_id in ("a#2", "a", "a", "a"):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=2), request_id=request_id)
        while engine.has_unfinished_requests():
            engine.step()
    names = list(engine.trace.requests)
    assert len(set(names)) == 4
    assert [r.request_id for r in engine.trace.requests.values()] == ["a#2", "a", "a", "a"]
    assert Counter(len(times) for times in engine.trace.token_times().values()) == {2: 4}  # two tokens each


def test_a_request_that_ends_in_the_step_of_its_peak_shows_its_peak():
    engine = Engine(FakeRunner(), EngineConfig(block_size=16, num_blocks=10))
    engine.add_request(list(range(33)), SamplingParams(max_tokens=1), request_id="a")
    engine.step()
    assert engine.block_manager.num_used == 0
    assert engine.trace.steps[0].blocks_used == 3  # 33 tokens
    owners = engine.trace.owners_at(0)
    assert len(owners) == 3 and set(map(tuple, owners.values())) == {("a",)}


def test_a_shared_block_has_all_its_owners():
    engine = Engine(FakeRunner(), EngineConfig(block_size=4, num_blocks=20))
    prompt = list(range(9))  # two full blocks and a token
    engine.add_request(prompt, SamplingParams(max_tokens=9), request_id="a")
    engine.step()
    engine.add_request(prompt, SamplingParams(max_tokens=9), request_id="b")
    engine.step()
    owners = sorted(sorted(names) for names in engine.trace.owners_at(1).values())
    assert owners == [["a"], ["a", "b"], ["a", "b"], ["b"]]


def test_a_failed_step_leaves_no_record_and_no_owner():
    engine = Engine(FakeRunner(fail_at={1}), EngineConfig(block_size=4, num_blocks=20))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9), request_id="a")
    engine.step()
    engine.add_request(list(range(30)), SamplingParams(max_tokens=2), request_id="b")
    with pytest.raises(RuntimeError):
        engine.step()
    assert len(engine.trace.steps) == 1
    engine.cancel("b")
    engine.step()
    assert engine.trace.owners_at(1) == {engine.snapshot()["a"].block_table[0]: ["a"]}
    assert engine.trace.requests["b"].finish_reason == "cancelled"


def test_no_trace_is_kept_when_none_is_wanted():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20), record_trace=False)
    engine.generate([[1, 2, 3]])
    assert not engine.trace.steps


def test_a_new_request_does_not_inherit_the_reason_of_an_old_one_with_its_id():
    for record_trace in (True, False):
        config = EngineConfig(num_blocks=20, max_num_seqs=1, max_num_batched_tokens=64)
        engine = Engine(FakeRunner(), config, record_trace=record_trace)
        for request_id in ("a", "b"):
            engine.add_request([1, 2, 3], SamplingParams(max_tokens=9), request_id=request_id)
        engine.step()
        assert engine.snapshot()["b"].reason == "seq_budget"
        engine.cancel("a")
        engine.cancel("b")
        engine.step()  # nothing to compute: delivers the two ends
        engine.add_request([1, 2, 3], request_id="b")
        assert engine.snapshot()["b"].reason is None


# --- JSON ---


def strict_json(text):
    """The value of a JSON text; NaN and Infinity, which Python would accept, are no JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_trace_survives_json(shadows):
    for run in shadows:
        text = run.trace.to_json()
        strict_json(text)
        again = Trace.from_json(text)
        assert again == run.trace
        assert again.to_json() == text
        assert again.to_perfetto() == run.trace.to_perfetto()


def test_an_empty_trace_survives_json():
    assert Trace.from_json(Trace().to_json()) == Trace()
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20))
    assert Trace.from_json(engine.trace.to_json()) == engine.trace
    engine.add_request([1], request_id='quotes " and 中文')
    assert Trace.from_json(engine.trace.to_json()) == engine.trace


@pytest.mark.parametrize(
    "text",
    [
        "", "no JSON", "[]", "{}", "3", '{"traceEvents":[]}',
        '{"format":"course_lib.trace/2"}',  # of another version
        '{"format":"course_lib.trace/1"}',  # cut down to nothing
    ],  # fmt: skip
)
def test_anything_else_is_refused_as_a_trace(text):
    with pytest.raises(ValueError):
        Trace.from_json(text)


def test_a_trace_of_a_policy_of_ones_own_can_be_written():
    class Mine:
        def order(self, prefilling, waiting, step):
            return [*prefilling, *waiting]

        def share(self, budget, left, candidates, block_size):
            return left

    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20, policy=Mine()))
    engine.generate([[1, 2, 3]])
    assert len(Trace.from_json(engine.trace.to_json()).steps) == len(engine.trace.steps)
    check_perfetto(engine.trace)


# --- Perfetto ---


def nanoseconds(microseconds):
    return round(microseconds * 1000)


def check_perfetto(trace):
    """The rules of the Trace Event Format that Perfetto relies on. Returns the events by kind."""
    data = strict_json(trace.to_perfetto())
    assert data["displayTimeUnit"] == "ms"
    events = defaultdict(list)
    for event in data["traceEvents"]:
        events[event["ph"]].append(event)
        assert isinstance(event["pid"], int) and event["name"]
        if event["ph"] != "M":
            assert math.isfinite(event["ts"]) and event["ts"] >= 0
    assert set(events) <= {"M", "X", "C", "i", "b", "e", "s", "f"}

    # Every track has one name, and every request a track.
    names = {}
    for event in events["M"]:
        if event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in names, "a track with two names"
            names[event["pid"], event["tid"]] = event["args"]["name"]
    assert {"process_name", "thread_name"} <= {event["name"] for event in events["M"]}
    assert set(trace.requests) <= set(names.values())
    assert len(set(names.values())) == len(names), "two tracks with one name"
    for kind in "Xi":
        assert all((event["pid"], event["tid"]) in names for event in events[kind])

    # Slices of a track come one after another: Perfetto drops one that overlaps.
    tracks = defaultdict(list)
    for event in events["X"]:
        assert math.isfinite(event["dur"]) and event["dur"] >= 0
        begin = nanoseconds(event["ts"])
        tracks[names[event["pid"], event["tid"]]].append((begin, begin + nanoseconds(event["dur"]), event["name"]))
    for slices in tracks.values():
        slices.sort()
        for (_, end, one), (begin, _, other) in zip(slices, slices[1:], strict=False):
            assert end <= begin, f"{one} and {other} overlap"

    # The steps' own track has each step, the requests' tracks have each chunk; all in microseconds.
    (steps,) = [slices for name, slices in tracks.items() if name not in trace.requests] or [[]]
    times = [(nanoseconds(step.start * 1e6), nanoseconds(step.end * 1e6)) for step in trace.steps]
    assert [(begin, end) for begin, end, _ in steps] == sorted(times)
    drawn = Counter((name, begin, end) for name, slices in tracks.items() for begin, end, _ in slices)
    for step, (begin, end) in zip(trace.steps, times, strict=True):
        for chunk in step.chunks:
            assert drawn[chunk.request, begin, end] >= 1, f"{chunk} is not drawn"

    # Nothing of a request is drawn before it came or after it ended.
    for name, request in trace.requests.items():
        for begin, end, title in tracks[name]:
            assert begin >= nanoseconds(request.arrival_time * 1e6), f"{name}: {title} begins before the request"
            if request.finish_time is not None:
                assert end <= nanoseconds(request.finish_time * 1e6), f"{name}: {title} goes on after the request's end"

    # One instant a request, where its first token came.
    first = {name: nanoseconds(t[0] * 1e6) for name, t in trace.token_times().items() if t}
    assert {names[event["pid"], event["tid"]]: nanoseconds(event["ts"]) for event in events["i"]} == first
    assert len(events["i"]) == len(first)
    assert all(event.get("s") == "t" for event in events["i"])
    if trace.steps:
        assert all(times[0][0] <= moment <= times[-1][1] for moment in first.values())

    # Counters: whole blocks that add up to the pool, tokens that add up to the step's.
    blocks = [e["args"] for e in events["C"] if "used" in e["args"]]
    assert len(blocks) == len(trace.steps)
    for step, values in zip(trace.steps, blocks, strict=True):
        assert values["used"] == step.blocks_used
        assert sum(values.values()) == trace.config["num_blocks"] and min(values.values()) >= 0
    tokens = [e["args"] for e in events["C"] if "used" not in e["args"]]
    assert [sum(v.values()) for v in tokens] == [sum(c.num_tokens for c in step.chunks) for step in trace.steps]
    return events


def test_perfetto_can_draw_runs_with_preemptions_cancels_and_failures(shadows):
    for run in shadows:
        check_perfetto(run.trace)


def test_perfetto_gets_times_in_microseconds():
    engine = Engine(FakeRunner(step_seconds=0.25), EngineConfig(num_blocks=20))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2), request_id="a")
    engine.step()
    engine.step()
    events = check_perfetto(engine.trace)
    steps = [(e["ts"], e["dur"]) for e in events["X"] if e["name"].startswith("step")]
    assert steps == [(0, 250_000), (250_000, 250_000)]
    assert [e["ts"] for e in events["i"]] == [250_000]


def test_perfetto_can_draw_a_clock_that_is_far_from_zero():
    class Late(FakeRunner):
        def now(self):
            return 40_000_000.123456789 + super().now()  # a machine that has been up for 15 months

    config = EngineConfig(block_size=4, num_blocks=9, max_num_seqs=3, max_num_batched_tokens=8)
    engine = Engine(Late(step_seconds=0.0031), config)
    engine.generate([[1, 2, 3, 4, 5], [6] * 15, [7] * 9], SamplingParams(max_tokens=10))
    check_perfetto(engine.trace)


def test_perfetto_can_draw_steps_that_took_no_time():
    config = EngineConfig(block_size=4, num_blocks=9, max_num_seqs=2, max_num_batched_tokens=8)
    engine = Engine(FakeRunner(step_seconds=0.0), config)
    engine.generate([[1, 2, 3, 4, 5], [6] * 15, [7] * 9], SamplingParams(max_tokens=5))
    check_perfetto(engine.trace)


def test_perfetto_gets_a_valid_file_before_anything_happened():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20))
    check_perfetto(engine.trace)
    engine.add_request([1, 2, 3])
    check_perfetto(engine.trace)
    strict_json(Trace().to_perfetto())


def test_perfetto_ends_the_wait_of_a_request_where_it_was_cancelled():
    runner = FakeRunner()
    engine = Engine(runner, EngineConfig(num_blocks=20, max_num_seqs=1, max_num_batched_tokens=64))
    for request_id in ("a", "b"):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=5), request_id=request_id)
    engine.step()
    engine.cancel("b")
    runner._time += 60  # the user pauses for a minute before the next step
    engine.step()
    check_perfetto(engine.trace)


def test_perfetto_shows_a_request_that_still_waits_at_the_end():
    engine = Engine(FakeRunner(), EngineConfig(num_blocks=20, max_num_seqs=1, max_num_batched_tokens=64))
    for request_id in ("a", "b"):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=5), request_id=request_id)
    engine.step()
    engine.step()
    events = check_perfetto(engine.trace)
    waits = [e for e in events["X"] if "seq_budget" in e["name"]]
    assert [(e["ts"], e["dur"]) for e in waits] == [(0, 2_000_000)]  # both steps, one second each
