"""Paged attention: how a flat batch attends to K/V that lies scattered over blocks.

A backend is a function `attend(query, layer, context, scaling)`; BACKENDS has them by name. All
are called through transformers' AttentionInterface, so a model's own forward is used as it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from typing import NamedTuple

import torch

from ...batch import Batch
from ..kv_cache import KVCache
from ..transfer import to_device
from . import cpu_paged
from .plan import Plan, cut, flat
from .reference import attend as reference
from .torch_paged import attend as torch_paged


def attend_with_triton(query: torch.Tensor, layer: int, paged: PagedContext, scaling: float) -> torch.Tensor:
    """query [T, heads, head_dim] -> output [T, heads, head_dim], by our own GPU kernels."""
    return paged.kernels.attend(query, layer, paged, scaling)


def triton_kernels():
    """The module triton_paged. It is imported, and triton with it, when its kernels are used and not before."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "attention='triton_paged' needs the package triton, which isn't installed here (PyTorch's CUDA builds for "
            "Linux bring it along). attention='torch_paged' runs without it"
        )
    return importlib.import_module(".triton_paged", __name__)


BACKENDS = {
    "reference": reference,
    "torch_paged": torch_paged,
    "cpu_paged": cpu_paged.attend,
    "triton_paged": attend_with_triton,
}

IMPLEMENTATION = "course_lib_paged"  # our name in transformers' AttentionInterface


