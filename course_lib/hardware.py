"""Chips and models in numbers: what the simulator needs to know of each, with where the number is from.

A chip is two rates and a memory; a model is the shape in its config.json, from which parameters,
FLOPs and the size of its K/V follow.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from functools import cached_property

from .validation import check_int, check_number

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Chip:
    """What runs the model. Rates are the vendor's peaks; the efficiencies say what a real step reaches.

    peak_flops        dense matrix FLOP/s in the type that the model runs in (never the number with sparsity)
    peak_bandwidth    bytes/s between memory and chip
    memory_bytes      of all of it; `usable_memory` is the part for weights and K/V
    bytes_per_value   2: bfloat16, 4: float32
    fixed_seconds     per step, whatever it computes: launching kernels, scheduling, sampling
    overlap           True: reading memory and computing go on at the same time, so a step takes the longer
                      of both (the roofline of Williams, Waterman and Patterson, 2009); False: their sum
    count             chips that share the model by tensor parallelism; see `parallel`
    """

    name: str
    peak_flops: float
    peak_bandwidth: float
    memory_bytes: float
    compute_efficiency: float
    bandwidth_efficiency: float
    fixed_seconds: float
    bytes_per_value: int = 2
    usable_memory: float = 0.9
    overlap: bool = True
    count: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("peak_flops", "peak_bandwidth", "memory_bytes"):
            check_number(field, getattr(self, field), "above 0", lambda x: x > 0)
        for field in ("compute_efficiency", "bandwidth_efficiency", "usable_memory"):
            check_number(field, getattr(self, field), "above 0 and at most 1", lambda x: 0 < x <= 1)
        check_number("fixed_seconds", self.fixed_seconds, "at least 0", lambda x: x >= 0)
        check_int("bytes_per_value", self.bytes_per_value, 1)
        check_int("count", self.count, 1)

    @cached_property
    def flops(self) -> float:
        """FLOP/s that a step reaches."""
        return self.peak_flops * self.compute_efficiency

    @cached_property
    def bandwidth(self) -> float:
        """Bytes/s that a step reaches."""
        return self.peak_bandwidth * self.bandwidth_efficiency


def parallel(chip: Chip, count: int) -> Chip:
    """`count` chips that share each layer (tensor parallelism): rates and memory add up.

    Assumed: what the chips tell one another costs nothing. Over NVLink that is a few per cent: for Yi-34B on
    two A100, two all-reduces a layer move 120 × 29 MB in a chunk of 2,048 tokens, 12 ms at 300 GB/s each way,
    against some 340 ms of computing.
    """
    check_int("count", count, 1)
    return replace(
        chip, name=f"{count}x-{chip.name}", count=chip.count * count, peak_flops=chip.peak_flops * count,
        peak_bandwidth=chip.peak_bandwidth * count, memory_bytes=chip.memory_bytes * count,
    )  # fmt: skip


# Efficiencies are assumptions, the same for every GPU. Compute: 0.65 of the peak, below the best that a lone
# matrix product was measured at (0.87 on A100 SXM, 0.80 on H100 SXM: S. Bekman, Machine Learning Engineering,
# "Maximum Achievable Matmul FLOPS"), since a step also normalises, rotates and activates. Bandwidth: 0.8, and 1 ms a
# step: gpt-fast's README has 104.9 tokens/s for Llama-2-7B on an A100 80 GB, this gives 110.
GPU = {"compute_efficiency": 0.65, "bandwidth_efficiency": 0.8, "fixed_seconds": 0.001}

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("h100", 989.4 * TERA, 3350 * GIGA, 80 * GIGA, **GPU,
             source="NVIDIA H100 data sheet, SXM: BF16 1,979 TFLOPS with sparsity, half of it without; 3.35 TB/s; 80 GB"),
        Chip("h200", 989.4 * TERA, 4800 * GIGA, 141 * GIGA, **GPU,
             source="NVIDIA H200 data sheet, SXM: BF16 1,979 TFLOPS with sparsity, half of it without; 4.8 TB/s; 141 GB"),
        Chip("a100", 312 * TERA, 2039 * GIGA, 80 * GIGA, **GPU,
             source="NVIDIA A100 data sheet, 80GB SXM: BF16 312 TFLOPS (624 with sparsity); 2,039 GB/s; 80 GB"),
        Chip("rtx4090", 165.2 * TERA, 1008 * GIGA, 24 * GIGA, **GPU,
             source="NVIDIA Ada GPU architecture whitepaper: RTX 4090, BF16 with FP32 accumulate 165.2 TFLOPS "
                    "(330.4 with sparsity); 1,008 GB/s; 24 GB"),
        Chip("laptop", 512 * GIGA, 51.2 * GIGA, 16 * GIGA, compute_efficiency=0.6, bandwidth_efficiency=0.6,
             fixed_seconds=0.005, bytes_per_value=4, usable_memory=0.5, overlap=False,
             source="an assumed laptop, no product: 4 cores × 4 GHz × 32 float32 FLOPs a cycle (two 8-wide FMA units), "
                    "DDR4-3200 on two channels (51.2 GB/s), 16 GB; `calibrate` measures yours"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer of the Llama family: the numbers in its config.json, and what follows from them.

    tied: the head is the embedding table. qk_norm: queries and keys have a norm of their own (Qwen3).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    max_model_len: int
    tied: bool = False
    qk_norm: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size"):
            check_int(field, getattr(self, field), 1)
        check_int("max_model_len", self.max_model_len, 2)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")

    @cached_property
    def linear_parameters(self) -> int:
        """Weights that every token is multiplied with: projections and MLP of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)  # q and o, k and v
        return self.layers * (attention + 3 * self.hidden * self.intermediate)  # gate, up, down

    @cached_property
    def head_parameters(self) -> int:
        """Weights of the head (and of the embedding table): vocabulary × hidden."""
        return self.vocab_size * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All weights, as the model's card counts them: a tied table once, norms included."""
        norms = self.hidden * (2 * self.layers + 1) + self.qk_norm * 2 * self.layers * self.head_dim
        return self.linear_parameters + self.head_parameters * (1 if self.tied else 2) + norms

    @cached_property
    def attention_flops_per_pair(self) -> int:
        """FLOPs per (query, key) pair: a product and a sum per element for Q·K and again for P·V."""
        return 4 * self.heads * self.head_dim * self.layers

    @cached_property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache keeps of a token: a key and a value per layer and K/V head."""
        return 2 * self.kv_heads * self.head_dim * self.layers


MODELS = {
    model.name: model
    for model in (
        ModelShape("smollm2-135m", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536,
                   vocab_size=49152, max_model_len=8192, tied=True,
                   source="HuggingFaceTB/SmolLM2-135M-Instruct, config.json"),
        ModelShape("qwen3-0.6b", layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072,
                   vocab_size=151936, max_model_len=40960, tied=True, qk_norm=True,
                   source="Qwen/Qwen3-0.6B, config.json"),
        ModelShape("llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336,
                   vocab_size=128256, max_model_len=131072,
                   source="meta-llama/Llama-3.1-8B, config.json (Llama 3 has the same shape and 8,192 positions)"),
        ModelShape("mistral-7b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336,
                   vocab_size=32000, max_model_len=32768,
                   source="mistralai/Mistral-7B-Instruct-v0.2, config.json (no sliding window, unlike v0.1)"),
        ModelShape("yi-34b", layers=60, hidden=7168, heads=56, kv_heads=8, head_dim=128, intermediate=20480,
                   vocab_size=64000, max_model_len=200000,
                   source="01-ai/Yi-34B-200K, config.json (Yi-34B has the same shape and 4,096 positions)"),
    )
}  # fmt: skip


def _find(kind: str, table: dict, name):
    if not isinstance(name, str):
        return name
    if name not in table:
        close = difflib.get_close_matches(name, table, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"{kind}={name!r} is unknown{hint}: it must be one of {', '.join(table)}")
    return table[name]


def find_model(model: ModelShape | str) -> ModelShape:
    """A preset by its name; a ModelShape passes through."""
    found = _find("model", MODELS, model)
    if not isinstance(found, ModelShape):
        raise TypeError(f"model must be a name or a ModelShape, got {model!r}")
    return found


def find_chip(chip: Chip | str) -> Chip:
    """A preset by its name, or several of them: "2x-a100". A Chip passes through."""
    count, times, name = chip.partition("x-") if isinstance(chip, str) else ("", "", "")
    if times and count.isdecimal():
        return parallel(_find("chip", CHIPS, name), int(count))
    found = _find("chip", CHIPS, chip)
    if not isinstance(found, Chip):
        raise TypeError(f"chip must be a name or a Chip, got {chip!r}")
    return found


def num_blocks_for(model: ModelShape | str, chip: Chip | str, block_size: int = 16) -> int:
    """KV blocks that fit beside the weights: (usable memory - weights) / bytes of a block.

    Usable is 0.9 of a GPU's memory, as vLLM's `gpu_memory_utilization`; activations are not counted.
    Raises ValueError when the weights alone don't fit.
    """
    model, chip = find_model(model), find_chip(chip)
    check_int("block_size", block_size, 1)
    usable = chip.memory_bytes * chip.usable_memory
    weights = model.parameters * chip.bytes_per_value
    blocks = int((usable - weights) // (block_size * model.kv_values_per_token * chip.bytes_per_value))
    if blocks < 1:
        raise ValueError(
            f"model={model.name!r} doesn't fit on chip={chip.name!r}: its weights take {weights / GIGA:.1f} GB, "
            f"and {usable / GIGA:.1f} of {chip.memory_bytes / GIGA:.0f} GB are for weights and K/V"
        )
    return blocks
