"""What an asynchronous call returns: Horovod's handle, as an object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from polytempo.errors import WrongType

Result = TypeVar("Result")


class HandlePart(Protocol):
    """Something that is under way."""

    def is_completed(self) -> bool:
        """Is it done?"""


class Handle(Generic[Result]):
    """A call that is under way; `finish` waits for it and makes its result, once."""

    def __init__(self, finish: Callable[[], Result], parts: Sequence[HandlePart] = ()) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._parts: Sequence[HandlePart] = parts
        self._result: Result | None = None
        self._error: Exception | None = None

    def poll(self) -> bool:
        """Would `wait` return at once?"""
        return all(part.is_completed() for part in self._parts)

    def wait(self) -> Result:
        """The result; the error, each time, if it went wrong."""
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except Exception as error:
                self._error = error
                raise
            self._parts = ()
        return self._result  # type: ignore[return-value]

    __call__ = wait  # the handle of a sparse reduction is a function in Horovod


def together(handles: Sequence[Handle[Result]]) -> Handle[list[Result]]:
    """Several as one."""
    parts = [part for handle in handles for part in handle._parts]
    return Handle(lambda: [handle.wait() for handle in handles], parts)


def numbered(name: str | None, index: int) -> str | None:
    """The name of one of several calls that have a name together."""
    return None if name is None else f"{name}.{index}"


def poll(handle: Handle[Any]) -> bool:
    """Is the call done?"""
    return _checked(handle).poll()


def synchronize(handle: Handle[Any]) -> Any:
    """Wait for the call; its result."""
    return _checked(handle).wait()


def _checked(handle: Handle[Any]) -> Handle[Any]:
    if not isinstance(handle, Handle):
        raise WrongType(f"expected a handle that an _async call returned, got {handle!r}")
    return handle
