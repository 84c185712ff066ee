"""A Parsons problem: the lines of a program, shuffled; the reader puts them in order.

    puzzle = Parsons(["total += x", "total = 0", "for x in xs:"], rules=[("B", "A", "What is total before the loop?"), …])
    puzzle                 in a notebook: a list of lines, two buttons to move one, and a field to type their letters in order
    puzzle.put("BCA")      the same without widgets; print(puzzle) shows where it stands

It says which line stands too early, by asking a question about it; it never shows the order.
"""

from __future__ import annotations

from html import escape

NO_BREAK = "\u00a0"
STYLE = "<style>.lm-parsons select{font-family:var(--jp-code-font-family,monospace);line-height:1.5}</style>"


class Parsons:
    """Lines to put in order.

    lines  as they are shown at first; they get the letters A, B, C … Leading blanks belong to the line
    rules  (earlier, later, question): the line with the first letter must stand before the one with the second; the
           question is asked while it doesn't. Every order that keeps all rules is right
    title  what the lines do when they are in order

    Raises ValueError for a rule that names no line, and for rules that no order keeps.
    """

    def __init__(self, lines: list[str], rules: list[tuple[str, str, str]], title: str = "") -> None:
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        if not 2 <= len(lines) <= len(letters):
            raise ValueError(f"lines has {len(lines)} entries: use 2 to {len(letters)}")
        self.title = title
        self.lines = dict(zip(letters, lines, strict=False))
        self.rules = list(rules)
        for earlier, later, question in self.rules:
            if earlier not in self.lines or later not in self.lines:
                raise ValueError(f"rule {earlier!r} before {later!r} names no line: use {', '.join(self.lines)}")
            if not question.strip():
                raise ValueError(f"rule {earlier!r} before {later!r} has no question")
        self._check_rules()
        self._order = list(self.lines)
        self._box = None

    def _check_rules(self) -> None:
        left = dict.fromkeys(self.lines)
        while left:
            free = [
                letter
                for letter in left
                if not any(later == letter and earlier in left for earlier, later, _ in self.rules)
            ]
            if not free:
                raise ValueError(f"no order keeps the rules between {', '.join(left)}")
            for letter in free:
                del left[letter]

    # ---- the order --------------------------------------------------------------------------------

    @property
    def order(self) -> str:
        """The letters of the lines as they stand now."""
        return "".join(self._order)

    @property
    def code(self) -> str:
        """The lines as they stand now, as a program."""
        return "\n".join(self.lines[letter] for letter in self._order) + "\n"

    def put(self, order: str) -> Parsons:
        """Set the order by its letters. Raises ValueError unless each line is named once."""
        letters = [letter for letter in order.upper() if not letter.isspace() and letter != ","]
        if sorted(letters) != sorted(self.lines):
            raise ValueError(f"order={order!r} must name each of {', '.join(self.lines)} once")
        self._order = letters
        self._refresh()
        return self

    def move(self, letter: str, by: int) -> None:
        """Move one line up (by < 0) or down; it stops at the ends."""
        place = self._order.index(letter)
        goal = max(0, min(len(self._order) - 1, place + by))
        self._order.insert(goal, self._order.pop(place))

    def first_too_early(self) -> tuple[str, str] | None:
        """(letter, question) of the first line that stands before one it needs; None if the order is right."""
        seen: set[str] = set()
        for letter in self._order:
            for earlier, later, question in self.rules:
                if later == letter and earlier not in seen:
                    return letter, question
            seen.add(letter)
        return None

    @property
    def is_solved(self) -> bool:
        return self.first_too_early() is None

    def verdict(self) -> str:
        """A sentence: it's in order, or which line to look at, and a question."""
        found = self.first_too_early()
        if found is None:
            return "In order."
        letter, question = found
        return (
            f"Look at line {letter}, “{self.lines[letter].strip()}”, in place {self._order.index(letter) + 1}. {question}"
        )

    # ---- as text ----------------------------------------------------------------------------------

    def __str__(self) -> str:
        rows = [f"{letter}   {self.lines[letter]}" for letter in self._order]
        return "\n".join([*([self.title] if self.title else []), *rows])

    __repr__ = __str__

    def _html(self) -> str:
        rows = "\n".join(f"<b>{letter}</b>   {escape(self.lines[letter])}" for letter in self._order)
        return f'<div>{escape(self.title)}</div><pre style="line-height:1.4">{rows}</pre>'

    # ---- in a notebook ----------------------------------------------------------------------------

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        bundle = {"text/plain": str(self), "text/html": self._html()}
        box = self.widget()
        if box is not None:
            view = box._repr_mimebundle_()
            bundle |= {kind: data for kind, data in view.items() if kind not in bundle}
        return bundle

    def widget(self):
        """The list and its buttons, of plain ipywidgets; None where they aren't installed."""
        if self._box is None:
            try:
                import ipywidgets
            except ImportError:
                return None
            self._list = ipywidgets.Select(rows=len(self.lines), description="", layout={"width": "760px"})
            self._list.add_class("lm-parsons")
            up = ipywidgets.Button(description="Move up", tooltip="Move the chosen line one place up")
            down = ipywidgets.Button(description="Move down", tooltip="Move the chosen line one place down")
            ask = ipywidgets.Button(description="Check", tooltip="Is it in order?", button_style="primary")
            self._say = ipywidgets.HTML()
            up.on_click(lambda _: self._moved(-1))
            down.on_click(lambda _: self._moved(1))
            ask.on_click(lambda _: self._tell(self.verdict()))
            self._typed = ipywidgets.Text(description="Order", continuous_update=False, layout={"width": "300px"},
                                          tooltip="The letters of the lines in the order that you want")  # fmt: skip
            self._typed.observe(self._on_typed, "value")
            look = ipywidgets.HTML(f"{STYLE}<div>{escape(self.title)}</div>")
            self._box = ipywidgets.VBox([look, self._list, ipywidgets.HBox([up, down, self._typed, ask]), self._say])
            self._refresh()
            self._tell(
                "Choose a line and move it. Or type the letters of all lines as their order, press Enter, Tab and Space."
            )
        return self._box

    def _tell(self, words: str) -> None:
        self._say.value = f'<div role="status" aria-live="polite" style="white-space:normal">{escape(words)}</div>'

    def _moved(self, by: int) -> None:
        letter = self._list.value
        self.move(letter, by)
        self._refresh(letter)
        self._tell(f"{letter} is in place {self._order.index(letter) + 1} of {len(self._order)}.")

    def _on_typed(self, change) -> None:
        """An order was typed. (In JupyterLab the arrow keys move from cell to cell; letters in a field are the field's.)"""
        if change["new"] == self.order:
            return
        try:
            self.put(change["new"])
            self._tell("The lines are in the order that you typed. Is it right? Press Check.")
        except ValueError as error:
            self._tell(str(error))

    def _refresh(self, chosen: str | None = None) -> None:
        """The list shows the order; blanks at its lines' beginnings would be lost, so they become no-break spaces."""
        if self._box is None:
            return
        rows = []
        for letter in self._order:
            text = self.lines[letter]
            indent = len(text) - len(text.lstrip())
            rows.append((letter + NO_BREAK * (3 + indent) + text.lstrip(), letter))
        self._list.options = rows
        self._list.value = chosen or self._order[0]
        self._typed.value = self.order
