"""SQLAlchemy's sessions of both kinds, of which an application may have only one.

`sqlalchemy.ext.asyncio` needs greenlet, which a bare SQLAlchemy doesn't install, and
which an application with plain sessions doesn't need. So nothing here imports it:
where nobody did, there are no objects of its classes either.
"""

import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy.orm import Session, scoped_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import (
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )
    from typing_extensions import TypeIs

AnySession: TypeAlias = (
    "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]"
)

_MODULE: Final = "sqlalchemy.ext.asyncio"


def is_async_session(value: object) -> "TypeIs[AsyncSession]":
    """Tell whether it is an `AsyncSession`."""
    found = sys.modules.get(_MODULE)
    return found is not None and isinstance(value, found.AsyncSession)


def is_async_scoped_session(value: object) -> "TypeIs[async_scoped_session[Any]]":
    """Tell whether it is an `async_scoped_session`, which hands on to one."""
    found = sys.modules.get(_MODULE)
    return found is not None and isinstance(value, found.async_scoped_session)


def is_async_sessionmaker(value: object) -> "TypeIs[async_sessionmaker[AsyncSession]]":
    """Tell whether it makes sessions of that kind."""
    found = sys.modules.get(_MODULE)
    return found is not None and isinstance(value, found.async_sessionmaker)
