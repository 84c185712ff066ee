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
from .transfer import pinned, to_device


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sample]:
    """Choose a token for each row of `logits` [R, vocab], whose requests are `sequences` (R of them).

    Log-probabilities are those of the model itself, before penalties and temperature.
    A row that holds NaN, or no finite number at all, gives a Sample with an error.
    On a GPU the host waits once: when it reads what came out.
    """
    raw, device = logits.float(), logits.device
    scores = penalise_repetition(raw, sequences)
    best, tokens = scores.max(dim=-1, keepdim=True)  # NaN where a row holds one
    drawing = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
    if drawing:
        rows = to_device({"rows": drawing}, device)["rows"]
        tokens = tokens.index_copy(0, rows, draw(scores[rows], [sequences[row] for row in drawing])[:, None])
    results = [best, tokens.float()]  # [R, 1] each; a token id is below 2**24: float32 holds it exactly
    asking = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    if asking:
        most = min(max(sequences[row].params.logprobs for row in asking), raw.shape[-1])
        results.append(logprobs_of(raw, tokens, most))
    samples = []
    for sequence, (best, token, *logprobs) in zip(sequences, torch.cat(results, dim=1).tolist(), strict=True):
        if error := _unusable(best):
            samples.append(Sample(-1, error=error))
        else:
            samples.append(Sample(int(token), _as_dict(int(token), logprobs, sequence.params.logprobs)))
    return samples


def _unusable(best: float) -> str | None:
    """Why nothing can be sampled from a row of logits with this maximum."""
    if math.isnan(best):
        return "the model's logits hold NaN"
    return None if math.isfinite(best) else f"the largest of the model's logits is {best}"


def _columns(device: torch.device, *lists: list[float]) -> torch.Tensor:
    """Lists of equal length n as the columns [n, 1] of one copy to the device: [len(lists), n, 1], float64."""
    return pinned(torch.tensor(lists, dtype=torch.float64)[..., None], device).to(device, non_blocking=True)


def penalise_repetition(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Scores of tokens in the prompt or output: divided by the penalty if positive, else multiplied (CTRL, 2019)."""
    penalties = [sequence.params.repetition_penalty for sequence in sequences]
    seen = [
        (row, token)
        for row, sequence in enumerate(sequences)
        if penalties[row] != 1
        for token in {*sequence.prompt_token_ids, *sequence.generated_token_ids}
    ]
    if not seen:
        return logits
    rows, tokens = to_device({"rows": [row for row, _ in seen], "tokens": [token for _, token in seen]}, logits.device).values()
    score, penalty = logits[rows, tokens].double(), _columns(logits.device, penalties)[0, rows, 0]
    limit = torch.finfo(logits.dtype).max  # a finite score stays finite; -inf (a token not allowed) stays -inf
    punished = torch.where(score > 0, score / penalty, score * penalty).clamp(-limit, limit)
    changed = torch.where(score.isinf(), score, punished).to(logits.dtype)
    return logits.index_put((rows, tokens), changed)


def draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """One random token per row [R, vocab] -> [R], after temperature, top-k, top-p and min-p.

    A row that can't be sampled (see _unusable) gives any token: the host hears of it only later.
    """
    probabilities, order = filtered_probabilities(logits, sequences)
    mass = probabilities.double().cumsum(dim=-1)
    (uniform,) = _columns(logits.device, [uniform_of(s) for s in sequences])
    # The first place where the cumulative mass exceeds u × total; the total makes up for rounding.
    place = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(place, last).clamp(min=0)).squeeze(-1)


def filtered_probabilities(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [R, vocab] in falling order, zero where filtered out, and the token ids in that order."""

    params = [sequence.params for sequence in sequences]
    vocab_size = logits.shape[-1]
    temperature, top_k, top_p, min_p = _columns(
        logits.device,
        # Measured from the best score, and within what float32 holds, no temperature makes infinities or NaN.
        [min(max(p.temperature, 1e-30), 1e30) for p in params],
        [min(p.top_k or vocab_size, vocab_size) for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    )
    scores = (logits - logits.max(dim=-1, keepdim=True).values) / temperature.float()
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=logits.device)[None, :]
    scores = scores.masked_fill(rank >= top_k, float("-inf"))
    probabilities = scores.softmax(dim=-1)
    # The token that crosses p is kept: drop those before which the mass has already reached it.
    before = probabilities.double().cumsum(dim=-1) - probabilities.double()
    keep = (before < top_p) | (top_p >= 1) | (rank == 0)
    probabilities = probabilities.masked_fill(~keep, 0.0)
    floor = min_p.float() * probabilities[:, :1]
    return probabilities.masked_fill(probabilities < floor, 0.0), order


def uniform_of(sequence: Sequence) -> float:
    """The random number in [0, 1) for the next token: a function of seed and number of generated tokens."""
    return random.Random(f"{sequence.seed}/{len(sequence.generated_token_ids)}").random()


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Log-probabilities of the chosen token and of the `most` likeliest ones, and the ids of those: [R, 1 + 2 × most].

    tokens: the chosen ones, [R, 1].
    """
    values = logits.log_softmax(dim=-1)
    top = values.topk(most)
    return torch.cat((values.gather(-1, tokens), top.values, top.indices.float()), dim=1)


def _as_dict(token: int, row: list[float], count: int | None) -> dict[int, float] | None:
    """{token id: log-probability} of the chosen token and the `count` likeliest ones, out of a row of logprobs_of."""
    if count is None:
        return None
    own, *rest = row
    values, ids = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    return {token: own} | dict(zip(map(int, ids[:count]), values, strict=False))
