"""The simulator: what chips and models are, what a step costs, the runner in virtual time, and fitting a cost model."""

import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Watch, is_idle, limit, make_engine, prompt, run_to_end, step

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.batch import build_batch, count_batch
from course_lib.calibrate import FittedCost, calibrate, fit, observations, relative_errors
from course_lib.contrast import PrefillFirstScheduler
from course_lib.cost_model import RooflineCost, StepWork, pairs_of, step_cost, work_of
from course_lib.hardware import CHIPS, MODELS, Chip, ModelShape, find_chip, find_model, num_blocks_for, parallel
from course_lib.metrics import of_requests, percentile
from course_lib.runners import FakeRunner, SimulatedRunner
from course_lib.scheduler import ScheduledChunk, ScheduledChunks, Scheduler, SchedulerOutput
from course_lib.sequence import Sequence
from course_lib.trace import ChunkRecord, Chunks
from course_lib.workloads import Piece, Request, long_documents, replay, simulate, stall

ROOT = Path(__file__).resolve().parent.parent

# One layer of width 8 with 2 heads of 4 and one K/V head: small enough to count by hand.
TOY = ModelShape("toy", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab_size=32, max_model_len=1024)
TOY_CHIP = Chip("toy", 1e6, 1e6, 1e6, compute_efficiency=0.5, bandwidth_efficiency=0.5, fixed_seconds=0.25)


# ---- chips and models -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # the number of parameters on each model's card at the model hub ("Safetensors: model size", as its index counts them)
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("llama3-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("yi-34b", 34_388_917_248),
    ],
)
def test_a_models_shape_gives_the_number_of_parameters_on_its_card(name, parameters):
    assert MODELS[name].parameters == parameters


def test_the_shape_of_smollm2_is_that_of_the_model_that_runs_here(smollm2):
    config, shape = smollm2.model.config, MODELS["smollm2-135m"]
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
    )  # fmt: skip
    assert (shape.intermediate, shape.vocab_size, shape.max_model_len, shape.tied) == (
        config.intermediate_size, config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings,
    )  # fmt: skip
    assert shape.parameters == sum(p.numel() for p in smollm2.model.parameters())


def test_kv_of_a_token_counts_the_kv_heads_and_not_the_query_heads():
    assert MODELS["llama3-8b"].kv_values_per_token * 2 == 131_072  # bytes: 128 KiB, 2 × 8 heads × 128 × 32 layers × 2 bytes
    assert MODELS["yi-34b"].kv_values_per_token * 2 == 245_760  # 240 KiB


def test_no_preset_uses_the_peak_with_sparsity():
    # The data sheets' BF16 numbers with sparsity are 1,979, 1,979, 624 and 330 TFLOPS: twice the dense ones.
    peaks = {name: CHIPS[name].peak_flops / 1e12 for name in ("h100", "h200", "a100", "rtx4090")}
    assert peaks == pytest.approx({"h100": 1979 / 2, "h200": 1979 / 2, "a100": 624 / 2, "rtx4090": 330.4 / 2}, rel=0.001)


def test_every_preset_says_where_its_numbers_are_from():
    assert all(len(preset.source) > 20 for preset in [*CHIPS.values(), *MODELS.values()])


def test_decoding_alone_on_an_a100_takes_as_long_as_gpt_fast_measured():
    # gpt-fast's README: Llama-2-7B in bfloat16 on an A100 80 GB, 104.9 tokens/s for one sequence.
    llama2 = ModelShape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096)
    assert llama2.parameters == 6_738_415_616
    seconds = step_cost(llama2, CHIPS["a100"], StepWork(tokens=1, rows=1, pairs=200, context=200)).seconds
    assert 1 / seconds == pytest.approx(104.9, rel=0.1)


def test_parallel_chips_add_up():
    two = find_chip("2x-a100")
    assert (two.name, two.count, two.flops, two.memory_bytes) == ("2x-a100", 2, 2 * CHIPS["a100"].flops, 160e9)
    assert two == parallel(CHIPS["a100"], 2)
    assert parallel(two, 2).count == 4


