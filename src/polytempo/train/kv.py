"""`KV`: named arrays on the servers, for models that are not neural networks.

    kv = KV({"w": Array(1_000_000, rule="prox", lr=0.1, l1=0.01)}, sync="delay:8")
    w = kv["w"].pull(rows=ids).result()
    kv["w"].push(gradient, rows=ids)

Each push is one step of this worker's clock, and the mode says when the next may start: under `delay:8` up to eight pushes
are under way, under `bsp` the pushes of all workers are one update, under `ssp:3` no worker is over three pushes ahead.
Nothing waits before it must: a push returns at once, and it is the next push or pull that waits for the mode's permission. A
pull sees at least all that the mode promises to its step.

An array may compress its pushes (`RowCompression`): a push is added to what earlier pushes left over, and only the rows that
are large enough ("significant") or largest ("topk"), by their largest element, are sent, as they are or cast to two bytes an
element. The rest waits in the residual, which is as large as the array, on every worker: sent + residual = produced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from typing import Any, Generic, TypeVar

import torch

from polytempo.client.client_state import ClientState
from polytempo.client.requests import Outstanding
from polytempo.client.row_traffic import RowTraffic, SomeRows, SpanOfRows, WorkerTable
from polytempo.compression.chain import CASTS, ChainSpec, parse_chain
from polytempo.compression.encoding import Dense, NumberFormat, clear, narrow
from polytempo.compression.sparsification import Significant, TopK
from polytempo.errors import UsageError, nearest
from polytempo.protocol.messages import Push
from polytempo.protocol.push import FirstValues, Measures, PushedGradient
from polytempo.protocol.values import OptimizerSpec, PushId, TableInfo
from polytempo.server.optimizer_state import dtype_name
from polytempo.session.session import current
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.mode import Mode
from polytempo.sync.spec import Spec
from polytempo.tables.row_batches import RowPush, ascending, checked_ids, coalesce
from polytempo.tables.row_optimizers import checked_hyper, rule
from polytempo.tables.table_shard import TableShard
from polytempo.tables.validation import check_dtype, check_table, is_count
from polytempo.train.update import weight_of

T = TypeVar("T")
#: An array's name, values, and the rows they are for: a list of ids, a start, or None for all.
ArrayUpdate = tuple[str, Any, Any]


# Arrays at their worker.


class Future(Generic[T]):
    """The result of a push or a pull under way. `result()` receives it: there is no background thread."""

    def __init__(self, done: Callable[[], bool], result: Callable[[], T]) -> None:
        self._done, self._get = done, result
        self._result: list[T] = []

    def done(self) -> bool:
        """Whether the result has arrived."""
        return bool(self._result) or self._done()

    def result(self) -> T:
        """Wait for the result and return it."""
        if not self._result:
            self._result.append(self._get())
        return self._result[0]


class Array:
    """The description of an array of a `KV`: its shape, and what a push does to it.

    Args:
        rows: The number of rows; None for any id from 0 to 2**63 - 1.
        dim: The length of a row; None where a row is one number.
        rule: What a push does: `"add"`, `"assign"`, `"min"`, `"max"`, or a row optimizer for gradients (`"sgd"`,
            `"adagrad"`, `"rowwise-adagrad"`, `"adam"`, `"prox"`, `"ftrl"`).
        dtype: Of the rows.
        start: Initial values: `"zeros"`, `"uniform:A"`, `"normal:S"`.
        seed: Of the initial values.
        compression: Which part of a push is sent now (`"significant:1e-3"`, `"topk:0.1+bf16"`); the rest goes later.
        cache_keys: Lists of rows repeat, and need not be sent each time.
        **options: Options of the rule, such as `lr` and `l1`.

    Raises:
        UsageError: An argument is out of range or unknown.
    """

    def __init__(
        self,
        rows: int | None,
        dim: int | None = None,
        *,
        rule: str = "add",
        dtype: torch.dtype = torch.float32,
        start: str = "zeros",
        seed: int = 0,
        compression: str = "none",
        cache_keys: bool = False,
        **options: float,
    ) -> None:
        for name, given in (("rows", rows), ("dim", dim)):
            if given is not None and not is_count(given):
                raise UsageError(f"expected {name} to be a number from 1 on, got {given!r}")
        check_dtype(dtype)
        self.rows, self.dim, self.rule, self.dtype, self.start, self.seed = rows, dim, rule, dtype, start, seed
        self.options = checked_hyper(rule, options)
        self.compression, self.cache_keys = parse_chain(compression), cache_keys


class ArrayTable(WorkerTable):
    """One array as its worker sees it."""

    def __init__(self, name: str, array: Array) -> None:
        dtype = dtype_name(array.dtype)
        self.info = TableInfo(name, array.rows or 0, array.dim or 1, dtype, array.start, array.seed, array.rule)
        check_table(self.info)
        self.cached = array.cache_keys
        self._options, self._flat, self._dtype = array.options, array.dim is None, array.dtype
        self._compression = None if array.compression.is_lossless else RowCompression(array.compression, self.info)
        if self._compression is not None and rule(array.rule).combine in ("min", "max", "last"):
            raise UsageError(f"array {name!r}: rule {array.rule!r} cannot wait for a part of a push; leave compression out")
        self.form = self._compression.form if self._compression is not None else ""
        self._prepared: SomeRows | SpanOfRows | None = None

    @property
    def residual(self) -> torch.Tensor | None:
        """What compression has not sent yet."""
        return None if self._compression is None else self.shaped(self._compression.residual.clone())

    def load_residual(self, residual: torch.Tensor) -> None:
        if self._compression is None or residual.numel() != self._compression.residual.numel():
            raise UsageError(
                f"array {self.info.name!r}: a residual of {residual.numel()} elements does not fit its compression and size"
            )
        self._compression.residual.copy_(residual.view_as(self._compression.residual))

    def hyper(self) -> dict[str, Any]:
        return self._options

    def shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the caller sees them."""
        return rows.view(-1) if self._flat else rows

    def span(self, start: int, stop: int | None) -> tuple[int, int]:
        """A range of rows, checked."""
        if not self.info.rows:
            raise UsageError(f"array {self.info.name!r} has no number of rows, so there are no ranges of it; give rows=")
        end = self.info.rows if stop is None else stop
        if not 0 <= start <= end <= self.info.rows:
            raise UsageError(
                f"array {self.info.name!r}: expected a range within 0 to {self.info.rows}, got {start} to {end}"
            )
        return start, end

    def some(self, values: Any, rows: Any) -> SomeRows | SpanOfRows:
        """What the caller wants to push, checked: a list of rows, a range from a start on, or everything (None)."""
        given = torch.as_tensor(values, dtype=self._dtype).detach().cpu()
        if given.dim() != (1 if self._flat else 2) or (not self._flat and given.shape[1] != self.info.dim):
            wanted = "(n,)" if self._flat else f"(n, {self.info.dim})"
            raise UsageError(f"array {self.info.name!r}: expected values of shape {wanted}, got {tuple(given.shape)}")
        given = given.reshape(-1, self.info.dim)
        if rows is None or (isinstance(rows, int) and not isinstance(rows, bool)):
            start, _ = self.span(rows or 0, (rows or 0) + len(given))
            if rows is None and len(given) != self.info.rows:
                raise UsageError(f"array {self.info.name!r}: expected {self.info.rows} values, got {len(given)}; name rows=")
            return SpanOfRows(start, given)
        ids = checked_ids(rows, self.info)
        if ids.numel() != len(given):
            raise UsageError(f"array {self.info.name!r}: expected {ids.numel()} values, one for each row, got {len(given)}")
        how = rule(self.info.rule).combine
        return coalesce(ids, given, "sum" if how == "mean" else how)

    def prepare_push(self, some: SomeRows | SpanOfRows, copied: bool) -> None:
        """The next step pushes this; as a copy where it may have to be sent again after the caller has changed it."""
        if self._compression is not None:
            both = (torch.arange(*some.span), some.values) if isinstance(some, SpanOfRows) else some
            some = self._compression.choose(*both)
        elif copied and isinstance(some, SpanOfRows):
            some = SpanOfRows(some.start, some.values.clone())
        elif copied and not isinstance(some, SpanOfRows):
            some = some[0].clone(), some[1].clone()
        self._prepared = some

    def pushed(self) -> SomeRows | SpanOfRows | None:
        prepared, self._prepared = self._prepared, None
        return prepared


