"""The lab behind a web page: text in, text out, and an address that holds the settings.

The page (site/) runs this under Pyodide, Python in the browser. What is shown there is the notebook's `Lab`, by the
same view.js; here is what a page has and a notebook hasn't: its address.
"""

from __future__ import annotations

import json

from .address import read, write
from .scheduler_lab import PRESETS, Lab, Settings


class Page:
    """One page. query: what follows the question mark of its address."""

    def __init__(self, query: str = "") -> None:
        address = read(query)
        self._complaints = address.complaints
        self.lab = self._lab(address.settings)
        if address.pinned is not None:
            self._pin(address.pinned)

    def _lab(self, settings: dict) -> Lab:
        try:
            lab = Lab(**settings)
        except ValueError as error:
            self._complaints.append(f"These settings can't run together: {error}. Instead of them: the defaults.")
            lab = Lab()
        lab.preset = next((key for key, *_, changes in PRESETS if Settings(**changes) == lab.settings), "")
        return lab

    def _pin(self, settings: dict) -> None:
        try:
            then = Lab(**settings)
        except ValueError as error:
            self._complaints.append(f"The run that was pinned as A can't run: {error}.")
            return
        then.handle({"kind": "action", "key": "pin"})
        self.lab.pinned = then.pinned

    def start(self) -> str:
        """The first picture, the controls, and what was wrong with the address."""
        frame = self.lab.setup() | self.lab.frame()
        return self._answer(frame | {"error": " ".join(self._complaints)} if self._complaints else frame)

    def handle(self, message: str) -> str:
        """The answer to a message of view.js, as `Lab.handle` gives it, and the address from then on."""
        return self._answer(self.lab.handle(json.loads(message)))

    def _answer(self, answer: dict) -> str:
        pinned = self.lab.pinned[0] if self.lab.pinned else None
        return json.dumps({"answer": answer, "query": write(self.lab.settings, pinned)}, separators=(",", ":"))
