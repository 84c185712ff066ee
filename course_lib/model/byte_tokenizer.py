"""A tokenizer that needs no file: one token per UTF-8 byte, plus three special tokens.

It goes with the "tiny" model (loading.py). Standard library only, so it also runs where torch can't.
"""

from __future__ import annotations

from collections.abc import Iterable

_NUM_BYTES = 256
_SPECIAL_TOKENS = {256: "<|bos|>", 257: "<|eos|>", 258: "<|pad|>"}


class ByteTokenizer:
    """Token ids 0-255 are bytes, 256-258 special tokens, 259 to vocab_size - 1 tokens without a meaning of their own.

    The last kind exists because a model's vocabulary is usually rounded up to a friendly size. A random model
    does produce such ids, so they have a text too: `<300>` for id 300.
    """

    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258

    def __init__(self, vocab_size: int = 512):
        """vocab_size: number of token ids of the model it is used with (ids, at least 259)."""
        smallest = _NUM_BYTES + len(_SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise ValueError(f"vocab_size={vocab_size}: must be at least {smallest} (256 bytes and 3 special tokens)")
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        return list(_SPECIAL_TOKENS)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The UTF-8 bytes of `text`. No special token is added in either case (SmolLM2 adds none either)."""
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Bytes that are no UTF-8 (half a character, say) become U+FFFD.

        Raises ValueError for an id outside 0 .. vocab_size - 1.
        """
        return b"".join(self._token_bytes(int(i), skip_special_tokens) for i in token_ids).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if 0 <= token_id < _NUM_BYTES:
            return bytes([token_id])
        if token_id in _SPECIAL_TOKENS:
            return b"" if skip_special_tokens else _SPECIAL_TOKENS[token_id].encode()
        if _NUM_BYTES <= token_id < self.vocab_size:
            return b"<%d>" % token_id
        raise ValueError(f"token_ids: {token_id} is outside the vocabulary, allowed are 0 to {self.vocab_size - 1}")
