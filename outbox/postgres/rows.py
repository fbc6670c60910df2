"""Rows whose columns have names, without a call of Python for each row."""

from functools import partial
from typing import Any, TypeVar, cast

import psycopg
from psycopg.rows import AsyncRowFactory, RowMaker

AnyRow = TypeVar("AnyRow", bound=tuple[Any, ...])


def rows_of(kind: type[AnyRow]) -> AsyncRowFactory[AnyRow]:
    """Return a row factory that makes a `NamedTuple` of each row, in order."""
    make = cast("RowMaker[AnyRow]", partial(tuple.__new__, kind))

    def factory(cursor: psycopg.AsyncCursor[Any]) -> RowMaker[AnyRow]:
        return make

    return factory