def test_blocks_for_a_chip_are_what_the_weights_leave():
    # (0.9 × 80 GB - 2 × 8,030,261,248 B) / (16 tokens × 131,072 B) = 26,674.1
    assert num_blocks_for("llama3-8b", "h100") == 26_674
    assert num_blocks_for("llama3-8b", "h100", 32) == 13_337
    with pytest.raises(
        ValueError, match=r"model='yi-34b' doesn't fit on chip='rtx4090': its weights take 68.8 GB, and 21.6 of 24 GB"
    ):
        num_blocks_for("yi-34b", "rtx4090")
    with pytest.raises(ValueError, match="block_size=0"):
        num_blocks_for("llama3-8b", "h100", 0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: find_model("llama3-8B"), ValueError, "did you mean 'llama3-8b'"),
        (lambda: find_chip("h1000"), ValueError, "did you mean 'h100'"),
        (lambda: find_chip("0x-a100"), ValueError, "count=0"),
        (lambda: find_chip("2x-b200"), ValueError, "chip='b200' is unknown"),
        (lambda: find_chip("-2x-a100"), ValueError, "is unknown"),
        (lambda: find_model(None), TypeError, "model must be a name or a ModelShape"),
        (lambda: find_chip(MODELS["yi-34b"]), TypeError, "chip must be a name or a Chip"),
        (lambda: replace(TOY_CHIP, peak_flops=0), ValueError, "peak_flops=0"),
        (lambda: replace(TOY_CHIP, compute_efficiency=1.2), ValueError, "compute_efficiency=1.2"),
        (lambda: replace(TOY_CHIP, fixed_seconds=-1), ValueError, "fixed_seconds=-1"),
        (lambda: replace(TOY_CHIP, fixed_seconds=float("nan")), ValueError, "fixed_seconds=nan"),
        (lambda: replace(TOY, kv_heads=0), ValueError, "kv_heads=0"),
        (lambda: replace(TOY, heads=3, kv_heads=2), ValueError, "heads=3 is not a multiple of kv_heads=2"),
        (lambda: replace(TOY, layers=1.5), TypeError, "layers must be an integer"),
    ],
)
def test_a_wrong_preset_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ---- what a step costs ----------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 7), (5, 1), (5, 7), (1000, 24)])
def test_pairs_are_those_of_the_causal_mask(start, num_tokens):
    by_hand = sum(1 for query in range(start, start + num_tokens) for key in range(start + num_tokens) if key <= query)
    assert pairs_of(num_tokens, start + num_tokens) == by_hand


def test_work_counts_tokens_rows_pairs_and_context():
    chunks = [
        ChunkRecord("a", 9, 1, "decode", True),  # sees 10 tokens
        ChunkRecord("b", 0, 4, "prefill", False),  # 1 + 2 + 3 + 4
        ChunkRecord("c", 2, 3, "prefill", True),  # 3 + 4 + 5
    ]
    assert work_of([]) == work_of(Chunks()) == StepWork(0, 0, 0, 0)
    assert work_of([ChunkRecord("a", 5, 2, "prefill", True), ChunkRecord("b", 9, 0, "prefill", False)]).pairs == 6 + 7
    assert work_of(chunks) == work_of(Chunks(chunks)) == StepWork(tokens=8, rows=2, pairs=10 + 10 + 12, context=10 + 4 + 5)


def test_a_steps_cost_is_the_one_counted_by_hand():
    # Layer: q and o 2 × 8×8, k and v 2 × 8×4, MLP 3 × 8×16 = 576 weights; head 32×8 = 256; K/V 2×1×4 = 8 numbers a token.
    assert (TOY.linear_parameters, TOY.head_parameters, TOY.kv_values_per_token) == (576, 256, 8)
    cost = step_cost(TOY, TOY_CHIP, StepWork(tokens=10, rows=2, pairs=50, context=30))
    assert cost.flops == 2 * 576 * 10 + 2 * 256 * 2 + 4 * 2 * 4 * 50
    assert cost.bytes == 2 * (576 + 256 + 8 * (30 + 10))
    assert cost.compute_seconds == cost.flops / 500_000 and cost.memory_seconds == cost.bytes / 500_000
    assert cost.seconds == 0.25 + max(cost.compute_seconds, cost.memory_seconds)
    assert cost.intensity == cost.flops / cost.bytes and cost.bound == "compute"


def test_where_memory_and_compute_do_not_overlap_their_times_add_up():
    work = StepWork(tokens=10, rows=2, pairs=50, context=30)
    cost = step_cost(TOY, replace(TOY_CHIP, overlap=False), work)
    assert cost.seconds == 0.25 + (cost.compute_seconds + cost.memory_seconds)


