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
        self.embed, self.norm, self.rotary = model.model.embed_tokens, model.model.norm, model.model.rotary_emb
        self.has_kernels = CPULayer.fits(model)
        make_layer, make_linear = (CPULayer, CPULinear) if self.has_kernels else (PackedLayer, PackedLinear)
        self.layers = [make_layer(layer, model.config) for layer in model.model.layers]
        self.head = make_linear(model.lm_head)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, paged) -> torch.Tensor:
        """token_ids [T], positions [T], rows [R] -> logits [R, vocab]; K/V of all T tokens is stored on the way."""
        x = self.embed(token_ids)
        rotation = [angles[0] for angles in self.rotary(x, positions[None])]  # cosine and sine, each [T, head_dim]
        for layer in self.layers[:-1]:
            x = layer(x, rotation, paged)
        x = self.layers[-1](x, rotation, paged, rows)
        return self.head(rms_norm(x, self.norm))


class PackedLinear:
    """One or more nn.Linear that read the same input, as one matrix."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.weight = torch.cat([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> x Wᵀ + bias [rows, out]."""
        return linear(x, self.weight, self.bias)


class PackedLayer:
    """One decoder layer in PyTorch: attention, then the feed-forward network, each added to what came in."""

    def __init__(self, layer, config) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.scaling, self.head_dim = attention.layer_idx, attention.scaling, attention.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.norm_1, self.norm_2 = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)  # Qwen3
        self.qkv = self.pack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = self.pack(attention.o_proj)
        self.gate_up = self.pack(mlp.gate_proj, mlp.up_proj)
        self.down = self.pack(mlp.down_proj)

    pack = PackedLinear

    def __call__(self, x: torch.Tensor, rotation, paged, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], or the given rows of it. rotation: cosine and sine, each [T, head_dim]."""
        query = self.before_attention(x, rotation, paged)
        attended = paged.attend(self.index, query, self.scaling).flatten(1)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        return self.after_attention(x, attended)

    def before_attention(self, x: torch.Tensor, rotation, paged) -> torch.Tensor:
        """Stores the step's K/V, returns its queries [T, heads, head_dim]."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(rms_norm(x, self.norm_1)).view(len(x), heads + 2 * kv_heads, self.head_dim)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm is not None:
            query, key = rms_norm(query, self.q_norm), rms_norm(key, self.k_norm)
        paged.store(self.index, rotate(key, *rotation), value)
        return rotate(query, *rotation)

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = self.out(attended) + x
        gate, up = self.gate_up(rms_norm(x, self.norm_2)).chunk(2, dim=1)
        return self.down(nn.functional.silu(gate) * up) + x


def rms_norm(x: torch.Tensor, norm) -> torch.Tensor:
    """x / √(mean of x² + eps) × weight, over the last dimension."""
    return nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [rows, heads, dim]: pairs (i, i + dim/2) turned by the angles of the row's position."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine[:, None] + torch.cat((-second, first), dim=-1) * sine[:, None]


# --- the same on the compiled kernels ---


class CPULinear(PackedLinear):
    """A matrix in the panels that the kernels read."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__(*layers)
        self.weight = cpu_kernels.load().pack(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = cpu_kernels.load().matmul(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)


class CPULayer(PackedLayer):
    """The same layer in two calls of the kernels, with the attention between them."""

    pack = CPULinear

    def __init__(self, layer, config) -> None:
        super().__init__(layer, config)
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm, "norm_1": self.norm_1, "norm_2": self.norm_2}
        weights = {name: norm.weight for name, norm in norms.items() if norm is not None}
        weights |= {name: getattr(self, name).weight for name in ("qkv", "out", "gate_up", "down")}
        weights["qkv_bias"] = self.qkv.bias
        self.layer = cpu_kernels.Layer(
            config.rms_norm_eps, weights, hidden=config.hidden_size, heads=self.heads, kv_heads=self.kv_heads,
            dim=self.head_dim, inner=config.intermediate_size,
        )  # fmt: skip
        self.kernels = cpu_kernels.load()

    @staticmethod
    def fits(model) -> bool:
        """float32 on a CPU, all sizes whole panels, and no biases but those of q, k and v."""
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        biased = [name for name, module in model.named_modules() if getattr(module, "bias", None) is not None]
        return (
            model.device.type == "cpu"
            and model.dtype == torch.float32
            and all(linear.out_features % cpu_kernels.PANEL == 0 for linear in linears)
            and all(name.endswith(("q_proj", "k_proj", "v_proj")) for name in biased)
            and cpu_kernels.load() is not None
        )

    def before_attention(self, x: torch.Tensor, rotation, paged) -> torch.Tensor:
        caches = paged.kv_cache.k[self.index], paged.kv_cache.v[self.index]
        return self.kernels.before_attention(self.layer, x, *rotation, *caches, paged.slot_mapping)[:, : self.heads]

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self.kernels.after_attention(self.layer, x, attended.contiguous())
