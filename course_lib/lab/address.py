"""The settings of the lab as the query of a web address, and back: a link that says which lab it opens.

    write(Settings(chunk=None))      "running=64&prompt=8192&newcomers=0&known=0&chunk=whole&…"
    read("chunk=256&running=8")      Address({"chunk": 256, "running": 8}, None, [])
    read("chunk=0").complaints       ["chunk=0: it must be a whole number from 32 to 8,192, or whole. Instead of it: 1,024 tokens."]

A value may lie between the choices of its control, but not beyond the smallest and the largest. A run that is pinned
as A is written as the settings in which it differs, each with "a." before its name.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field
from urllib.parse import parse_qsl, urlencode

from .scheduler_lab import CONTROLS, Settings

WHOLE = "whole"  # as `Settings.chunk` None is written
PINNED = "a."
CHOICES = {key: dict(values) for key, _, values, _ in CONTROLS}
MOST_SHOWN = 40  # characters of what somebody wrote


@dataclass
class Address:
    """What an address says: settings that differ from the defaults, those of A if there is one, and what was wrong."""

    settings: dict = field(default_factory=dict)
    pinned: dict | None = None
    complaints: list[str] = field(default_factory=list)


def write(settings: Settings, pinned: Settings | None = None) -> str:
    """All settings, so that the link means the same when the defaults change."""
    now = asdict(settings)
    then = {PINNED + key: value for key, value in asdict(pinned or settings).items() if value != now[key]}
    return urlencode({key: _text(value) for key, value in {**now, **then}.items()})


def _text(value: object) -> str:
    if value is None:
        return WHOLE
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read(query: str) -> Address:
    """Never raises: what can't be used is left out, with a complaint that says what would do."""
    address, pinned = Address(), {}
    for name, text in parse_qsl(query.removeprefix("?"), keep_blank_values=True):
        key = name.removeprefix(PINNED)
        values = address.settings if key == name else pinned
        if key not in CHOICES:
            address.complaints.append(f"{_short(name)}: there is no such setting. {_similar(key)}")
            continue
        try:
            values[key] = value_of(key, text)
        except ValueError as error:
            default = CHOICES[key][getattr(Settings(), key)]
            instead = f"Instead of it: {default}." if key == name else "A has it as this run does."
            address.complaints.append(f"{name}={_short(text)}: it must be {error}. {instead}")
    address.pinned = address.settings | pinned if pinned else None
    return address


def value_of(key: str, text: str) -> object:
    """The value of a setting; ValueError says what it must be."""
    choices = CHOICES[key]
    if isinstance(getattr(Settings(), key), str):
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text
    if text == WHOLE and None in choices:
        return None
    numbers = [value for value in choices if value is not None]
    low, high = min(numbers), max(numbers)
    kind, noun = (float, "number") if isinstance(high, float) else (int, "whole number")
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise ValueError(f"a {noun} from {low:,} to {high:,}{f', or {WHOLE}' if None in choices else ''}")
    return value


def _similar(key: str) -> str:
    found = difflib.get_close_matches(key, CHOICES, 1)
    return f"Did you mean {found[0]}?" if found else f"There are: {', '.join(CHOICES)}."


def _short(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
