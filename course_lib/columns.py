"""Rows of one kind, kept as columns.

A step has a row for every running request, and hardly anybody looks at them one by one. As columns they are made, counted
and put into the trace by operations on whole lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import NamedTuple


class Columns(MutableSequence):
    """To its user a list of named tuples; `columns` has a list for each of their fields. A row is made when it is looked at.

    A subclass says in `row` which kind they are. Raises TypeError for a row with too few or too many fields, and then
    changes nothing.
    """

    __slots__ = ("columns",)
    row: type[NamedTuple]

    def __init__(self, rows: Iterable[tuple] | None = None) -> None:
        rows = [] if rows is None else [self.row(*row) for row in rows]
        self.columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in self.row._fields]

    def keep(self, *columns: Sequence) -> None:
        """Have what is in these columns now, whatever happens to them later. (Of tuples the garbage collector stops taking care.)"""
        self.columns = tuple(map(tuple, columns))

    def _lists(self) -> list[list]:
        """The columns, to be changed."""
        if isinstance(self.columns, tuple):
            self.columns = [*map(list, self.columns)]
        return self.columns

    def tuples(self) -> Iterator[tuple]:
        """The rows as plain tuples, for a loop that takes them apart at once: a named tuple takes longer to make than to use."""
        return zip(*self.columns, strict=True)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator:
        return map(self.row, *self.columns)

    def __getitem__(self, place):
        return list(self)[place] if isinstance(place, slice) else self.row(*[column[place] for column in self.columns])

    def __setitem__(self, place, value) -> None:
        rows = list(self)
        rows[place] = value
        self.__init__(rows)

    def __delitem__(self, place) -> None:
        for column in self._lists():
            del column[place]

    def insert(self, place: int, value: tuple) -> None:
        for column, field in zip(self._lists(), self.row(*value), strict=True):
            column.insert(place, field)

    def append(self, value: tuple) -> None:
        self.insert(len(self), value)

    def extend(self, values: Iterable[tuple]) -> None:
        more = values if type(values) is type(self) else type(self)(values)
        for column, fields in zip(self._lists(), more.columns, strict=True):
            column += fields

    def copy(self):
        return type(self)(self)

    __copy__ = copy

    def sort(self, *, key=None, reverse: bool = False) -> None:
        self.__init__(sorted(self, key=key, reverse=reverse))

    def __add__(self, other) -> list:
        return [*self, *other]

    def __eq__(self, other) -> bool:
        return list(self) == list(other) if isinstance(other, (Columns, list, tuple)) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))
