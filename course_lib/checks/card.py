"""A report for the eye (HTML in a notebook) and as text (terminals, screen readers): the same words in both."""

from __future__ import annotations

import re
from html import escape

from .run import Report, Result

MARKS = {"holds": "✓", "wrong": "✗", "error": "✗", "endless": "✗", "cost": "~"}  # ~: right, but it costs more than it must
COLOURS = {"holds": "#009e73", "wrong": "#d55e00", "error": "#d55e00", "endless": "#d55e00", "cost": "#e69f00"}


def headline(report: Report) -> str:
    """The state in one line."""
    exercise = report.exercise
    name = f"{exercise.id} {exercise.part}"
    if report.state == "not done":
        return f"{name}: not done yet"
    if report.problem:
        return f"{name}: could not be tested"
    held = sum(result.outcome in ("holds", "cost") for result in report.results)
    if report.state == "green":
        return f"{name}: all {held} hold" + (", with a remark" if report.remarks else "")
    return f"{name}: {held} of {sum(not test.is_cost for test in exercise.tests)} hold"


def untested_tests(report: Report) -> int:
    """How many tests weren't reached; those of cost don't count, they are for right answers."""
    return sum(not test.is_cost for test in report.exercise.tests) - sum(not result.test.is_cost for result in report.results)


def details(result: Result) -> list[tuple[str, str]]:
    """(label, text) of one test that doesn't hold."""
    rows = []
    if result.wrong:
        rows += [("given", result.wrong.given), ("you", result.wrong.got or ""), ("expected", result.wrong.saying)]
    else:
        rows.append(("happened", result.message))
    if result.concept:
        rows.append(("question", f"{result.concept.question} ({result.concept.name}: {result.concept_id})"))
    return [(label, text) for label, text in rows if text]


def as_text(report: Report) -> str:
    """The whole card as plain text."""
    lines = [headline(report)]
    if report.state == "not done":
        return lines[0]
    lines.append(f"tested: {report.where}")
    if report.problem:
        return "\n".join([*lines, f"  {report.problem}"])
    lines += [f"  {MARKS[result.outcome]} {result.test.what}" for result in report.results]
    untested = untested_tests(report)
    if untested:
        lines.append(f"  · {untested} more, not tested")
    for result in _explained(report):
        lines += ["", f"  {result.test.what}" + (" (the answer is right, it costs more than it must)" if result.outcome == "cost" else "")]
        for label, text in details(result):
            first, *rest = text.splitlines()
            lines.append(f"    {label + ':':<10} {first}")
            lines += [f"    {'':<10} {line}" for line in rest]
    return "\n".join(lines)


def _explained(report: Report) -> list[Result]:
    """The first failure; when there is none, the remarks."""
    return [report.failed] if report.failed else report.remarks


def as_html(report: Report) -> str:
    """The card; the colours are the page's own but for the marks, so that it reads in light and dark themes."""
    if report.state == "not done":
        return f'<div role="status">○ {escape(headline(report))}</div>'
    colour = {"green": "#009e73", "red": "#d55e00"}[report.state]
    parts = [
        f'<div role="status" style="border:1px solid {colour};border-left:6px solid {colour};border-radius:4px;padding:8px 12px;max-width:860px">',
        f"<b>{escape(headline(report))}</b>",
        f'<div style="opacity:.75;font-size:smaller">tested: {escape(report.where)}</div>',
    ]
    if report.problem:
        parts.append(f"<p>{escape(report.problem)}</p>")
    else:
        parts.append('<ul style="list-style:none;padding-left:0;margin:6px 0">')
        for result in report.results:
            parts.append(f"<li>{marked(MARKS[result.outcome], COLOURS[result.outcome])} {escape(result.test.what)}</li>")
        untested = untested_tests(report)
        if untested:
            parts.append(f"<li>· {untested} more, not tested</li>")
        parts.append("</ul>")
    for result in _explained(report):
        note = " (the answer is right, it costs more than it must)" if result.outcome == "cost" else ""
        parts.append(f"<div><b>{escape(result.test.what)}</b>{note}</div><table>")
        for label, text in details(result):
            cell = "text-align:left;vertical-align:top;white-space:pre-wrap"
            code = f"<code>{escape(text)}</code>" if label in ("given", "you", "happened") else _emphasised(escape(text))
            parts.append(f'<tr><th style="{cell}">{escape(label)}</th><td style="{cell}">{code}</td></tr>')
        parts.append("</table>")
    return "".join([*parts, "</div>"])


def marked(sign: str, colour: str) -> str:
    """A sign in the page's own ink behind a coloured bar: as text, orange on white would be too pale to read."""
    return f'<span style="border-left:4px solid {colour};padding-left:5px;font-weight:bold">{sign}</span>'


def _emphasised(text: str) -> str:
    """Words between asterisks, as in Markdown."""
    return re.sub(r"\*(\w[^*\n]*)\*", r"<em>\1</em>", text)


class Card:
    """A report, shown: HTML where a notebook shows it, else text."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __repr__(self) -> str:
        return as_text(self.report)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": as_html(self.report), "text/plain": as_text(self.report)}