def test_the_head_costs_only_where_a_row_is_sampled():
    work = StepWork(tokens=10, rows=0, pairs=50, context=30)
    assert step_cost(TOY, TOY_CHIP, work).flops == 2 * 576 * 10 + 4 * 2 * 4 * 50
    assert step_cost(TOY, TOY_CHIP, work).bytes == 2 * (576 + 8 * 40)


def decodes(count, context):
    return [ChunkRecord(f"d{i}", context - 1, 1, "decode", True) for i in range(count)]


def test_128_decodes_nearly_hide_under_a_chunk():
    model, chip = MODELS["llama3-8b"], CHIPS["h100"]
    chunk = [ChunkRecord("long", 4096, 1024, "prefill", False)]
    alone, beside, without = (
        step_cost(model, chip, work_of(chunks)) for chunks in (decodes(128, 1024), chunk + decodes(128, 1024), chunk)
    )
    assert (alone.bound, without.bound, beside.bound) == ("memory", "compute", "compute")
    # What they add is the computing of 128 tokens (and their attention): a third of a decode step, whose time is reading.
    assert beside.seconds - without.seconds < 0.35 * alone.seconds
    assert beside.seconds < without.seconds * 1.2


# ---- the runner -----------------------------------------------------------------------------------


def simulated_engine(model="llama3-8b", chip="h100", cost=None, **settings):
    settings.setdefault("num_blocks", 2000)
    return Engine(SimulatedRunner(model, chip, cost), EngineConfig(**settings))


def test_the_clock_moves_by_the_cost_of_each_step():
    engine = simulated_engine(max_num_batched_tokens=200, max_prefill_chunk_size=64, enable_prefix_caching=True)
    same = prompt(100)
    for tokens in (same, prompt(333, 1), same + [1, 2], prompt(5, 2)):
        engine.add_request(tokens, limit(20))
        engine.step()
    run_to_end(engine)
    cost = RooflineCost(MODELS["llama3-8b"], CHIPS["h100"])
    time = 0.0
    for record in engine.trace.steps:
        assert record.start == time
        time += cost.seconds(work_of(record.chunks))
        assert record.end == time
    assert len(engine.trace.steps) > 20 and engine.runner.now() == time


def test_the_clock_jumps_forward_but_never_back():
    runner = SimulatedRunner()
    runner.advance_to(3.5)
    runner.advance_to(2.0)
    assert runner.now() == 3.5


@pytest.mark.parametrize("chunk", [7, 64, None])
def test_tokens_are_the_same_however_the_request_is_scheduled(chunk):
    def tokens(**settings):
        engine = simulated_engine("smollm2-135m", max_num_batched_tokens=128, **settings)
        ids = [engine.add_request(prompt(n, n), limit(200)) for n in (3, 64, 100, 41)]
        last = run_to_end(engine)
        assert all(last[i].finish_reason == "length" for i in ids), "no token ends a request"
        return [last[i].token_ids for i in ids], engine.metrics().num_preemptions

    expected, _ = tokens(num_blocks=2000, max_prefill_chunk_size=16)
    found, preemptions = tokens(num_blocks=32, max_prefill_chunk_size=chunk)
    assert found == expected and preemptions, "the pool is small enough that someone is preempted"
    assert expected[0] != expected[1] and len(set(expected[0])) > 100, "not all the same token"


def test_tokens_stay_within_a_small_vocabulary():
    engine = simulated_engine(TOY, TOY_CHIP, num_blocks=40)
    engine.add_request([1, 2, 3], limit(100))
    (out,) = run_to_end(engine).values()
    assert all(0 <= token < 32 for token in out.token_ids)


def test_a_pool_larger_than_the_chips_memory_is_refused():
    with pytest.raises(
        ValueError, match="num_blocks=26675 is more than fits beside the weights of llama3-8b on h100: at most 26674"
    ):
        simulated_engine(num_blocks=26_675)
    simulated_engine(num_blocks=26_674)


