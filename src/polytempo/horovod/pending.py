"""What an asynchronous call returns: Horovod's handle, as an object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from polytempo.errors import UsageError

Result = TypeVar("Result")


class Part(Protocol):
    """Something that is under way."""

    def is_completed(self) -> bool:
        """Is it done?"""


class Pending(Generic[Result]):
    """A call that is under way; `finish` waits for it and makes its result, once."""

    def __init__(self, finish: Callable[[], Result], parts: Sequence[Part] = ()) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._parts: Sequence[Part] = parts
        self._result: Result | None = None

    def poll(self) -> bool:
        """Would `wait` return at once?"""
        return all(part.is_completed() for part in self._parts)

    def wait(self) -> Result:
        """The result."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
            self._parts = ()
        return self._result  # type: ignore[return-value]


def together(handles: Sequence[Pending[Result]]) -> Pending[list[Result]]:
    """Several as one."""
    parts = [part for handle in handles for part in handle._parts]
    return Pending(lambda: [handle.wait() for handle in handles], parts)


def poll(handle: Pending[Any]) -> bool:
    """Is the call done?"""
    return _checked(handle).poll()


def synchronize(handle: Pending[Any]) -> Any:
    """Wait for the call; its result."""
    return _checked(handle).wait()


def _checked(handle: Pending[Any]) -> Pending[Any]:
    if not isinstance(handle, Pending):
        raise UsageError(f"expected a handle that an _async call returned, got {handle!r}")
    return handle