def choose_backend(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    """The backend called `name`; "auto" is the fastest one that can serve such a model here."""
    has_kernel = cpu_paged.is_available(num_heads, num_kv_heads, head_dim, dtype, device)
    if name == "cpu_paged" and not has_kernel:
        raise ValueError(f"attention='cpu_paged' can't be used here: {cpu_paged.NEEDS}")
    if name == "triton_paged":
        triton_kernels()  # raises where triton is missing
    if name != "auto":
        return name
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return "triton_paged"
    return "cpu_paged" if has_kernel else "torch_paged"


class Decodes(NamedTuple):
    """The sequences of a batch that compute one token, as int64 tensors.

    rows          [n]              their rows in the flat batch
    block_tables  [n, max blocks]  filled up with 0
    context_lens  [n]
    """

    num_sequences: int
    rows: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor


class PagedAttention:
    """What the layers of a model call: each stores its K/V of the step, then attends to all cached K/V.

    slot_mapping     [T] int64: slots that the step's K/V is written to
    max_context_len  no sequence has more tokens
    plan             what the Triton kernels have to do; None for other backends
    """

    def __init__(
        self, kv_cache: KVCache, backend, slot_mapping: torch.Tensor, max_context_len: int, plan: Plan | None = None
    ) -> None:
        self.kv_cache, self._backend, self.slot_mapping = kv_cache, backend, slot_mapping
        self.max_context_len, self.plan = max_context_len, plan
        self.kernels = triton_kernels() if backend is attend_with_triton else None

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write this step's key and value [T, kv_heads, head_dim] of one layer into their slots."""
        if self.kernels is not None:
            self.kernels.store_kv(key, value, self.kv_cache.k[layer], self.kv_cache.v[layer], self.slot_mapping)
        else:
            self.kv_cache.store(layer, key, value, self.slot_mapping)

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of query [T, heads, head_dim] over all cached K/V of its sequences; the same shape."""
        return self._backend(query, layer, self, scaling)


class PagedContext(PagedAttention):
    """All that a forward needs to know of a batch of T tokens, S sequences and R rows to sample; made once a step.

    token_ids, positions, slot_mapping  [T] int64, and
    sample_rows      [R] int64: on the device, where the step's numbers arrive in one copy
    query_start_loc  S + 1 row numbers (plain ints)
    context_lens     S lengths (plain ints)

    num_heads: query heads of the model; only the plan of triton_paged depends on it.
    """

    def __init__(self, batch: Batch, kv_cache: KVCache, backend, num_heads: int = 0) -> None:
        self.batch, self._device = batch, kv_cache.k.device
        self.query_start_loc, self.context_lens = batch.query_start_loc, batch.context_lens
        lists = {
            "token_ids": batch.token_ids, "positions": batch.positions, "slot_mapping": batch.slot_mapping,
            "sample_rows": batch.sample_rows, "block_tables": flat(batch.block_tables),
        }  # fmt: skip
        work = None
        if backend is attend_with_triton:
            work = cut(batch, num_heads, kv_cache.k.shape[2], kv_cache.k.dtype, self._device)
            lists["tiles"] = flat(work.tiles)
        numbers = to_device(lists, self._device)
        self.token_ids, self.positions, self.sample_rows = (numbers[n] for n in ("token_ids", "positions", "sample_rows"))
        self._block_tables = numbers["block_tables"]
        plan = None if work is None else work.plan(numbers["tiles"], self._block_tables, batch.block_size)
        super().__init__(kv_cache, backend, numbers["slot_mapping"], max(batch.context_lens), plan)
        self._slots: dict[int, torch.Tensor] = {}
        self._masks: dict[int, torch.Tensor | None] = {}

    @functools.cached_property
    def _table_starts(self) -> list[int]:
        """Where the block table of each sequence begins, and where the last one ends."""
        return list(itertools.accumulate(map(len, self.batch.block_tables), initial=0))

    def block_table(self, s: int) -> torch.Tensor:
        """The blocks of sequence s: [number of blocks], int64."""
        return self._block_tables[self._table_starts[s] : self._table_starts[s + 1]]

    def context_slots(self, s: int) -> torch.Tensor:
        """Where the K/V of sequence s lies, position by position: [context_len]."""
        if s not in self._slots:
            blocks = self.block_table(s)
            offsets = torch.arange(self.batch.block_size, device=self._device)
            self._slots[s] = (blocks[:, None] * self.batch.block_size + offsets).flatten()[: self.context_lens[s]]
        return self._slots[s]

    def mask(self, s: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Added to the scores of sequence s, [num_queries, context_len]: 0 where a query may look, else -inf.

        None for a decode, which may look at everything.
        """
        if s not in self._masks:
            length = self.context_lens[s]
            num_queries = self.query_start_loc[s + 1] - self.query_start_loc[s]
            mask = None
            if num_queries > 1:
                positions = torch.arange(length, device=self._device)
                future = positions[None, :] > positions[length - num_queries :, None]
                mask = torch.zeros(num_queries, length, dtype=dtype, device=self._device).masked_fill(future, float("-inf"))
            self._masks[s] = mask
        return self._masks[s]

    @functools.cached_property
    def chunks(self) -> list[int]:
        """The numbers of the sequences with more than one token in this step."""
        starts = self.query_start_loc
        return [s for s in range(len(starts) - 1) if starts[s + 1] - starts[s] > 1]

    @functools.cached_property
    def decodes(self) -> Decodes:
        """The sequences with one token in this step, the longest first, so that threads end together."""
        lens, starts = self.context_lens, self.query_start_loc
        ones = sorted(set(range(len(lens))) - set(self.chunks), key=lambda s: -lens[s])
        width = max((len(self.batch.block_tables[s]) for s in ones), default=0)
        tables = [self.batch.block_tables[s] + [0] * (width - len(self.batch.block_tables[s])) for s in ones]
        lists = {"rows": [starts[s] for s in ones], "tables": flat(tables), "context_lens": [lens[s] for s in ones]}
        numbers = to_device(lists, self._device)
        return Decodes(len(ones), numbers["rows"], numbers["tables"].view(len(ones), width), numbers["context_lens"])


def paged_attention_forward(module, query, key, value, attention_mask, scaling=None, paged=None, **kwargs):
    """What transformers calls in every layer: store this step's K/V, then attend to all cached K/V.

    query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] of the flat row;
    returns ([1, T, heads, head_dim], None). `paged` is the PagedAttention given to the model's forward.
    """
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise NotImplementedError(f"this model's attention uses {unsupported}, which the paged backends don't know")
    window = kwargs.get("sliding_window")
    if window is not None and paged.max_context_len > window:  # a shorter context lies within it
        raise NotImplementedError(
            f"this model's attention has a sliding window of {window} tokens, which the paged backends don't know: "
            f"a context of {paged.max_context_len} tokens is too long for them"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    paged.store(module.layer_idx, key, value)
    return paged.attend(module.layer_idx, query, scaling)[None], None


def register() -> None:
    """Make `paged_attention_forward` known to transformers, without a mask function.

    For an attention without one, transformers makes no mask. A function that returns None would not do: before it calls
    one, transformers looks into the positions, and on a GPU the host waits for that.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
