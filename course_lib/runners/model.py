"""ModelRunner: a real language model behind the Runner protocol.

The model is transformers' own (or a copy of it with the weights laid out for speed); its attention is
ours. The batch goes in as one flat row of tokens with their positions, whatever mix of chunks and
decodes it holds.
"""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch

from ..batch import Batch, Sample, build_batch
from ..config import EngineConfig, SamplingParams
from ..model import LoadedModel, load_model
from ..model.attention import BACKENDS, IMPLEMENTATION, PagedContext, choose_backend, register
from ..model.decode_graphs import DecodeGraphs, capture_on
from ..model.kv_cache import MAX_CPU_POOL, MEMORY_FRACTION, KVCache, blocks_that_fit, free_memory
from ..model.packed import can_pack, packed_copy
from ..model.sampler import sample
from ..scheduler import ScheduledChunk, SchedulerOutput
from ..sequence import Sequence
from ..slots import blocks_needed


class ModelRunner:
    """Runs a transformers causal LM over a paged KV cache.

    model      a LoadedModel, or a name for `load_model`
    attention  "auto" or a name in BACKENDS
    forward    "packed" (see model/packed.py), "transformers" (the model's own), or "auto": packed
               where the model is of a kind that it knows
    cuda_graphs  steps of decodes alone are recorded and replayed (see model/decode_graphs.py): True, False, or
               "auto": on a GPU, with triton_paged and the packed forward
    """

    def __init__(
        self, model: LoadedModel | str, attention: str = "auto", forward: str = "auto", cuda_graphs: bool | str = "auto"
    ) -> None:
        loaded = load_model(model) if isinstance(model, str) else model
        if not isinstance(loaded, LoadedModel):
            raise TypeError(f"model must be a name or what load_model() returns, got {type(model).__name__}")
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        config = self.model.config
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = getattr(config, "num_key_value_heads", None) or self._num_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // self._num_heads
        if attention not in ("auto", *BACKENDS):
            raise ValueError(f"attention={attention!r} is unknown: it must be 'auto' or one of {', '.join(BACKENDS)}")
        if forward not in ("auto", "packed", "transformers"):
            raise ValueError(f"forward={forward!r} is unknown: it must be 'auto', 'packed' or 'transformers'")
        shape = self._num_heads, self._num_kv_heads, self._head_dim
        self.attention = choose_backend(attention, *shape, self.model.dtype, self.model.device)
        self.packed = packed_copy(self.model) if forward == "packed" or (forward == "auto" and can_pack(self.model)) else None
        self.capture = capture_on(self.model.device) if self._wants_graphs(cuda_graphs) else None
        self.graphs: DecodeGraphs | None = None
        self.vocab_size = config.vocab_size
        # Within its window, sliding-window attention is plain causal attention.
        window = getattr(config, "sliding_window", None)
        self.max_model_len = min(config.max_position_embeddings, window or config.max_position_embeddings)
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        eos = config.eos_token_id if eos is None else eos
        self.eos_token_ids = eos if isinstance(eos, list) else [eos]
        self.kv_cache: KVCache | None = None
        register()

    def init_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Fresh K/V memory; the engine calls this once. An engine made earlier can't go on with this runner."""
        config = self.model.config
        self.kv_cache = KVCache(
            config.num_hidden_layers, num_blocks, block_size, self._num_kv_heads, self._head_dim,
            self.model.dtype, self.model.device,
        )  # fmt: skip
        if self.capture is not None:
            self.graphs = DecodeGraphs(self._logits, self.kv_cache, self._num_heads, self.max_model_len, self.capture)

    def blocks_that_fit(self, config: EngineConfig, memory_fraction: float = MEMORY_FRACTION) -> int:
        """Blocks of K/V that fit into a part of the memory that is free now: the pool for EngineConfig(num_blocks=None).

        On a GPU the largest step of this configuration is run to see what it takes; on a CPU a pool has at most
        MAX_CPU_POOL bytes. An engine made earlier can't go on with this runner: its memory is given back first.
        """
        device, layers = self.model.device, self.model.config.num_hidden_layers
        size = config.block_size * KVCache.bytes_per_token(layers, self._num_kv_heads, self._head_dim, self.model.dtype)
        self._drop_kv_cache()
        step_bytes = self._bytes_of_largest_step(config) if device.type == "cuda" else 0
        free = free_memory(device)
        if free is None:
            raise ValueError("num_blocks=None: this system doesn't say how much memory is free, so give it a number")
        blocks = blocks_that_fit(size, free, step_bytes, memory_fraction)
        return blocks if device.type == "cuda" else max(1, min(blocks, MAX_CPU_POOL // size))

    def _drop_kv_cache(self) -> None:
        if self.kv_cache is not None:
            self.kv_cache.k = self.kv_cache.v = None  # its engine may still hold the KVCache itself
        self.kv_cache = self.graphs = None

    def _bytes_of_largest_step(self, config: EngineConfig) -> int:
        """What a step takes besides weights and K/V, at most: measured, as vLLM does it. GPU only."""
        device = self.model.device
        batch = largest_batch(config, min(self.max_model_len, config.max_model_len or self.max_model_len))
        self.init_kv_cache(max(map(max, batch.block_tables)) + 1, config.block_size)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with torch.inference_mode():
            sample(self.forward_plainly(batch), batch.sampled)
        peak = torch.cuda.max_memory_allocated(device) - before
        self._drop_kv_cache()
        return peak

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[Sample]:
        """One forward pass over the flat batch; samples the rows of `batch.sample_rows`."""
        logits = self.forward(batch)
        return sample(logits, batch.sampled) if batch.sampled else []

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] of the rows to sample; the K/V of all rows is stored on the way.

        The next call may overwrite them.
        """
        if self.graphs is not None and self.graphs.serves(batch):
            return self.graphs.run(batch)
        return self.forward_plainly(batch)

    def forward_plainly(self, batch: Batch) -> torch.Tensor:
        """The same, without CUDA graphs."""
        paged = PagedContext(batch, self.kv_cache, BACKENDS[self.attention], self._num_heads)
        with torch.cuda.device_of(self.kv_cache.k):  # the GPU on which Triton starts its kernels; no GPU, no effect
            return self._logits(paged.token_ids, paged.positions, paged.sample_rows, paged)

    def _logits(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, paged) -> torch.Tensor:
        """token_ids [T], positions [T], rows [R] -> logits [R, vocab], by the packed copy or by the model's own forward."""
        if self.packed is not None:
            return self.packed(token_ids, positions, rows, paged)
        with self._paged_attention():
            return self.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, paged=paged
            ).logits[0]

    @torch.inference_mode()
    def run_prefill_chunk(self, sequence: Sequence, chunk_token_ids: list[int], start_pos: int) -> torch.Tensor | None:
        """Compute one chunk of one sequence: a batch of one on the way that every batch takes.

        sequence.block_table must cover the chunk (ValueError otherwise). Stores the chunk's K/V; moves no counter.
        Returns the last position's logits [vocab] if the chunk reaches the last known token, else None.
        Raises ValueError for a chunk that isn't the known tokens at start_pos.
        """
        length = len(chunk_token_ids)
        if start_pos < 0 or not length or list(chunk_token_ids) != sequence.token_ids(start_pos, length):
            raise ValueError(
                f"chunk_token_ids ({length} tokens) are not the tokens of {sequence.request_id!r} at "
                f"start_pos={start_pos}: it has {sequence.known_token_count} known tokens"
            )
        if self.kv_cache is None:
            raise RuntimeError("there is no KV cache yet: call init_kv_cache(num_blocks, block_size) first")
        block_size, num_blocks = self.kv_cache.block_size, self.kv_cache.num_blocks
        need, table = blocks_needed(start_pos + length, block_size), sequence.block_table
        if len(table) < need or not all(0 <= block < num_blocks for block in table):
            raise ValueError(
                f"block_table={table} doesn't cover the chunk: {start_pos + length} tokens in blocks of {block_size} "
                f"need {need} blocks, each from 0 to {num_blocks - 1}"
            )
        is_last = start_pos + length == sequence.known_token_count
        chunk = ScheduledChunk(sequence, start_pos, length, "prefill", is_last)
        logits = self.forward_plainly(build_batch(SchedulerOutput(0, block_size, [chunk])))
        return logits[0] if is_last else None

    def now(self) -> float:
        return time.perf_counter()

    def _wants_graphs(self, cuda_graphs: bool | str) -> bool:
        if not isinstance(cuda_graphs, bool) and cuda_graphs != "auto":
            raise ValueError(f"cuda_graphs={cuda_graphs!r} is unknown: it must be 'auto', True or False")
        device = self.model.device
        can = device.type == "cuda" and self.attention == "triton_paged"
        if cuda_graphs is True and not can:
            raise ValueError(
                f"cuda_graphs=True needs a model on a CUDA GPU and attention='triton_paged', "
                f"got a model on {device} and attention={self.attention!r}"
            )
        if cuda_graphs != "auto":
            return cuda_graphs
        # The forward of any other model may need the host; so do two kinds of rotary embedding, which look at the positions.
        return can and self.packed is not None and self.packed.rotary.rope_type not in ("dynamic", "longrope")

    @contextmanager
    def _paged_attention(self):
        """Our attention while the engine's forward runs; the model's own before and after (for generate())."""
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = IMPLEMENTATION
        try:
            yield
        finally:
            config._attn_implementation = before


def largest_batch(config: EngineConfig, max_model_len: int) -> Batch:
    """A step that uses up both budgets: max_num_batched_tokens tokens, of max_num_seqs prompts, each sampled in every way.

    With prompts of at most max_model_len tokens; their blocks are 0, 1, 2, …
    """
    everything = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)
    longest = min(-(-config.max_num_batched_tokens // config.max_num_seqs), max_model_len)
    left, chunks, num_blocks = config.max_num_batched_tokens, [], 0
    for number in range(config.max_num_seqs):
        length = min(longest, left - (config.max_num_seqs - number - 1))  # a token is left for each of the others
        left -= length
        sequence = Sequence(f"{number}", [0] * length, everything)
        need = blocks_needed(length, config.block_size)
        sequence.block_table = list(range(num_blocks, num_blocks + need))
        num_blocks += need
        chunks.append(ScheduledChunk(sequence, 0, length, "prefill", True))
    return build_batch(SchedulerOutput(0, config.block_size, chunks))
