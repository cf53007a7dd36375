"""The message that says why a lane failed, and the tags that calls and recovery use.

tag of FAILED:   rank lost + 1, or 0  |  generation of the lane << 32  |  1 << 62 where it is final
meta of FAILED:  the number of the call that failed, or 0 where that does not matter, and the text
tags of DATA:    the number of the call, or less than 0 to measure; below -LAST_CALL: what recovery agrees on
"""

from __future__ import annotations

from polytempo.collectives.tasks import CallQueue
from polytempo.errors import PeerError, RankLost
from polytempo.transport.peer_link import FAILED, LinkMessage

#: Tags of calls are not larger than this, either way.
LAST_CALL = (1 << 40) - 1
_RANKS, _GENERATIONS, _FINAL = (1 << 32) - 1, (1 << 30) - 1, 1 << 62
#: Of the text.
_LONGEST = 60_000


def failure(lane: CallQueue, error: Exception, final: bool, number: int) -> LinkMessage:
    """For all others of the lane: call `number` has failed."""
    lost = error.ranks[0] + 1 if isinstance(error, RankLost) else 0
    tag = lost | lane.generation << 32 | (_FINAL if final else 0)
    return LinkMessage(FAILED, lane.context, tag, f"{number} {error}".encode()[:_LONGEST])


def read_failure(message: LinkMessage) -> tuple[PeerError, int, bool, int]:
    """The error, the generation in which it happened, whether it is final, and the number of the call."""
    whole = message.meta.decode(errors="replace")
    number, _, text = whole.partition(" ")
    if not (number.isascii() and number.isdigit() and len(number) < 20):
        number, text = "0", whole  # whatever it is: it has failed
    lost = message.tag & _RANKS
    error = RankLost(text, (lost - 1,)) if lost else PeerError(text)
    return error, message.tag >> 32 & _GENERATIONS, bool(message.tag & _FINAL), int(number)
