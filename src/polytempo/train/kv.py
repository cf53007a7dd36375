"""`KV`: named arrays on the servers, for models that are not neural networks.

    kv = KV({"w": Array(1_000_000, rule="prox", lr=0.1, l1=0.01)}, sync="delay:8")
    w = kv["w"].pull(rows=ids).result()
    kv["w"].push(gradient, rows=ids)

Each push is one step of this worker's clock, and the mode says when the next may start: under `delay:8` up to eight pushes
are under way, under `bsp` the pushes of all workers are one update, under `ssp:3` no worker is over three pushes ahead.
Nothing waits before it must: a push returns at once, and it is the next push or pull that waits for the mode's permission. A
pull sees at least all that the mode promises to its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polytempo.client.client_state import ClientState, Outstanding
from polytempo.client.row_traffic import RowTraffic
from polytempo.errors import UsageError, nearest
from polytempo.protocol.messages import Push
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.session.session import current
from polytempo.sync.spec import parse_spec
from polytempo.tables.row_batches import ascending, checked_ids
from polytempo.train.kv_arrays import Array, ArrayTable, Future, LocalArrays
from polytempo.train.validation import weight_of

#: An array's name, values, and the rows they are for: a list of ids, a start, or None for all.
ArrayUpdate = tuple[str, Any, Any]


class KV:
    """A key-value store of arrays on the servers, under one clock. All workers must make the same one.

    `kv["name"]` is the handle of an array, with `push`, `pull`, `clock` and `version`.

    Args:
        arrays: For each name the `Array` that describes it.
        sync: The synchronisation mode of the pushes; the job's by default.

    Raises:
        UsageError: There is no array, the mode is for models only, or the job has no servers.

    Example:
        ```python
        kv = pt.tables.KV({"w": pt.tables.Array(1_000_000, rule="prox", lr=0.1, l1=0.01)}, sync="delay:8")
        w = kv["w"].pull(rows=ids).result()
        kv["w"].push(gradient, rows=ids)
        ```
    """

    def __init__(self, arrays: Mapping[str, Array], *, sync: str | None = None) -> None:
        self._session = current()
        self._spec = parse_spec(sync or self._session.job.sync)
        if not arrays:
            raise UsageError("expected at least one array, got none; use KV({'w': Array(1000)})")
        corrections = self._spec.corrections
        if self._spec.mode.rule or self._spec.local or corrections.compensation or corrections.adapts_momentum:
            raise UsageError(
                f"{self._spec.text} is for models, and arrays have rules of their own; use asp, ssp:3, delay:8, ..."
            )
        self._tables = {name: ArrayTable(name, array) for name, array in arrays.items()}
        self._handles = {name: ArrayHandle(self, number, table) for number, (name, table) in enumerate(self._tables.items())}
        self._client = self._session.client
        self._session.check_part()
        if self._client is None and self._session.size > 1:
            raise UsageError("arrays live on servers, and this job was not started by polytempo run; start it so")
        self._name = self._session.next_track()
        self._line = ClientState(self._name, ahead=self._spec.ahead)
        self.step = 0
        tables = list(self._tables.values())
        self._local = LocalArrays(tables) if self._client is None else None
        if self._client is not None:
            self._rows = RowTraffic(self._client, self._name, tables)
            self._line.take_rows = self._rows.take
            with self._session.lock:
                self._client.register(self._name, self._proposal(), lambda: ({}, self._nothing()), self._line)
            self.step = self._line.released - self._spec.ahead

    def _proposal(self) -> OptimizerSpec:
        tables = tuple(table.info for table in self._tables.values())
        return OptimizerSpec(sync=self._spec.text, apply="server", optimizer="", tensors=(), groups=(), tables=tables)

    def _nothing(self) -> list[list[Any]]:
        assert self._client is not None
        return [[] for _ in range(self._client.shards)]

    def __getitem__(self, name: str) -> ArrayHandle:
        if name not in self._handles:
            raise UsageError(
                f"there is no array {name!r}; there are {', '.join(self._handles)}{nearest(name, self._handles)}"
            )
        return self._handles[name]

    # Steps.

    def push(self, *parts: ArrayUpdate, samples: float = 1.0) -> Future[int]:
        """Push to several arrays as one step of this worker's clock.

        Args:
            *parts: For each array (name, values, rows): a list of ids, a start, or None for the whole array.
            samples: The weight of this push in the mean of a round.

        Returns:
            A future of the version of the arrays that contains the push.

        Raises:
            UsageError: An array is unknown or comes twice, or the values do not fit.
        """
        samples = weight_of(samples, zero=False)
        names = [name for name, _, _ in parts]
        if len(set(names)) < len(names):
            raise UsageError(f"expected each array once in a push, got {', '.join(names)}: one comes twice; push twice")
        checked = [(self[name].table, self[name].table.some(values, rows)) for name, values, rows in parts]
        for table, some in checked:
            table.stage(some, copied=self._local is None)
        if self._local is not None:
            self.step += 1
            version = self._local.step()
            return Future(lambda: True, lambda: version)
        return self._send(samples)

    def _send(self, samples: float) -> Future[int]:
        client, line = self._client, self._line
        assert client is not None
        self.wait()
        identity = PushId(self._name, client.rank, client.incarnation, self.step)
        push = Push(
            id=identity, version=line.version, samples=samples, sent=client.bytes_sent, received=client.bytes_received
        )
        with self._session.lock:
            client.push(self._rows.fill(Outstanding(push, self._nothing())))
        exchange, self.step = self.step, self.step + 1

        def result() -> int:
            with self._session.lock, client.together():
                client.wait_for_answer(self._name, exchange)
            return line.version

        return Future(lambda: self._is_answered(exchange), result)

    def _is_answered(self, exchange: int) -> bool:
        assert self._client is not None
        with self._session.lock:
            self._client.poll()
        return exchange not in self._line.outstanding

    def wait(self) -> None:
        """Wait until the mode lets this worker start its next step."""
        if self._client is None:
            return
        with self._session.lock:
            if self._spec.ahead:
                self._client.wait_for_release(self._name, self.step)
            else:
                self._client.settle(self._name)
                self.step = self._line.released

    def finish(self) -> None:
        """Wait until every push of this worker is answered."""
        if self._client is not None:
            with self._session.lock:
                self._client.settle(self._name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The compression residuals of this worker, by array; the arrays themselves are in the job's checkpoints."""
        return {name: table.residual for name, table in self._tables.items() if table.residual is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the residuals of `state_dict`.

        Args:
            state: Residuals by the name of their array.
        """
        for name, residual in state.items():
            self[name].table.load_residual(residual)

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of this worker so far: `step`, `waited_s`, `staleness`, `bytes_sent`, `bytes_received`."""
        sent = self._client.bytes_sent if self._client else 0
        received = self._client.bytes_received if self._client else 0
        line = self._line
        return {
            "step": self.step,
            "waited_s": line.waited,
            "staleness": line.staleness,
            "bytes_sent": sent,
            "bytes_received": received,
        }

    # For the handles.

    def pull_rows(self, number: int, ids: torch.Tensor | None, span: tuple[int, int]) -> Future[torch.Tensor]:
        """Pull rows of an array by its number: a list of ids, or a span."""
        table = list(self._tables.values())[number]
        if self._local is not None:
            here = self._local.pull(number, ids, span)
            return Future(lambda: True, lambda: here)
        self.wait()
        client, rows = self._client, self._rows
        assert client is not None
        with self._session.lock:
            if ids is None:
                request, routing = rows.ask_span(number, span), None
            else:
                unique, places = (ids.clone(), None) if ascending(ids) else torch.unique(ids, return_inverse=True)
                request, routing = rows.ask(number, unique)

        def result() -> torch.Tensor:
            with self._session.lock, client.together():
                if routing is None:
                    return table.shaped(rows.span_pulled(number, request, span))
                found = rows.pulled(number, request, routing)
                return table.shaped(found if places is None else found.index_select(0, places))

        def done() -> bool:
            with self._session.lock:
                client.poll()
                return client.pulls.is_done(request)

        return Future(done, result)

    def span_clock(self, number: int, span: tuple[int, int]) -> tuple[int, dict[int, int]]:
        """The version and the clocks of a span of an array."""
        if self._local is not None:
            return self._local.clock(number, span)
        with self._session.lock:
            return self._rows.clock_pulled(self._rows.ask_span(number, span, "clock"))


class ArrayHandle:
    """One array of a `KV`, as `kv["name"]` returns it."""

    def __init__(self, kv: KV, number: int, table: ArrayTable) -> None:
        self._kv, self._number, self.table = kv, number, table
        self.name, self.info = table.info.name, table.info

    def push(self, values: Any, *, rows: Any = None, start: int | None = None, samples: float = 1.0) -> Future[int]:
        """Push to the array: one step of this worker's clock.

        Args:
            values: A tensor with the values of the rows.
            rows: A list of row ids; None for a range or the whole array.
            start: The first row of a range; None for the whole array.
            samples: The weight of this push in the mean of a round.

        Returns:
            A future of the version of the array that contains the push.

        Raises:
            UsageError: A row is out of range or the values do not fit.
        """
        return self._kv.push((self.name, values, start if rows is None else rows), samples=samples)

    def pull(self, *, rows: Any = None, start: int = 0, stop: int | None = None) -> Future[torch.Tensor]:
        """Pull rows.

        Args:
            rows: A list of row ids; None for a range or the whole array.
            start: The first row of a range.
            stop: The row behind the range; None for the end of the array.

        Returns:
            A future of the rows, in the order of the list or the range.
        """
        if rows is not None:
            return self._kv.pull_rows(self._number, checked_ids(rows, self.info), (0, 0))
        return self._kv.pull_rows(self._number, None, self.table.span(start, stop))

    def clock(self, start: int = 0, stop: int | None = None) -> dict[int, int]:
        """The latest step of each worker that has reached all rows of a range.

        Args:
            start: The first row.
            stop: The row behind the range; None for the end of the array.

        Returns:
            Rank to step.
        """
        return self._kv.span_clock(self._number, self.table.span(start, stop))[1]

    def version(self, start: int = 0, stop: int | None = None) -> int:
        """The newest version in which a push covered any row of a range.

        Args:
            start: The first row.
            stop: The row behind the range; None for the end of the array.

        Returns:
            The version; -1 for none.
        """
        return self._kv.span_clock(self._number, self.table.span(start, stop))[0]
