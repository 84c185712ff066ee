"""From token ids to text that can be shown while it grows.

A token is not a character: an emoji or a Chinese character can take several. `TextStream` releases
text only when it can no longer change: not half a character, not what may become a stop string.
"""

from __future__ import annotations

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that are no character (yet)


class TextStream:
    """Turns a request's token ids into text, piece by piece.

    All pieces joined are the text of all tokens (up to a stop string, which isn't shown).
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.text = ""  # released so far
        self.stopped = False  # a stop string was met
        self._tokenizer = tokenizer
        self._stop = stop
        self._token_ids: list[int] = []
        # Decoding starts a little before what is new: a token's text can depend on the one before
        # it (a leading space, say). [context:done] was released, [done:] is being decoded.
        self._context = 0
        self._done = 0
        self._held = ""  # decoded, but may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Take one more token; returns the text that can be shown because of it."""
        self._token_ids.append(token_id)
        return self._release(self._decode(final=False), final=False)

    def flush(self) -> str:
        """The request has ended: returns what was held back. Nothing is lost."""
        return self._release(self._decode(final=True), final=True)

    def _decode(self, final: bool) -> str:
        known = self._tokenizer.decode(self._token_ids[self._context : self._done], skip_special_tokens=True)
        text = self._tokenizer.decode(self._token_ids[self._context :], skip_special_tokens=True)
        if len(text) <= len(known) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._context, self._done = self._done, len(self._token_ids)
        return text[len(known) :]

    def _release(self, piece: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped = True
            text, self._held = text[: min(found)], ""
        else:
            keep = 0 if final else self._longest_stop_beginning(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text

    def _longest_stop_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        lengths = range(max((len(stop) for stop in self._stop), default=1) - 1, 0, -1)
        return next((n for n in lengths if any(text.endswith(stop[:n]) for stop in self._stop if n < len(stop))), 0)
