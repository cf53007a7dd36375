"""Where workers tell each other how they can be reached: posted once, found by whoever looks, now or later."""

from __future__ import annotations

import re

from polytempo.errors import PeerError

#: More, or longer ones, are refused: this is for addresses.
COUNT, LENGTH = 1 << 20, 1024
#: Keys that say whose they are (`transport/meeting.py`).
OF_RANK = re.compile(r"(?:host|link)-(\d+)(?:-|$)")


class Notices:
    """Texts by key, and who waits for which."""

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}
        self._owners: dict[str, int] = {}
        self._waiting: dict[str, set[int]] = {}

    def post(self, key: str, value: str, worker: int) -> list[int]:
        """A worker posts this; the workers who have waited for it. What is posted stays its poster's."""
        named = OF_RANK.match(key)
        if self._owners.setdefault(key, worker) != worker or (named and int(named[1]) != worker):
            raise PeerError(f"worker {worker} has posted {key[:40]!r}, which is another worker's to say")
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
