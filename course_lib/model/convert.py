"""From a quantised GGUF file to a folder that transformers loads in less than a second.

transformers can read a GGUF file itself, but parses it several times over (about 30 s for this model, each time).
Here it is read once: weights to float32 safetensors, metadata to config.json, vocabulary to tokenizer.json.
Only the Llama architecture is covered, which is what SmolLM2 is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# GGUF's name of a layer's weight -> transformers' name
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # GGUF's token type of special tokens such as <|im_end|>


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and float32 weights of `gguf_file` into `folder`.

    Shows a progress bar on stderr. Raises ValueError for a file that holds no Llama model.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file
    from tqdm import tqdm

    with tqdm(total=100, desc="reading", unit="%", file=sys.stderr, bar_format="{desc:<10} {bar:30} {n:3.0f} %") as bar:
        reader = GGUFReader(gguf_file)
        metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        if metadata.get("general.architecture") != "llama":
            raise ValueError(f"{gguf_file}: architecture {metadata.get('general.architecture')!r}, must be 'llama'")
        bar.update(40)  # shares of the time, as measured

        bar.set_description_str("tokenizer")
        _tokenizer(metadata).save_pretrained(folder)
        bar.update(10)

        bar.set_description_str("weights")
        tensors = {}
        for tensor in reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type)
            if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                kv = "_kv" if "attn_k" in tensor.name else ""
                weight = _undo_rope_permutation(weight, metadata[f"llama.attention.head_count{kv}"])
            tensors[_transformers_name(tensor.name)] = weight
            bar.update(40 / len(reader.tensors))

        bar.set_description_str("writing")
        config = _config(metadata, tied="lm_head.weight" not in tensors)
        config.save_pretrained(folder)
        _generation_config(config).save_pretrained(folder)
        weights_file = folder / "model.safetensors"
        save_file(tensors, weights_file, metadata={"format": "pt"})
        # safetensors lets the owner alone read it; a cache may be shared by a class
        weights_file.chmod((folder / "config.json").stat().st_mode)
        bar.update(100 - bar.n)  # the shares above don't add up to the last digit


def _transformers_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _OTHER_WEIGHTS:
        return f"{_OTHER_WEIGHTS[stem]}.{kind}"
    _, layer, name = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_WEIGHTS[name]}.{kind}"


def _undo_rope_permutation(weight: Any, num_heads: int) -> Any:
    """GGUF interleaves the two halves of each head for its rotary embedding; transformers keeps them apart.

    weight: [num_heads * head_dim, hidden_size]
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape).copy()


def _config(metadata: dict, tied: bool) -> Any:
    from transformers import LlamaConfig

    hidden_size, num_heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=hidden_size // num_heads,
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
    )


def _generation_config(config: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )


def _tokenizer(metadata: dict) -> Any:
    """SmolLM2's tokenizer: byte-level BPE, every digit a token of its own, no token added at the start."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind!r} in the GGUF file: must be ('gpt2', 'smollm')")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token(name: str) -> str:
        return tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
    )