class RowCompression:
    """The push compression of one array at one worker. NaN and Inf are sent first, and leave 0 in the residual."""

    def __init__(self, chain: ChainSpec, info: TableInfo) -> None:
        if not isinstance(chain.code, Dense | TopK | Significant):
            raise UsageError(f"array {info.name!r}: {chain} compresses dense pushes; use topk, significant or a cast")
        if not info.rows:
            raise UsageError(
                f"array {info.name!r}: compression keeps what it does not send, so the array needs a number of rows"
            )
        self.chain = chain
        cast, dtype = CASTS.get(chain.cast), getattr(torch, info.dtype)
        self.form = dtype_name(cast) if cast is not None else ""
        self._form = NumberFormat(info.rows * info.dim, dtype, cast or dtype)
        self.residual = torch.zeros(info.rows, info.dim, dtype=self._form.wide)

    def choose(self, ids: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows to send now; ids are unique and ascending."""
        whole = self.residual[ids] + values
        sizes = whole.abs().nan_to_num(nan=inf, posinf=inf).amax(1)  # the largest magnitude of each row
        code, chosen = self.chain.code, torch.ones(sizes.numel(), dtype=torch.bool)
        if isinstance(code, Significant):
            chosen = sizes > code.threshold
        elif isinstance(code, TopK) and sizes.numel():
            chosen.zero_()
            chosen[torch.sort(sizes, descending=True, stable=True)[1][: max(1, ceil(code.share * sizes.numel()))]] = True
        sent = narrow(whole[chosen], self._form).to(self._form.dtype)
        whole[chosen] -= sent
        clear(whole)
        self.residual[ids] = whole
        return ids[chosen], sent


class LocalArrays:
    """The arrays of a job of one without servers: the same tables as on a server, in this process."""

    def __init__(self, tables: Sequence[ArrayTable]) -> None:
        self._pairs = [(table, TableShard(table.info, 0, 1)) for table in tables]
        self._version = 0

    def step(self) -> int:
        """Apply what was prepared; the version that this made."""
        self._version += 1
        for table, here in self._pairs:
            some = table.pushed()
            if isinstance(some, SpanOfRows):
                push = RowPush(None, some.values, 1.0, 0, self._version - 1, some.span)
            elif some is not None:
                push = RowPush(*some, 1.0, 0, self._version - 1)
            else:
                continue
            here.update([push], table.hyper(), 1.0, self._version)
        return self._version

    def pull(self, number: int, ids: torch.Tensor | None, span: tuple[int, int]) -> torch.Tensor:
        table, here = self._pairs[number]
        return table.shaped(here.pull_range(*span) if ids is None else here.pull(ids))

    def clock(self, number: int, span: tuple[int, int]) -> tuple[int, dict[int, int]]:
        here = self._pairs[number][1]
        return here.version_of(*span), here.clock(*span)


# The store.


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

    def __init__(self, arrays: Mapping[str, Array], *, sync: str | Mode | Spec | None = None) -> None:
        self._session = current()
        spec = self._session.spec_of(sync)
        if not arrays:
            raise UsageError("expected at least one array, got none; use KV({'w': Array(1000)})")
        check_features(spec, Feature.KV)
        self._ahead = spec.capabilities.ahead
        self._tables = [ArrayTable(name, array) for name, array in arrays.items()]
        self._handles = {table.info.name: ArrayHandle(self, number, table) for number, table in enumerate(self._tables)}
        self._client = self._session.client
        self._session.check_part()
        if self._client is None and self._session.size > 1:
            raise UsageError("arrays live on servers, and this job has none; start it with polytempo run --servers 1")
        self._name = self._session.next_optimizer_id()
        self._state = ClientState(self._name, ahead=self._ahead)
        self.step = 0
        self._local = LocalArrays(self._tables) if self._client is None else None
        if self._client is not None:
            self._rows = RowTraffic(self._client, self._name, self._tables)
            self._state.take_rows = self._rows.take
            with self._session.lock:
                infos = tuple(table.info for table in self._tables)
                made = OptimizerSpec(spec.text, "server", "", (), (), tables=infos, digest=spec.digest)
                self._client.register(self._name, made, lambda: (FirstValues(), self._no_data()), self._state)
            self.step = self._state.released - self._ahead

    def _no_data(self) -> list[list[Any]]:
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
            raise UsageError(f"expected each array once in a push, got {', '.join(names)}; make two pushes")
        checked = [(self[name].table, self[name].table.some(values, rows)) for name, values, rows in parts]
        for table, some in checked:
            table.prepare_push(some, copied=self._local is None)
        if self._local is not None:
            self.step += 1
            version = self._local.step()
            return Future(lambda: True, lambda: version)
        client, known = self._client, self._state
        assert client is not None
        self.wait()
        push = Push(
            id=PushId(self._name, client.rank, client.incarnation, self.step),
            version=known.version,
            sent=client.bytes_sent,
            received=client.bytes_received,
            measures=Measures(samples=samples),
            body=PushedGradient(),
        )
        with self._session.lock:
            client.push(self._rows.fill(Outstanding(push, self._no_data())))
        step, self.step = self.step, self.step + 1

        def result() -> int:
            with self._session.lock, client.together():
                client.wait(lambda: step not in known.outstanding, "an answer", known)
            return known.version

        def done() -> bool:
            with self._session.lock:
                client.poll()
            return step not in known.outstanding

        return Future(done, result)

    def wait(self) -> None:
        """Wait until the mode lets this worker start its next step."""
        if self._client is None:
            return
        with self._session.lock:
            if self._ahead:
                self._client.wait_for_release(self._name, self.step)
            else:
                self._client.settle(self._name)
                self.step = self._state.released

    def finish(self) -> None:
        """Wait until every push of this worker is answered."""
        if self._client is not None:
            with self._session.lock:
                self._client.settle(self._name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The compression residuals of this worker, by array; the arrays themselves are in the job's checkpoints."""
        return {table.info.name: table.residual for table in self._tables if table.residual is not None}

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
        client, known = self._client, self._state
        return {
            "step": self.step,
            "waited_s": known.waited,
            "staleness": known.staleness,
            "bytes_sent": client.bytes_sent if client else 0,
            "bytes_received": client.bytes_received if client else 0,
        }

    # For the handles.

    def pull_rows(self, number: int, ids: torch.Tensor | None, span: tuple[int, int]) -> Future[torch.Tensor]:
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
                table = self._tables[number]
                if routing is None:
                    return table.shaped(rows.span_pulled(number, request, span))
                found = rows.pulled(number, request, routing)
                return table.shaped(found if places is None else found.index_select(0, places))

        def done() -> bool:
            with self._session.lock:
                client.poll()
                return request.answers is not None

        return Future(done, result)

    def span_clock(self, number: int, span: tuple[int, int]) -> tuple[int, dict[int, int]]:
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
