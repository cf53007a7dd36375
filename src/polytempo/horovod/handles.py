"""Handles of asynchronous calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from polytempo.errors import WrongType

Result = TypeVar("Result")


class HandlePart(Protocol):
    """A pending message of a handle."""

    def is_completed(self) -> bool:
        """Whether it has ended."""


class Handle(Generic[Result]):
    """The handle of a call; `finish` waits for it and makes its result, once."""

    def __init__(self, finish: Callable[[], Result], parts: Sequence[HandlePart] = ()) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._parts: Sequence[HandlePart] = parts
        self._result: Result | None = None
        self._error: Exception | None = None

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return all(part.is_completed() for part in self._parts)

    def wait(self) -> Result:
        """The result; raises the error at each call if it failed."""
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
    """One handle for several."""
    parts = [part for handle in handles for part in handle._parts]
    return Handle(lambda: [handle.wait() for handle in handles], parts)


def first(handle: Handle[list[Result]]) -> Handle[Result]:
    """The handle of a call on one tensor, from that of a call on several."""
    return Handle(lambda: handle.wait()[0], handle._parts)


def numbered(name: str | None, index: int) -> str | None:
    """The name of one call of a grouped call."""
    return None if name is None else f"{name}.{index}"


def poll(handle: Handle[Any]) -> bool:
    """Whether an asynchronous call has ended.

    Args:
        handle: What an `_async` call returned.

    Returns:
        True if `synchronize` would return at once.

    Raises:
        WrongType: It is not a handle.
    """
    return _checked(handle).poll()


def synchronize(handle: Handle[Any]) -> Any:
    """Wait for an asynchronous call.

    Args:
        handle: What an `_async` call returned.

    Returns:
        Its result.

    Raises:
        WrongType: It is not a handle.
        MismatchError: Ranks made different calls.
        PeerError: A rank is lost.
    """
    return _checked(handle).wait()


def _checked(handle: Handle[Any]) -> Handle[Any]:
    if not isinstance(handle, Handle):
        raise WrongType(f"expected a handle that an _async call returned, got {handle!r}")
    return handle
