"""From logits to one token per request, each request with its own parameters.

Order of the steps, as in transformers' generate(): repetition penalty, temperature, top-k, top-p,
min-p, draw. A draw depends only on the request's seed and on how many tokens it has generated, so
chunk size, batch mates and preemption don't change it.
"""

from __future__ import annotations

import math
import random

import torch

from ..batch import Sample
from ..sequence import Sequence


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sample]:
    """Choose a token for each row of `logits` [R, vocab], whose requests are `sequences` (R of them).

    Log-probabilities are those of the model itself, before penalties and temperature.
    A row that holds NaN, or no finite number at all, gives a Sample with an error.
    """
    raw = logits.float()
    scores = penalise_repetition(raw, sequences)
    best, tokens = scores.max(dim=-1)  # NaN where a row holds one
    errors = [_unusable(value) for value in best.tolist()]
    drawing = [row for row, s in enumerate(sequences) if s.params.temperature > 0 and errors[row] is None]
    if drawing:
        tokens[drawing] = draw(scores[drawing], [sequences[row] for row in drawing])
    return [
        Sample(token, logprobs_of(raw[row], token, sequence)) if errors[row] is None else Sample(-1, error=errors[row])
        for row, (token, sequence) in enumerate(zip(tokens.tolist(), sequences, strict=True))
    ]


def _unusable(best: float) -> str | None:
    """Why nothing can be sampled from a row of logits with this maximum."""
    if math.isnan(best):
        return "the model's logits hold NaN"
    return None if math.isfinite(best) else f"the largest of the model's logits is {best}"


def penalise_repetition(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Scores of tokens in the prompt or output: divided by the penalty if positive, else multiplied (CTRL, 2019)."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.params.repetition_penalty != 1]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        sequence = sequences[row]
        seen = torch.tensor(
            sorted({*sequence.prompt_token_ids, *sequence.generated_token_ids}), device=logits.device, dtype=torch.int64
        )
        score, penalty = logits[row, seen].double(), sequence.params.repetition_penalty
        limit = torch.finfo(logits.dtype).max  # a finite score stays finite; -inf (a token not allowed) stays -inf
        punished = torch.where(score > 0, score / penalty, score * penalty).clamp(-limit, limit)
        logits[row, seen] = torch.where(score.isinf(), score, punished).to(logits.dtype)
    return logits


def draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """One random token per row [R, vocab] -> [R], after temperature, top-k, top-p and min-p."""
    probabilities, order = filtered_probabilities(logits, sequences)
    mass = probabilities.double().cumsum(dim=-1)
    uniform = torch.tensor([uniform_of(s) for s in sequences], dtype=torch.float64, device=logits.device)
    # The first place where the cumulative mass exceeds u × total; the total makes up for rounding.
    place = torch.searchsorted(mass, (uniform * mass[:, -1])[:, None], right=True)
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(place, last)).squeeze(-1)


def filtered_probabilities(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [R, vocab] in falling order, zero where filtered out, and the token ids in that order."""

    def column(values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    params = [sequence.params for sequence in sequences]
    vocab_size = logits.shape[-1]
    # Measured from the best score, and within what float32 holds, no temperature makes infinities or NaN.
    temperature = column([min(max(p.temperature, 1e-30), 1e30) for p in params])
    scores = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=logits.device)[None, :]
    scores = scores.masked_fill(rank >= column(top_k, torch.int64), float("-inf"))
    probabilities = scores.softmax(dim=-1)
    # The token that crosses p is kept: drop those before which the mass has already reached it.
    before = probabilities.double().cumsum(dim=-1) - probabilities.double()
    top_p = column([p.top_p for p in params], torch.float64)
    keep = (before < top_p) | (top_p >= 1) | (rank == 0)
    probabilities = probabilities.masked_fill(~keep, 0.0)
    floor = column([p.min_p for p in params]) * probabilities[:, :1]
    return probabilities.masked_fill(probabilities < floor, 0.0), order


def uniform_of(sequence: Sequence) -> float:
    """The random number in [0, 1) for the next token: a function of seed and number of generated tokens."""
    return random.Random(f"{sequence.seed}/{len(sequence.generated_token_ids)}").random()


def logprobs_of(logits: torch.Tensor, token: int, sequence: Sequence) -> dict[int, float] | None:
    """{token id: log-probability} of the chosen token and the likeliest `params.logprobs` ones."""
    count = sequence.params.logprobs
    if count is None:
        return None
    values = logits.log_softmax(dim=-1)
    top = values.topk(min(count, values.shape[-1]))
    return {token: values[token].item()} | dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
