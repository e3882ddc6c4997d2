"""What holds within a `with` statement, and in the calls inside it, by a context variable."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def within(variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    """A context in which the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
