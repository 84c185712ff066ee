"""Readers of two public traces of production traffic. They hold sizes and times, no texts.

Azure      CSV, one request a line: TIMESTAMP, ContextTokens, GeneratedTokens
           (AzurePublicDataset, "Azure LLM inference trace 2023"; Patel et al., Splitwise, ISCA 2024)
Mooncake   JSONL, one request a line: timestamp (ms), input_length, output_length, hash_ids: one number per
           512 tokens of the prompt, the same number for the same tokens behind the same prefix
           (kvcache-ai/Mooncake; Qin et al., Mooncake, FAST 2025)

Whatever is wrong in a file raises a ValueError with the file's name, the line, the field and the value.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from ..validation import check_int, check_number
from .request import MAX_CONTENT, MAX_TOKENS, Piece, Request

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK = 512  # tokens per hash id


def read_azure(path: str | Path, limit: int | None = None) -> list[Request]:
    """The requests of an Azure trace, "azure0", "azure1" …; at most `limit` of them.

    Times count from the first request. Nothing is known of the texts, so no two prompts share anything.
    """
    requests: list[Request] = []
    first = previous = None
    for where, row in _azure_rows(path):
        if len(requests) == _checked(limit):
            break
        time = _field(where, "TIMESTAMP", row["TIMESTAMP"], datetime.fromisoformat)
        prompt_tokens, max_tokens = (
            _field(where, name, row[name], lambda text: check_int("tokens", int(text), 1, MAX_TOKENS))
            for name in AZURE_COLUMNS[1:]
        )
        first = first or time
        try:
            is_sorted = previous is None or time >= previous
        except TypeError:  # one has a time zone, the other hasn't
            raise ValueError(f"{where}: TIMESTAMP={row['TIMESTAMP']!r} can't be compared with the one before") from None
        if not is_sorted:
            raise ValueError(f"{where}: TIMESTAMP={row['TIMESTAMP']!r} is before the one of the line above: must be sorted")
        previous = time
        number = len(requests)
        piece = Piece(number, prompt_tokens)
        requests.append(Request(f"azure{number}", (time - first).total_seconds(), (piece,), max_tokens))
    if not requests:
        raise ValueError(f"{path}: there is no request in it")
    return requests


def _azure_rows(path) -> Iterator[tuple[str, dict[str, str]]]:
    """(file and line, fields) of each row."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="", restval=None, strict=True)
        try:
            header = reader.fieldnames or []
            missing = [name for name in AZURE_COLUMNS if name not in header]
            if missing:
                raise ValueError(
                    f"{path}, line 1: column {missing[0]} is missing: the columns are {', '.join(header) or 'none'}"
                )
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                missing = [name for name in header if row[name] is None]
                if missing or "" in row:
                    problem = f"field {missing[0]} is missing" if missing else f"{row['']!r} is more than the columns take"
                    raise ValueError(f"{where}: {problem}")
                yield where, row
        except csv.Error as error:
            raise ValueError(f"{path}, after line {reader.line_num}: not a CSV file: {error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, after line {reader.line_num}: not a text file in UTF-8: {error}") from None


def read_mooncake(path: str | Path, limit: int | None = None) -> list[Request]:
    """The requests of a Mooncake trace, "mooncake0", "mooncake1" …; at most `limit` of them.

    Times count from the first request. Equal hash ids become equal tokens: what was shared is shared.
    """
    requests: list[Request] = []
    first = previous = None
    for where, row in _mooncake_rows(path):
        if len(requests) == _checked(limit):
            break
        time = _field(where, "timestamp", row["timestamp"], lambda x: check_number("ms", x, "at least 0", lambda x: x >= 0))
        prompt_tokens, max_tokens = (
            _field(where, name, row[name], lambda value: check_int("tokens", value, 1, MAX_TOKENS))
            for name in MOONCAKE_FIELDS[1:3]
        )
        hash_ids = row["hash_ids"]
        if not isinstance(hash_ids, list):
            raise ValueError(f"{where}: hash_ids={hash_ids!r:.80} is not a list")
        need = -(-prompt_tokens // MOONCAKE_BLOCK)
        if len(hash_ids) != need:
            raise ValueError(
                f"{where}: hash_ids has {len(hash_ids)} numbers, input_length={prompt_tokens} needs {need}: "
                f"one per {MOONCAKE_BLOCK} tokens"
            )
        for place, number in enumerate(hash_ids):
            if type(number) is not int or not 0 <= number <= MAX_CONTENT:
                raise ValueError(f"{where}: hash_ids[{place}]={number!r:.80} must be a whole number from 0 to {MAX_CONTENT}")
        if previous is not None and time < previous:
            raise ValueError(f"{where}: timestamp={row['timestamp']!r} is before the one of the line above: must be sorted")
        first, previous = time if first is None else first, time
        last = prompt_tokens - MOONCAKE_BLOCK * (need - 1)
        pieces = tuple(Piece(number, MOONCAKE_BLOCK) for number in hash_ids[:-1]) + (Piece(hash_ids[-1], last),)
        requests.append(Request(f"mooncake{len(requests)}", (time - first) / 1000, pieces, max_tokens))
    if not requests:
        raise ValueError(f"{path}: there is no request in it")
    return requests


def _mooncake_rows(path) -> Iterator[tuple[str, dict]]:
    """(file and line, fields) of each line; empty lines are skipped."""
    line_num = 0
    with open(path, encoding="utf-8-sig") as file:
        try:
            for line_num, line in enumerate(file, start=1):
                if line.isspace():
                    continue
                where = f"{path}, line {line_num}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where}: not a JSON object, perhaps cut off: {line.strip()!r:.80} ({error})") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{where}: {row!r:.80} is not a JSON object")
                missing = [name for name in MOONCAKE_FIELDS if name not in row]
                if missing:
                    raise ValueError(f"{where}: field {missing[0]} is missing: the fields are {', '.join(row) or 'none'}")
                yield where, row
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, after line {line_num}: not a text file in UTF-8: {error}") from None


def _checked(limit: int | None) -> int | None:
    return None if limit is None else check_int("limit", limit, 1)


def _field(where: str, name: str, value, convert: Callable):
    """`convert(value)`; what it doesn't take becomes a ValueError that says where."""
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {name}={value!r:.80} is not right: {error}") from None
