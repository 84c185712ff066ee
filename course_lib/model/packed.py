"""The model's forward pass, its weights laid out for speed.

The same network as the transformers model that it is made from, and the same numbers up to rounding:

- what reads the same input is one matrix: q, k and v together, gate and up together;
- on a CPU, in float32, the products and what lies between them run on the kernels of cpu_kernels.c;
- the last layer's output and the head are computed for the sampled rows alone.

It knows the networks in `MODEL_TYPES`. Any other model runs on transformers' own forward, and that
one stays the reference that the tests compare this one with.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.functional import linear

from . import cpu_kernels

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

_copies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def can_pack(model) -> bool:
    """Is this a network that PackedModel knows?"""
    config = model.config
    return config.model_type in MODEL_TYPES and config.hidden_act == "silu" and type(model).__name__.endswith("ForCausalLM")


def packed_copy(model) -> PackedModel:
    """The packed copy of a model: made once, kept as long as the model. Its weights take as much memory again."""
    if model not in _copies:
        _copies[model] = PackedModel(model)
    return _copies[model]


class PackedModel:
    """A packed copy of a transformers model; norms, embedding and rotary angles are the model's own."""

    def __init__(self, model) -> None:
        if not can_pack(model):
            raise ValueError(f"model_type={model.config.model_type!r} can't be packed: known are {', '.join(MODEL_TYPES)}")
        ops = CPUOps() if model.device.type == "cpu" and model.dtype == torch.float32 and cpu_kernels.load() else TorchOps()
        self.ops = ops
        self.embed, self.norm, self.rotary = model.model.embed_tokens, model.model.norm, model.model.rotary_emb
        self.layers = [PackedLayer(layer, model.config, ops) for layer in model.model.layers]
        self.head = ops.pack(model.lm_head)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, paged) -> torch.Tensor:
        """token_ids [T], positions [T], rows [R] -> logits [R, vocab]; K/V of all T tokens is stored on the way."""
        x = self.embed(token_ids)
        rotation = [angles[0] for angles in self.rotary(x, positions[None])]  # cosine and sine, each [T, head_dim]
        for layer in self.layers[:-1]:
            x = layer(x, rotation, paged)
        x = self.layers[-1](x, rotation, paged, rows)
        return self.ops.matmul(self.ops.rms_norm(x, self.norm), self.head)


class PackedLayer:
    """One decoder layer: attention, then the feed-forward network, each added to what came in."""

    def __init__(self, layer, config, ops) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.ops, self.index, self.scaling, self.head_dim = ops, attention.layer_idx, attention.scaling, attention.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.norm_1, self.norm_2 = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)  # Qwen3
        self.qkv = ops.pack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = ops.pack(attention.o_proj)
        self.gate_up = ops.pack(mlp.gate_proj, mlp.up_proj)
        self.down = ops.pack(mlp.down_proj)

    def __call__(self, x: torch.Tensor, rotation, paged, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], or the given rows of it."""
        ops, heads, kv_heads = self.ops, self.heads, self.kv_heads
        qkv = ops.matmul(ops.rms_norm(x, self.norm_1), self.qkv).view(len(x), heads + 2 * kv_heads, self.head_dim)
        both, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.q_norm is not None:
            both = torch.cat((ops.rms_norm(both[:, :heads], self.q_norm), ops.rms_norm(both[:, heads:], self.k_norm)), dim=1)
        both = ops.rotate(both, *rotation)
        attended = paged.attention(self.index, both[:, :heads], both[:, heads:], value, self.scaling).flatten(1)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        x = ops.matmul(attended, self.out, add=x)
        return ops.matmul(ops.silu_mul(ops.matmul(ops.rms_norm(x, self.norm_2), self.gate_up)), self.down, add=x)


class Packed:
    """One or more nn.Linear that read the same input, as one matrix."""

    def __init__(self, layers: tuple[nn.Linear, ...]) -> None:
        self.weight = torch.cat([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])


class TorchOps:
    """What a layer consists of, in PyTorch: on any device, in any dtype."""

    def pack(self, *layers: nn.Linear) -> Packed:
        return Packed(layers)

    def matmul(self, x: torch.Tensor, packed: Packed, add: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, in] Wᵀ + bias (+ add) -> [rows, out]."""
        y = linear(x, packed.weight, packed.bias)
        return y if add is None else y.add_(add)

    def rms_norm(self, x: torch.Tensor, norm) -> torch.Tensor:
        """x / √(mean of x² + eps) × weight, over the last dimension."""
        return nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) × up of [rows, gate and up side by side]."""
        gate, up = gate_up.chunk(2, dim=1)
        return nn.functional.silu(gate) * up

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of [rows, heads, dim]: pairs (i, i + dim/2) turned by the angles of the row's position."""
        first, second = x.chunk(2, dim=-1)
        return x * cosine[:, None] + torch.cat((-second, first), dim=-1) * sine[:, None]


class CPUOps(TorchOps):
    """The same on the compiled kernels."""

    def __init__(self) -> None:
        self.kernels = cpu_kernels.load()

    def pack(self, *layers: nn.Linear) -> Packed:
        packed = Packed(layers)
        if len(packed.weight) % cpu_kernels.PANEL == 0:
            packed.weight = self.kernels.pack(packed.weight)
        return packed

    def matmul(self, x: torch.Tensor, packed: Packed, add: torch.Tensor | None = None) -> torch.Tensor:
        if packed.weight.dim() == 2:  # the rows didn't make whole panels
            return super().matmul(x, packed, add)
        y = self.kernels.matmul(x.contiguous(), packed.weight, add)
        return y if packed.bias is None else y.add_(packed.bias)

    def rms_norm(self, x: torch.Tensor, norm) -> torch.Tensor:
        return self.kernels.rms_norm(x.contiguous(), norm.weight, norm.variance_epsilon)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.kernels.silu_mul(gate_up)

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        self.kernels.rotate(x, cosine, sine)
        return x
