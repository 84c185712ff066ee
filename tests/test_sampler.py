"""Sampling: each parameter means what it means in transformers, and a draw depends on seed and token index alone."""

import math
import random

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.model import sampler
from course_lib.runners.model import ModelRunner
from course_lib.sequence import Sequence

VOCAB = 300
INF, NAN = float("inf"), float("nan")


def sequence(prompt=(1, 2, 3), generated=(), seed=0, **params):
    one = Sequence("r", list(prompt), SamplingParams(**params), seed=seed)
    one.generated_token_ids = list(generated) if isinstance(generated, tuple) else generated
    return one


def random_logits(rows, vocab=VOCAB, seed=0):
    """Logits with the spread of a real model's: a few likely tokens and a long tail."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def probabilities(logits, sequences):
    """What each row's token is drawn from, [R, vocab], each row adding up to 1."""
    sorted_, order = sampler.filtered_probabilities(sampler.penalise_repetition(logits, sequences), sequences)
    result = torch.zeros_like(logits, dtype=torch.float64).scatter(-1, order, sorted_.double())
    return result / result.sum(dim=-1, keepdim=True)


def transformers_probabilities(logits, one):
    """The same for one row by transformers' processors, in the order of generate(); in float64."""
    p = one.params
    steps = LogitsProcessorList()
    if p.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature != 1:
        steps.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        steps.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        steps.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        steps.append(MinPLogitsWarper(p.min_p))
    history = torch.tensor([[*one.prompt_token_ids, *one.generated_token_ids]])
    return steps(history, logits[None].double())[0].softmax(dim=-1)


def assert_like_transformers(logits, sequences):
    ours = probabilities(logits, sequences)
    for row, one in enumerate(sequences):
        theirs = transformers_probabilities(logits[row], one)
        # Below 1e-30 float32 may be zero where float64 is not.
        assert (ours[row] > 1e-30).tolist() == (theirs > 1e-30).tolist(), one.params
        assert (ours[row] - theirs).abs().max() < 1e-6, one.params  # float32 against float64


def draws(logits, count, **params):
    """`count` draws from one row of logits, by as many seeds."""
    tokens = []
    for begin in range(0, count, 2000):
        sequences = [sequence(seed=seed, **params) for seed in range(begin, begin + 2000)]
        tokens += [s.token_id for s in sampler.sample(logits.expand(2000, -1), sequences)]
    return tokens


