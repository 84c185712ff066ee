"""A policy's result in all rounds, as a table, in sentences and in pictures."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ..lab.svg import Picture
from ..lab.timeline import compare, compare_alt
from .pictures import bars, excerpt
from .rounds import rounds
from .score import Score, built_in_scores, total


@dataclass(frozen=True)
class Result:
    """What `arena` found. problem: why there are no points; then there are no scores either."""

    name: str
    scores: dict[str, Score]
    problem: str = ""

    @property
    def points(self) -> float:
        """The mean over the rounds, 0 … 100."""
        return total(self.scores)

    @property
    def verdict(self) -> list[str]:
        """What the numbers mean, in sentences."""
        if self.problem:
            return [f"{self.name}: no points. {self.problem}"]
        rivals = built_in_scores()
        best = max(rivals, key=lambda name: total(rivals[name]))
        better = self.points > total(rivals[best])
        relation = "more" if better else "not more"
        lines = [
            f"{self.name}: {self.points:.1f} points, {relation} than the best built-in policy, {best} with {total(rivals[best]):.1f}."
        ]
        for game in rounds():
            starved = self.scores[game.name].starved
            if starved:
                worst = self.scores[game.name].worst
                others = f" and {len(starved) - 1} more" if len(starved) > 1 else ""
                lines.append(
                    f"It starves somebody in {game.name}: {worst.name}{others}, a prompt of {worst.prompt_tokens:,} tokens, got nothing for "
                    f"{worst.hunger:.1f} s, while {worst.overtaken} requests that came later had their first token."
                )
        return lines

    def rows(self) -> list[list[str]]:
        """The table's lines, the header first."""
        table = [
            ["round", "policy", "points", "met both", "goodput", "P99 ITL", "median TTFT", "P99 TTFT", "fairness", "starved"]
        ]
        for game in rounds():
            entries = [(self.name, self.scores.get(game.name)), *((n, s[game.name]) for n, s in built_in_scores().items())]
            for name, result in entries:
                if result:
                    table.append([
                        game.name, name, f"{result.points:.1f}", f"{result.attainment:.0%}", f"{result.goodput:.1f}/s", f"{result.p99_itl * 1e3:.0f} ms",
                        f"{result.median_ttft:.2f} s", f"{result.p99_ttft:.2f} s", f"{result.fairness:.2f}", str(len(result.starved) or "-"),
                    ])  # fmt: skip
        return table

    def __str__(self) -> str:
        if self.problem:
            return self.verdict[0]
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines, before = [], ""
        for row in rows:
            cells = [
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join([" " * widths[0] if row[0] == before else cells[0], *cells[1:]]).rstrip())
            before = row[0]
        return "\n".join([*self.verdict, "", *lines])

    __repr__ = __str__

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.verdict)
        if self.problem:
            return {"text/html": lines, "text/plain": str(self)}
        header, *rows = self.rows()
        body, before = ["<tr>" + "".join(_cell(name, place, "th") for place, name in enumerate(header)) + "</tr>"], ""
        for row in rows:
            bold = ' style="font-weight:bold"' if row[1] == self.name else ""
            cells = ["" if row[0] == before else row[0], *row[1:]]
            body.append(f"<tr{bold}>" + "".join(_cell(cell, place) for place, cell in enumerate(cells)) + "</tr>")
            before = row[0]
        table = f'<div style="overflow-x:auto"><table>{"".join(body)}</table></div>'
        return {"text/html": lines + table, "text/plain": str(self)}

    def bars(self) -> Picture:
        """The points of every round, this policy above the built-in ones."""
        self._must_have_scores()
        entries = {self.name: self.scores, **built_in_scores()}
        return bars({name: {game: s.points for game, s in scores.items()} for name, scores in entries.items()}, self.name)

    def worst(self, round: str | None = None) -> Picture:
        """The request that this policy served worst, beside the same one under the built-in policy with the most points there.

        round: its name; None: where the policy lost the most against the best of the others.
        """
        self._must_have_scores()
        rivals = built_in_scores()
        best = {game: max(rivals, key=lambda name: rivals[name][game].points) for game in self.scores}
        if round is None:
            round = min(self.scores, key=lambda game: self.scores[game].points - rivals[best[game]][game].points)
        if round not in self.scores:
            raise ValueError(f"round={round!r} is no round of the arena: use {', '.join(self.scores)}")
        mine, other = self.scores[round], rivals[best[round]][round]
        name = mine.worst.name
        a, b = (excerpt(trace, name) for trace in (mine.trace, other.trace))
        titles = tuple(
            f"{who} in {round}, excerpt: steps {part.steps[0].index} to {part.steps[-1].index}"
            for who, part in ((self.name, a), (best[round], b))
        )
        labels = {name: f"{name} (worst)"}
        return Picture(compare(a, b, titles=titles, labels=labels), compare_alt(a, b, titles=titles, labels=labels))

    def _must_have_scores(self) -> None:
        if self.problem:
            raise ValueError(f"{self.name} has no points and no picture. {self.problem}")


def _cell(text: str, column: int, tag: str = "td") -> str:
    """A cell of the table: names at the left, numbers at the right; a number and its unit stay in one line."""
    left = column < 2
    wrap = "normal" if tag == "th" else "nowrap"
    return f'<{tag} style="text-align:{"left" if left else "right"};white-space:{wrap};padding:3px 6px">{escape(text)}</{tag}>'
