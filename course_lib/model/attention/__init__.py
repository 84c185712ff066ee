"""Paged attention: how a flat batch attends to K/V that lies scattered over blocks.

A backend is a function `attend(query, layer, context, scaling)`; BACKENDS has them by name. All
are called through transformers' AttentionInterface, so a model's own forward is used as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cached_property

import torch

from ...batch import Batch
from ..kv_cache import KVCache
from .reference import attend as reference
from .torch_paged import attend as torch_paged


def attend_with_triton(query: torch.Tensor, layer: int, paged: PagedContext, scaling: float) -> torch.Tensor:
    """query [T, heads, head_dim] -> output [T, heads, head_dim], by our own GPU kernels."""
    return triton_kernels().attend(query, layer, paged, scaling)


def triton_kernels():
    """The module triton_paged. It is imported, and triton with it, when its kernels are used and not before."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "attention='triton_paged' needs the package triton, which isn't installed here (PyTorch's CUDA builds for "
            "Linux bring it along). attention='torch_paged' runs without it"
        )
    return importlib.import_module(".triton_paged", __name__)


BACKENDS = {"reference": reference, "torch_paged": torch_paged, "triton_paged": attend_with_triton}

IMPLEMENTATION = "course_lib_paged"  # our name in transformers' AttentionInterface


def default_backend(device: torch.device | str) -> str:
    """The backend that "auto" means on this device."""
    has_triton = importlib.util.find_spec("triton") is not None
    return "triton_paged" if torch.device(device).type == "cuda" and has_triton else "torch_paged"


class PagedContext:
    """What attention needs to know of a batch of T tokens and S sequences, as tensors; made once a step.

    slot_mapping     [T]  slots that the step's K/V is written to
    query_start_loc  S + 1 row numbers (plain ints)
    context_lens     S lengths (plain ints)
    context_slots    S tensors [context_len]: where each sequence's K/V lies, position by position
    plans            what triton_paged.py keeps from the first layer to the last
    """

    def __init__(self, batch: Batch, kv_cache: KVCache, attend) -> None:
        device = kv_cache.k.device
        self.batch = batch
        self.kv_cache = kv_cache
        self.attend = attend
        self.query_start_loc = batch.query_start_loc
        self.context_lens = batch.context_lens
        self.slot_mapping = torch.tensor(batch.slot_mapping, dtype=torch.int64, device=device)
        self.plans: dict = {}
        self._masks: dict[int, torch.Tensor | None] = {}

    @cached_property
    def context_slots(self) -> list[torch.Tensor]:
        device, block_size = self.slot_mapping.device, self.batch.block_size
        offsets = torch.arange(block_size, device=device)
        slots = []
        for table, length in zip(self.batch.block_tables, self.context_lens, strict=True):
            blocks = torch.tensor(table, dtype=torch.int64, device=device)
            slots.append((blocks[:, None] * block_size + offsets).flatten()[:length])
        return slots

    def mask(self, s: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Added to the scores of sequence s, [num_queries, context_len]: 0 where a query may look, else -inf.

        None for a decode, which may look at everything. Made once a step, for all layers.
        """
        if s not in self._masks:
            length = self.context_lens[s]
            num_queries = self.query_start_loc[s + 1] - self.query_start_loc[s]
            mask = None
            if num_queries > 1:
                positions = torch.arange(length, device=self.slot_mapping.device)
                future = positions[None, :] > positions[length - num_queries :, None]
                mask = torch.zeros(num_queries, length, dtype=dtype, device=future.device).masked_fill(future, float("-inf"))
            self._masks[s] = mask
        return self._masks[s]


def paged_attention_forward(module, query, key, value, attention_mask, scaling=None, paged=None, **kwargs):
    """What transformers calls in every layer: store this step's K/V, then attend to all cached K/V.

    query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] of the flat row;
    returns ([1, T, heads, head_dim], None). `paged` is the PagedContext given to the model's forward.
    """
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise NotImplementedError(f"this model's attention uses {unsupported}, which the paged backends don't know")
    window = kwargs.get("sliding_window")
    if window is not None and max(paged.context_lens) > window:  # a shorter context lies within it
        raise NotImplementedError(
            f"this model's attention has a sliding window of {window} tokens, which the paged backends don't know: "
            f"a context of {max(paged.context_lens)} tokens is too long for them"
        )
    layer = module.layer_idx
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.cuda.device_of(query):  # the GPU on which Triton starts its kernels
        if paged.attend is attend_with_triton:
            caches = paged.kv_cache.k[layer], paged.kv_cache.v[layer]
            triton_kernels().store_kv(key, value, *caches, paged.slot_mapping)
        else:
            paged.kv_cache.store(layer, key, value, paged.slot_mapping)
        return paged.attend(query, layer, paged, scaling)[None], None


def register() -> None:
    """Make `paged_attention_forward` known to transformers, with a mask function that makes none."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)