def test_a_batch_that_is_only_counted_has_the_work_and_the_rows_of_a_whole_one():
    seen = []

    def compare(output):
        whole, counted = build_batch(output), count_batch(output)
        sizes = [end - start for start, end in itertools.pairwise(whole.query_start_loc)]
        pairs = sum(map(pairs_of, sizes, whole.context_lens))
        assert counted.work == StepWork(len(whole.token_ids), len(whole.sample_rows), pairs, sum(whole.context_lens))
        assert counted.work == whole.work and counted.sampled == whole.sampled
        seen.append((len(whole.sequences), len(counted.sampled)))

    config = EngineConfig(num_blocks=80, max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk_size=24)
    engine = Engine(SimulatedRunner(), config, on_step=compare)
    for number in range(12):
        engine.add_request([number] * (10 + 25 * (number % 4)), SamplingParams(max_tokens=9))
    while engine.has_unfinished_requests():
        engine.step()
    assert any(sampled < scheduled for scheduled, sampled in seen) and max(seen)[0] == 8
    assert count_batch(SchedulerOutput(0, 16)) == (StepWork(0, 0, 0, 0), [])


def test_the_simulator_takes_a_whole_batch_as_well():
    """As from an engine that sees a runner around it, which doesn't say that nobody reads the tokens."""

    class Around:
        def __init__(self, inner):
            self.vocab_size, self.max_model_len, self.tokenizer = inner.vocab_size, inner.max_model_len, None
            self.execute, self.now = inner.execute, inner.now

    def trace(runner):
        config = EngineConfig(num_blocks=80, max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk_size=24)
        engine = Engine(runner, config)
        for number in range(12):
            engine.add_request([number] * (10 + 25 * (number % 4)), SamplingParams(max_tokens=9, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        return engine.trace

    assert trace(Around(SimulatedRunner())) == trace(SimulatedRunner())


def test_a_step_of_the_simulator_is_cheap():
    runner = SimulatedRunner()
    sequences = [Sequence(f"r{i}", [1] * 100, arrival=i) for i in range(1024)]
    for sequence in sequences:
        sequence.block_table = list(range(7))
    output = SchedulerOutput(0, 16, ScheduledChunks([ScheduledChunk(s, 99, 1, "decode", True) for s in sequences]))
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        runner.execute(count_batch(output))
        times.append(time.perf_counter() - begin)
    assert min(times) < 2e-3  # 0.12 ms were measured: 4 µs and 0.12 µs a sequence


def script(seed):
    return f"""if True:
        from course_lib import EngineConfig
        from course_lib.workloads import mix, simulate
        config = EngineConfig(num_blocks=900, max_num_seqs=32, max_num_batched_tokens=1024, max_prefill_chunk_size=512)
        print(simulate(config, mix(8, 80, seed={seed}), model="llama3-8b", chip="a100").to_json())
    """


def trace_json(python, code, hash_seed):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
    return subprocess.run([python, "-c", code], capture_output=True, cwd=ROOT, env=environment, timeout=60, check=True).stdout


def other_pythons():
    """This Python, and those that are installed beside it."""
    found = [shutil.which(f"python3.{minor}") for minor in range(11, 15)]
    return [
        sys.executable,
        *(path for path in found if path and not subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL)),
    ]


def test_the_same_seed_gives_the_same_trace_to_the_byte_in_every_python():
    expected = trace_json(sys.executable, script(1), "1")
    assert len(expected) > 100_000 and b'"preempted":["' in expected
    assert all(trace_json(python, script(1), "2") == expected for python in other_pythons())
    assert trace_json(sys.executable, script(2), "1") != expected


# ---- the order in the literature ------------------------------------------------------------------

# Sarathi-Serve (Agrawal et al., OSDI 2024) takes the two ideas apart in its ablation: mixing decodes with whole
# prompts is good for TTFT and bad for the time between tokens, chunks without mixing the other way round, and
# chunks mixed with decodes are good at both.


@pytest.fixture(scope="module")
def ablation():
    """Documents into chats on Mistral-7B, one A100 (one of the paper's set-ups): setting -> TTFTs of documents, gaps of chats."""
    workload = long_documents(3.5, 200, seed=1, every=5)
    settings = {"whole": (None, Scheduler), "chunks alone": (512, PrefillFirstScheduler), "chunks mixed": (512, Scheduler)}
    result = {}
    for name, (chunk, scheduler) in settings.items():
        config = EngineConfig(
            num_blocks=20_000, max_num_seqs=128, max_num_batched_tokens=8192 + 128, max_prefill_chunk_size=chunk,
            enable_prefix_caching=False,
        )  # fmt: skip
        trace = simulate(config, workload, model="mistral-7b", chip="a100", scheduler=scheduler)
        requests = of_requests(trace)
        ttfts = [r.ttft for name, r in requests.items() if name.startswith("doc")]
        gaps = [gap for name, r in requests.items() if name.startswith("chat") for gap in r.itl]
        assert len(ttfts) == 40 and all(r.finish_reason == "length" for r in trace.requests.values())
        result[name] = (statistics.median(ttfts), percentile(gaps, 99), max(gaps))
    return result


def test_whole_prefill_has_the_best_ttft_of_the_documents(ablation):
    ttft = {name: values[0] for name, values in ablation.items()}
    assert ttft["whole"] < ttft["chunks alone"] and ttft["whole"] < ttft["chunks mixed"]


def test_whole_prefill_and_chunks_without_mixing_stall_the_chats(ablation):
    p99 = {name: values[1] for name, values in ablation.items()}
    longest = {name: values[2] for name, values in ablation.items()}
    assert min(p99["whole"], p99["chunks alone"]) > 3 * p99["chunks mixed"]
    assert min(longest["whole"], longest["chunks alone"]) > 5 * longest["chunks mixed"]


def test_chunks_mixed_with_decodes_are_good_at_both(ablation):
    whole, mixed = ablation["whole"], ablation["chunks mixed"]
    assert mixed[0] < 1.25 * whole[0], "the document waits a little longer"
    assert mixed[1] < 0.1, "no chat waits a tenth of a second"


# ---- the scheduler that the course argues against --------------------------------------------------


@pytest.mark.parametrize("num_blocks", [12, 40, 256])
@pytest.mark.parametrize("seed", range(4))
def test_prefill_first_keeps_the_laws_and_gives_the_right_tokens(num_blocks, seed):
    rng = random.Random(seed)
    engine = make_engine(
        parts={"scheduler": PrefillFirstScheduler}, num_blocks=num_blocks, block_size=4, max_num_seqs=6,
        max_num_batched_tokens=24, max_prefill_chunk_size=rng.choice([5, 16]), kv_watermark=0.0,
    )  # fmt: skip
    watch, expected = Watch(engine), {}
    for i in range(12):
        tokens, count = prompt(rng.randrange(1, 36), 100 * seed + i), rng.randrange(1, 10)
        expected[engine.add_request(tokens, limit(count))] = engine.runner.solo(tokens, count)
        for _ in range(rng.randrange(4)):
            step(engine)
    last = run_to_end(engine)
    for name, tokens in expected.items():
        out = last.get(name)
        assert out is None or out.token_ids == tokens
    assert is_idle(engine)
    kinds = [{chunk.kind for chunk in out.chunks} for out in watch.outputs]
    assert {"prefill"} in kinds and {"decode"} in kinds
    assert all(len(kind) == 1 for kind in kinds), "a step is all prefill or all decode"


def test_with_prefill_first_nobody_gets_a_token_while_a_prompt_is_pending():
    engine = make_engine(parts={"scheduler": PrefillFirstScheduler}, max_num_batched_tokens=64, max_prefill_chunk_size=16)
    watch = Watch(engine)
    engine.add_request(prompt(10), limit(10), request_id="chat")
    step(engine)
    engine.add_request(prompt(64, 1), limit(2), request_id="long")
    run_to_end(engine)
    assert watch.scheduled()[1:5] == [{"long": 16}] * 4
    assert [reasons.get("chat") for reasons in watch.reasons()[1:6]] == ["decode_share"] * 4 + [None]


# ---- fitting a cost model -------------------------------------------------------------------------

TRUE = FittedCost(per_step=0.05, per_row=0.02, per_token=0.003, per_pair=1e-6, per_context=2e-5)


def some_work(count, seed=0):
    rng, works = random.Random(seed), []
    for _ in range(count):
        tokens = rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
        context = tokens + rng.randrange(2000)
        works.append(StepWork(tokens, 1, pairs_of(tokens, context), context))
    return works


def test_a_fit_finds_the_coefficients_that_made_the_times():
    fitted = fit([(work, TRUE.seconds(work)) for work in some_work(200)])
    assert fitted.coefficients == pytest.approx(TRUE.coefficients, rel=1e-6)
    assert fitted.p90_error < 1e-6 and fitted.num_steps == 100


def test_a_fit_stands_noise_and_some_steps_that_took_far_too_long():
    rng = random.Random(5)
    steps = [(work, TRUE.seconds(work) * rng.uniform(0.9, 1.1) * (10 if rng.random() < 0.05 else 1)) for work in some_work(400)]
    fitted = fit(steps)
    assert 0.02 < fitted.median_error < 0.08, "the noise itself is 5 % on average"
    clean = [(work, TRUE.seconds(work)) for work in some_work(100, seed=9)]
    assert percentile(relative_errors(fitted, clean), 90) < 0.05


def test_a_fit_says_its_error_on_steps_that_it_did_not_see():
    works = some_work(100)
    steps = [(work, TRUE.seconds(work) * (1 if i % 2 == 0 else 2)) for i, work in enumerate(works)]
    assert fit(steps).median_error == pytest.approx(0.5, abs=0.01), "all that were held out took twice as long"


def test_no_coefficient_is_negative():
    rng = random.Random(0)
    fitted = fit([(work, 1 / work.tokens + rng.random() * 0.01) for work in some_work(60)])  # more tokens, less time: nonsense
    assert all(coefficient >= 0 for coefficient in fitted.coefficients)


def test_a_fit_wants_enough_steps_and_times_above_zero():
    steps = [(work, TRUE.seconds(work)) for work in some_work(20)]
    fit(steps)
    with pytest.raises(ValueError, match="steps has 19 entries"):
        fit(steps[1:])
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="seconds="):
            fit([*steps, (steps[0][0], bad)])


