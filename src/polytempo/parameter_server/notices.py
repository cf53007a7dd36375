"""Where workers tell each other how they can be reached: posted once, found by whoever looks, now or later."""

from __future__ import annotations

from polytempo.errors import PeerError

#: More, or longer ones, are refused: this is for addresses.
COUNT, LENGTH = 1 << 20, 1024


class Notices:
    """Texts by key, and who waits for which."""

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}
        self._waiting: dict[str, set[int]] = {}

    def post(self, key: str, value: str) -> list[int]:
        """Somebody posts this; the workers who have waited for it."""
        if len(key) + len(value) > LENGTH or len(self._posted) >= COUNT:
            raise PeerError(f"a notice of {len(key) + len(value)} characters was refused; at most {LENGTH} are taken")
        return self.announce(key, value)

    def announce(self, key: str, value: str) -> list[int]:
        """The same of what the job itself says, which may be longer."""
        self._posted[key] = value
        return sorted(self._waiting.pop(key, ()))

    def look(self, key: str, worker: int) -> str | None:
        """What was posted; if nothing was, this worker is among those `post` returns later."""
        if key not in self._posted and len(key) <= LENGTH:
            self._waiting.setdefault(key, set()).add(worker)
        return self._posted.get(key)
