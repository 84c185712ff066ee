"""A language model without an engine: tokens in, the most likely next token out.

What there is before lesson 02: one request, and a KV cache in one piece that grows at its end.
"""

from __future__ import annotations

import inspect

import torch

from .loading import LoadedModel


class PlainModel:
    """Asks a transformers model for one next token at a time, and notes what it was asked.

    calls: (start_pos, num_tokens) of every call, in order
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.calls: list[tuple[int, int]] = []
        known = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"  # its name before transformers 5.24

    def new_cache(self):
        """An empty KV cache. It grows with every call that gets it."""
        from transformers import DynamicCache

        return DynamicCache()

    @torch.inference_mode()
    def logits(self, token_ids: list[int], start_pos: int, cache=None) -> torch.Tensor:
        """Scores [vocab] for the token that follows the last of `token_ids`.

        The first of `token_ids` stands at position start_pos of the text. Tokens before it are known to the
        model through `cache`, which also keeps the keys and values of these. None: no tokens before, nothing kept.
        """
        if not token_ids:
            raise ValueError("token_ids is empty: the model needs at least 1 token to say what follows it")
        self.calls.append((start_pos, len(token_ids)))
        positions = torch.arange(start_pos, start_pos + len(token_ids), device=self.model.device)
        return self.model(
            input_ids=torch.tensor([token_ids], device=self.model.device),
            position_ids=positions[None],
            use_cache=cache is not None,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        ).logits[0, -1]

    def __call__(self, token_ids: list[int], start_pos: int, cache=None) -> int:
        """The id of the most likely next token; arguments as of `logits`."""
        return int(self.logits(token_ids, start_pos, cache).argmax())