def test_calibrating_a_simulated_laptop_gives_its_own_cost_back():
    cost = calibrate(SimulatedRunner("smollm2-135m", "laptop"), seconds=1.0)
    assert cost.median_error < 0.05 and cost.num_steps >= 30
    chunk = StepWork(256, 0, pairs_of(256, 256), 256)
    assert cost.seconds(chunk) == pytest.approx(step_cost(MODELS["smollm2-135m"], CHIPS["laptop"], chunk).seconds, rel=0.1)
    assert "error on held-out steps: median" in str(cost)


def test_what_other_programs_took_of_the_machine_is_not_the_steps_cost():
    rng = random.Random(1)

    class BusyMachine(SimulatedRunner):
        def execute(self, batch):
            before, samples = self.now(), super().execute(batch)
            self.advance_to(
                self.now() + rng.choice([0, 0, 0, 3]) * (self.now() - before)
            )  # every fourth step takes 4 times as long
            return samples

    quiet = calibrate(SimulatedRunner("smollm2-135m", "laptop"), seconds=1.0)
    busy = calibrate(BusyMachine("smollm2-135m", "laptop"), seconds=200.0)
    assert busy.coefficients == pytest.approx(quiet.coefficients, rel=1e-6), "each step had a quiet run among the many"


def test_a_fitted_cost_drives_the_simulator():
    engine = simulated_engine("smollm2-135m", "laptop", cost=TRUE)
    engine.add_request(prompt(10), limit(2))
    run_to_end(engine)
    assert [s.end - s.start for s in engine.trace.steps] == pytest.approx(
        [TRUE.seconds(work_of(s.chunks)) for s in engine.trace.steps]
    )


def test_observations_are_the_steps_of_any_trace():
    engine = Engine(FakeRunner(step_seconds=0.5), EngineConfig())
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    run_to_end(engine)
    assert observations(engine.trace) == [(StepWork(3, 1, 6, 3), 0.5), (StepWork(1, 1, 4, 4), 0.5)]


def test_a_real_model_can_be_calibrated(tiny):
    from course_lib import ModelRunner

    cost = calibrate(ModelRunner(tiny), seconds=0.01)
    assert all(coefficient >= 0 for coefficient in cost.coefficients) and any(cost.coefficients)
    assert 0 < cost.median_error < 1


def test_combinations_of_settings_end(tmp_path):
    workload = [*stall(4, 200, arrival=0.05, output_tokens=20), Request("late", 9.0, (Piece(77, 50),), 3)]
    for model, chip, chunk in itertools.product(("smollm2-135m", "qwen3-0.6b"), ("rtx4090", "laptop"), (16, None)):
        engine = simulated_engine(model, chip, num_blocks=100, max_prefill_chunk_size=chunk)
        trace = replay(engine, workload)
        assert {r.finish_reason for r in trace.requests.values()} == {"length"} and is_idle(engine)