def assert_distributed(tokens, expected):
    """Chi-square test. The bound is 6 standard deviations above the mean (k - 1, deviation √(2(k - 1)))."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0, "a token was drawn that was filtered out"
    wanted = expected[expected > 0] * len(tokens)
    assert wanted.min() > 5, "too rare for a chi-square test"
    chi_square = ((counts[expected > 0] - wanted) ** 2 / wanted).sum().item()
    freedom = len(wanted) - 1
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom), (counts, wanted)


# --- the parameters ---


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 2.5},
        {"temperature": 0.01},
        {"temperature": 100.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 299},
        {"top_k": 300},
        {"top_k": 5000},  # more than there are tokens
        {"top_k": 0},  # off
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 1e-9},  # the likeliest token alone
        {"min_p": 0.0},
        {"min_p": 0.01},
        {"min_p": 0.3},
        {"min_p": 1.0},  # the likeliest token alone
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 5.0},
        {"repetition_penalty": 0.5},
    ],
    ids=str,
)
def test_each_parameter_does_what_it_does_in_transformers(params):
    params = {"temperature": 1.0} | params
    logits = random_logits(20)
    rng = random.Random(0)
    sequences = [
        sequence([rng.randrange(VOCAB) for _ in range(30)], tuple(rng.randrange(VOCAB) for _ in range(10)), **params)
        for _ in range(20)
    ]
    assert_like_transformers(logits, sequences)


def test_all_parameters_together_work_in_the_order_of_generate():
    rng = random.Random(1)
    sequences = [
        sequence(
            [rng.randrange(VOCAB) for _ in range(40)],
            tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(10))),
            temperature=rng.choice([0.3, 0.7, 1.0, 1.5]),
            top_k=rng.choice([None, 3, 20, 100]),
            top_p=rng.choice([1.0, 0.95, 0.6]),
            min_p=rng.choice([0.0, 0.02, 0.2]),
            repetition_penalty=rng.choice([1.0, 1.2, 2.0]),
        )
        for _ in range(200)
    ]
    assert_like_transformers(random_logits(200, seed=1), sequences)


def test_rows_with_masked_tokens_are_treated_like_in_transformers():
    logits = random_logits(6)
    logits[:, ::3] = -INF
    assert_like_transformers(
        logits,
        [
            sequence([0, 3, 4], temperature=0.8),
            sequence([0, 3, 4], temperature=1.0, top_k=250),  # more than are left
            sequence([0, 3, 4], temperature=1.0, top_p=0.9),
            sequence([0, 3, 4], temperature=1.0, min_p=0.1),
            sequence([0, 3, 4], temperature=1.0, repetition_penalty=1.5),
            sequence([0, 3, 4], temperature=0.5, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.5),
        ],
    )


def test_repetition_penalty_counts_a_token_once_however_often_it_appeared():
    logits = torch.tensor([[4.0, -4.0, 1.0, 0.0]])
    one = sequence([0, 1, 0, 0], (1, 1), temperature=1.0, repetition_penalty=2.0)
    assert sampler.penalise_repetition(logits, [one]).tolist() == [[2.0, -8.0, 1.0, 0.0]]
    assert logits.tolist() == [[4.0, -4.0, 1.0, 0.0]]  # the caller's logits stay


def test_repetition_penalty_also_changes_the_greedy_choice():
    logits = torch.tensor([[4.0, 3.0]])
    assert sampler.sample(logits, [sequence([0], repetition_penalty=1.0)])[0].token_id == 0
    assert sampler.sample(logits, [sequence([0], repetition_penalty=2.0)])[0].token_id == 1
    assert sampler.sample(logits, [sequence([1], (0,), repetition_penalty=1.1)])[0].token_id == 0  # 3.64 > 2.73


def test_top_p_keeps_the_token_that_crosses_p():
    logits = torch.tensor([[0.9, 0.1]]).log()
    assert probabilities(logits, [sequence(temperature=1.0, top_p=0.5)]).tolist() == [[1.0, 0.0]]
    assert (probabilities(logits, [sequence(temperature=1.0, top_p=0.95)]) > 0).tolist() == [[True, True]]


def test_a_tiny_top_p_keeps_one_token():
    logits = random_logits(1)
    for p in (1e-3, 1e-12, 5e-324):
        assert (probabilities(logits, [sequence(temperature=1.0, top_p=p)]) > 0).sum() == 1
        assert set(draws(logits, 2000, temperature=1.0, top_p=p)) == {logits.argmax().item()}


def test_ids_are_mapped_back_after_sorting():
    # The likeliest token is neither the first nor the last, so ranks and ids can't be mistaken for each other.
    logits = torch.full((1, 50), -20.0)
    logits[0, 31] = 20.0
    assert {s.token_id for s in sampler.sample(logits, [sequence(temperature=1.0, top_p=0.9)])} == {31}
    assert {s.token_id for s in sampler.sample(logits, [sequence(temperature=1.0, top_k=2)])} == {31}


def test_tokens_with_equal_logits_are_equally_likely():
    probs = probabilities(torch.zeros(1, 8), [sequence(temperature=0.5)])
    assert probs.tolist() == [[1 / 8] * 8]


def test_ties_at_the_border_of_top_k_leave_k_tokens_or_all_the_tied_ones():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    kept = (probabilities(logits, [sequence(temperature=1.0, top_k=2)]) > 0)[0].tolist()
    assert sum(kept[:3]) in (2, 3) and not kept[3]  # transformers keeps the tied ones, a strict top-k cuts


def test_ties_at_the_border_of_top_p_leave_the_smallest_sufficient_set():
    logits = torch.zeros(1, 4)  # 0.25 each
    for p, count in ((0.2, 1), (0.3, 2), (0.6, 3), (0.8, 4)):
        assert (probabilities(logits, [sequence(temperature=1.0, top_p=p)]) > 0).sum() == count


def test_ties_at_the_border_of_min_p_are_kept():
    logits = torch.tensor([[2.0, 2.0, 2.0, 0.0]])
    kept = probabilities(logits, [sequence(temperature=1.0, min_p=1.0)]) > 0
    assert kept.tolist() == [[True, True, True, False]]


def test_temperature_zero_is_greedy():
    logits = random_logits(50)
    tokens = [s.token_id for s in sampler.sample(logits, [sequence(temperature=0.0, seed=i) for i in range(50)])]
    assert tokens == logits.argmax(dim=-1).tolist()


def test_greedy_looks_at_no_seed_and_at_no_filter():
    logits = random_logits(1)
    for params in ({}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}):
        assert {sampler.sample(logits, [sequence(seed=i, **params)])[0].token_id for i in range(20)} == {
            logits.argmax().item()
        }


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = random_logits(8)
    tokens = sampler.sample(logits, [sequence(temperature=temperature, seed=i) for i in range(8)])
    assert [s.token_id for s in tokens] == logits.argmax(dim=-1).tolist()
    assert not any(s.error for s in tokens)


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e39, 1e300])
def test_a_huge_temperature_makes_all_tokens_equally_likely(temperature):
    logits = torch.tensor([[5.0, 1.0, -3.0, 0.0]])
    assert_distributed(draws(logits, 2000, temperature=temperature), torch.full((4,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_a_huge_temperature_brings_no_masked_token_back(temperature):
    logits = torch.tensor([[5.0, -INF, 0.0]])
    assert set(draws(logits, 2000, temperature=temperature)) == {0, 2}


# --- rows in company ---


def test_each_row_of_a_mixed_batch_is_the_row_alone():
    rng = random.Random(2)
    logits = random_logits(100, seed=2)
    sequences = [
        sequence(
            [rng.randrange(VOCAB) for _ in range(20)],
            tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(10))),
            seed=rng.randrange(1 << 40),
            temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
            top_k=rng.choice([None, 1, 5, 50]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            min_p=rng.choice([0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.5]),
            logprobs=rng.choice([None, 0, 3]),
        )
        for _ in range(100)
    ]
    together = sampler.sample(logits, sequences)
    alone = [sampler.sample(logits[row : row + 1], [one])[0] for row, one in enumerate(sequences)]
    assert [s.token_id for s in together] == [s.token_id for s in alone]
    for a, b in zip(together, alone, strict=True):
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None:
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)


BAD_ROWS = {
    "one NaN": [NAN, 1.0, 2.0, 3.0],
    "all NaN": [NAN] * 4,
    "nothing allowed": [-INF] * 4,
    "infinite": [INF, 0.0, 1.0, 2.0],
}


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 2, "top_p": 0.5, "min_p": 0.1}]
)
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_can_not_be_sampled_harms_no_other(name, params):
    good = [0.0, 9.0, 1.0, 2.0]
    logits = torch.tensor([good, BAD_ROWS[name], good])
    first, bad, last = sampler.sample(logits, [sequence(**params) for _ in range(3)])
    alone = sampler.sample(logits[:1], [sequence(**params)])[0]
    assert first == last == alone and not alone.error
    if "NaN" in name:
        assert bad.error and "NaN" in bad.error
    elif name == "infinite":
        assert bad.error or bad.token_id == 0


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1e300}, {"repetition_penalty": 1e-300}, {"top_k": 10**30}, {"top_p": 5e-324}],
    ids=str,
)
def test_extreme_parameters_are_refused_or_served_but_break_no_step(params):
    try:
        extreme = sequence([0, 1], temperature=1.0, **params)
    except ValueError:
        return  # refused when given is a right answer too
    logits = torch.tensor([[4.0, 0.0, -4.0], [0.0, 20.0, 0.0]])
    samples = sampler.sample(logits, [extreme, sequence()])
    assert samples[0].error or samples[0].token_id in range(3)
    assert samples[1].token_id == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_are_nan_ends_with_an_error_and_the_engine_goes_on(tiny, temperature):
    class Sick(ModelRunner):
        def forward(self, batch):
            logits = super().forward(batch)
            for row, one in enumerate(batch.sampled):
                if one.request_id == "bad" and len(one.generated_token_ids) == 2:
                    logits[row] = NAN
            return logits

    params = SamplingParams(max_tokens=6, temperature=temperature, seed=1, ignore_eos=True)
    config = EngineConfig(num_blocks=32, max_num_batched_tokens=64, max_num_seqs=8)
    alone = Engine(ModelRunner(tiny), config).generate([list(b"good")], params)[0]
    engine = Engine(Sick(tiny), config)
    for request_id in ("bad", "good"):
        engine.add_request(list(request_id.encode()), params, request_id=request_id)
    ended = {}
    for _ in range(20):  # 6 tokens need 6 steps
        ended |= {o.request_id: o for o in engine.step() if o.finished}
    assert not engine.has_unfinished_requests()
    assert ended["bad"].finish_reason == "error" and len(ended["bad"].token_ids) == 2
    assert "NaN" in ended["bad"].error
    assert ended["good"].finish_reason == "length" and ended["good"].token_ids == alone.token_ids
    engine.check_invariants()
    assert engine.block_manager.num_used == 0


# --- draws ---


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 1.4},
    ],
    ids=str,
)
def test_draws_by_many_seeds_follow_the_probabilities(params):
    logits = torch.tensor([[0.3, 2.0, -0.5, 1.2, 0.0, 1.9, -1.0, 0.7]])
    assert_distributed(draws(logits, 20_000, **params), transformers_probabilities(logits[0], sequence(**params)))


def test_draws_by_one_seed_at_many_token_indices_follow_the_probabilities():
    logits = torch.tensor([[0.3, 2.0, -0.5, 1.2]])
    # range(n) has a length and needs no memory: only the number of generated tokens counts here.
    sequences = [sequence(generated=range(n), seed=42, temperature=1.0) for n in range(20_000)]
    tokens = [s.token_id for s in sampler.sample(logits.expand(20_000, -1), sequences)]
    expected = logits[0].double().softmax(dim=-1)
    assert_distributed(tokens, expected)
    # Neighbours are independent: so are pairs, which would show a draw that repeats or alternates.
    pairs = [4 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_distributed(pairs, torch.outer(expected, expected).flatten())


def test_draws_by_neighbouring_seeds_are_independent():
    tokens = draws(torch.zeros(1, 4), 20_000, temperature=1.0)
    pairs = [4 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_distributed(pairs, torch.full((16,), 1 / 16, dtype=torch.float64))


def test_the_draw_is_the_same_whatever_the_prompt_and_the_row():
    logits = random_logits(1, seed=3)
    wanted = sampler.sample(logits, [sequence(seed=7, generated=(1, 2), temperature=1.0)])[0].token_id
    for row in range(5):
        batch = random_logits(5, seed=4)
        batch[row] = logits[0]
        sequences = [sequence([9, 9, row], (5, 6), seed=7 if i == row else i, temperature=1.0) for i in range(5)]
        assert sampler.sample(batch, sequences)[row].token_id == wanted


def test_the_same_seed_draws_anew_at_each_token_index():
    logits = torch.zeros(1, 1000)
    tokens = [
        sampler.sample(logits, [sequence(seed=7, generated=(0,) * n, temperature=1.0)])[0].token_id for n in range(20)
    ]
    assert len(set(tokens)) > 15  # 20 draws out of 1,000: two equal ones are rare, three rarer


def test_different_seeds_draw_differently():
    logits = torch.zeros(1, 10_000)
    tokens = [sampler.sample(logits, [sequence(seed=seed, temperature=1.0)])[0].token_id for seed in range(50)]
    assert len(set(tokens)) > 45  # two equal ones are expected once in 8 such tests: 50² / 2 / 10,000


@pytest.mark.parametrize(("u", "token"), [(0.0, 3), (1 - 2**-53, 1)])
def test_the_ends_of_the_random_range_give_the_first_and_the_last_kept_token(monkeypatch, u, token):
    # In falling order: 3, 0, 1 are kept, 2 is not.
    monkeypatch.setattr(sampler, "uniform_of", lambda one: u)
    logits = torch.tensor([[1.0, 0.5, 0.0, 2.0]])
    assert sampler.sample(logits, [sequence(temperature=1.0, top_k=3)])[0].token_id == token


def test_drawing_leaves_the_global_random_generators_alone():
    random.seed(5)
    torch.manual_seed(5)
    python, torch_ = random.getstate(), torch.get_rng_state()
    draws(torch.zeros(1, 10), 2000, temperature=1.0)
    assert random.getstate() == python and torch.equal(torch.get_rng_state(), torch_)


# --- seeds in the engine ---

PROMPT = [random.Random(0).randrange(256) for _ in range(64)]
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, seed=42, ignore_eos=True)


def tokens_of(tiny, params=SEEDED, chunk=64, preempt_after=(), caching=False, mates=0, block_size=16):
    """The tokens that the request PROMPT gets, in the given circumstances."""
    engine = Engine(
        ModelRunner(tiny),
        EngineConfig(
            block_size=block_size, num_blocks=1024 // block_size, max_num_seqs=16, max_num_batched_tokens=80,
            max_prefill_chunk_size=chunk, enable_prefix_caching=caching,
        ),
    )  # fmt: skip
    for number in range(mates):
        mate = SamplingParams(max_tokens=8 + number, temperature=0.5 + number, ignore_eos=True)
        engine.add_request(PROMPT[: 5 + 7 * number] + [number], mate)
    engine.add_request(PROMPT, params, request_id="it")
    preempt_after = list(preempt_after)
    for _ in range(500):  # 64 prompt tokens and 20 more, three preemptions: at most 250 steps
        for output in engine.step():
            if output.request_id == "it":
                if output.finished:
                    return output.token_ids
                if preempt_after and len(output.token_ids) == preempt_after[0]:
                    engine.preempt("it")
                    preempt_after.pop(0)
    raise AssertionError("no end in sight")


@pytest.fixture(scope="module")
def seeded_tokens(tiny):
    return tokens_of(tiny)


@pytest.mark.parametrize(
    "circumstances",
    [
        {"chunk": 16},
        {"chunk": 7},
        {"chunk": None},
        {"block_size": 1},
        {"block_size": 4, "chunk": 25},
        {"preempt_after": [1]},
        {"preempt_after": [10, 11, 15]},
        {"preempt_after": [10], "chunk": 7},
        {"caching": True},
        {"caching": True, "preempt_after": [3, 19], "chunk": 16},
        {"mates": 3},
        {"mates": 3, "chunk": 7, "caching": True, "preempt_after": [5]},
    ],
    ids=str,
)
def test_a_seeded_request_gives_the_same_tokens_in_any_circumstances(tiny, seeded_tokens, circumstances):
    assert len(seeded_tokens) == 20 and len(set(seeded_tokens)) > 5
    assert tokens_of(tiny, **circumstances) == seeded_tokens


def test_another_seed_gives_other_tokens(tiny, seeded_tokens):
    other = SamplingParams(max_tokens=20, temperature=1.0, seed=43, ignore_eos=True)
    assert tokens_of(tiny, other) != seeded_tokens


def test_requests_without_a_seed_differ(tiny):
    free = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    assert tokens_of(tiny, free) != tokens_of(tiny, free)


def test_one_prompt_with_different_seeds_gives_different_texts_in_one_batch(tiny):
    params = [SamplingParams(max_tokens=10, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    engine = Engine(ModelRunner(tiny), EngineConfig(num_blocks=32, max_num_seqs=4, max_num_batched_tokens=64))
    first, second, third = engine.generate([PROMPT[:10]] * 3, params)
    assert first.token_ids == third.token_ids != second.token_ids


# --- log-probabilities ---


def test_logprobs_are_those_of_the_model_itself():
    logits = random_logits(3)
    wanted = logits.double().log_softmax(dim=-1)
    sequences = [
        sequence([5, 6], logprobs=4),
        sequence([5, 6], logprobs=4, temperature=0.3, top_k=2, top_p=0.5, repetition_penalty=3.0),
        sequence([5, 6], logprobs=VOCAB + 100, temperature=1.0),
    ]
    samples = sampler.sample(logits, sequences)
    for row, one in enumerate(samples):
        assert one.token_id in one.logprobs
        for token, value in one.logprobs.items():
            assert value == pytest.approx(wanted[row, token].item(), abs=1e-5)
        assert set(wanted[row].topk(min(4, VOCAB)).indices.tolist()) <= set(one.logprobs)
    assert len(samples[0].logprobs) == 4  # greedy: the chosen token is the likeliest
    assert len(samples[2].logprobs) == VOCAB
    assert sum(math.exp(v) for v in samples[2].logprobs.values()) == pytest.approx(1, abs=1e-4)


def test_logprobs_holds_the_chosen_token_also_when_it_is_not_among_the_likeliest():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for seed in range(50):
        one = sampler.sample(logits, [sequence(seed=seed, logprobs=1, temperature=5.0)])[0]
        assert set(one.logprobs) == {one.token_id, 3}


def test_logprobs_zero_reports_the_chosen_token_alone_and_none_reports_nothing():
    logits = random_logits(2)
    with_own, without = sampler.sample(logits, [sequence(logprobs=0), sequence()])
    assert list(with_own.logprobs) == [with_own.token_id]
    assert without.logprobs is None


def test_logprobs_of_a_request_agree_with_the_models_own_forward(tiny):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, logprobs=2, ignore_eos=True, repetition_penalty=1.2)
    config = EngineConfig(num_blocks=32, max_num_seqs=4, max_num_batched_tokens=64, max_prefill_chunk_size=7)
    engine = Engine(ModelRunner(tiny), config)
    output = engine.generate([PROMPT[:20]], params)[0]
    logits = tiny.model(torch.tensor([PROMPT[:20] + output.token_ids])).logits[0, 19:-1]
    wanted = logits.log_softmax(dim=-1)
    assert len(output.logprobs) == len(output.token_ids) == 6
    for place, (token, logprobs) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert token in logprobs and 2 <= len(logprobs) <= 3
        for id_, value in logprobs.items():
            assert value == pytest.approx(wanted[place, id_].item(), abs=1e-4)
