"""What a release says to a worker beside "go on": one typed value for each family of modes, or none.

It travels whole from the policy to the worker; what lies in between carries it and does not look inside.
"""

from __future__ import annotations

import msgspec

from polytempo.sync.fields import Fields


class Mixing(msgspec.Struct, array_like=True, frozen=True):
    """The part of a mixing matrix P that concerns one worker i: values x and push-sum weights w are mixed alike.

    x_i becomes P_ii x_i + the sum of P_ij x_j over its in-neighbours j.
    """

    keep: float  #: P_ii
    send: tuple[tuple[int, float], ...]  #: out-neighbours j, and P_ji
    receive: tuple[tuple[int, float], ...]  #: in-neighbours j, and P_ij


class NextBlock(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A block of local steps starts."""

    period: int  #: its local steps


class NextMixing(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The step is to be mixed with other workers."""

    mixing: Mixing | None = None  #: with which; None: with none
    lost: tuple[int, ...] = ()  #: neighbours in the step before that left without pushing it
    enters: bool = False  #: this worker joined and has no model yet, its push-sum weight is 0


class NextShares(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A round with shares by speed starts."""

    weights: tuple[tuple[int, float], ...] = ()  #: (rank, relative share), where they change or the worker starts
    since: tuple[int, int] | None = None  #: the first batch (pass, number) that is cut by them; None: the next


class NextDeadline(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A round with a deadline starts."""

    seconds: float = 0.0  #: until it ends; 0: after `micro` micro-batches
    behind: int = 0  #: rounds that closed without this worker, which it has to catch up with
    catching_up: tuple[int, ...] = ()  #: the workers of which that is so, in this round


#: `Fields`: of modes with names of their own, those that users bring among them.
Directive = NextBlock | NextMixing | NextShares | NextDeadline | Fields
