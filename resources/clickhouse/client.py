"""The one way to ClickHouse, in both profiles: clickhouse-connect's HTTP client with errors mapped to codes."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from clickhouse_connect.driver._backend.models import QueryRuntime
from clickhouse_connect.driver.exceptions import (
    ClickHouseError,
    DataError,
    NotSupportedError,
    ProgrammingError,
)
from clickhouse_connect.driver.httpclient import HttpClient
from clickhouse_connect.driver.httputil import get_pool_manager
from clickhouse_connect.driver.summary import QuerySummary
from urllib3.exceptions import HTTPError

from dpone_dagster.errors import DponeError

# It logs failed requests with their traceback, and so addresses and the server's messages.
logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL + 1)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ClickHouseEndpoint:
    """How to reach a ClickHouse server, or the embedded engine's process.

    Attributes:
        password: kept out of ``repr``.
        compress: worth it over a network; the embedded process refuses it.
    """

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str
    secure: bool = False
    compress: bool = False


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Turn the client's exceptions into ``DponeError``; use it round the reading of a streamed answer.

    Raises:
        DponeError: DPONE_ENGINE_REFUSED, with ClickHouse's error number in ``details["number"]``, when the
            server answered; DPONE_ENGINE_UNAVAILABLE when it did not, so that the outcome is unknown. Neither
            carries the server's message, which quotes statements and values.
    """
    try:
        yield
    except ClickHouseError as error:
        number = getattr(error, "code", None)
        if number is not None:
            raise DponeError(
                "DPONE_ENGINE_REFUSED",
                f"ClickHouse refused a statement with its error number {number}.",
                engine="clickhouse",
                number=int(number),
            ) from None
        if isinstance(error, ProgrammingError | DataError | NotSupportedError):
            # The client's own refusal, before anything was sent; its text may quote a value.
            raise DponeError(
                "DPONE_ENGINE_REFUSED",
                f"The ClickHouse client refused a call before sending it ({type(error).__name__}).",
                engine="clickhouse",
            ) from None
        raise _unavailable(error) from None
    except (HTTPError, ConnectionError, TimeoutError) as error:
        raise _unavailable(error) from None


def _unavailable(error: Exception) -> DponeError:
    return DponeError(
        "DPONE_ENGINE_UNAVAILABLE",
        f"ClickHouse did not answer ({type(error).__name__}).",
        engine="clickhouse",
        error_class=type(error).__name__,
    )


def _mapped(method: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with mapped_errors():
            return method(*args, **kwargs)

    return call


class ClickHouseClient(HttpClient):
    """clickhouse-connect's client whose requests raise ``DponeError`` only, and never send an insert twice.

    The answer of ``query`` is read whole before it returns. The streaming methods read later: wrap their
    reading in ``mapped_errors()``.
    """

    @_mapped
    def query(self, *args: Any, **kwargs: Any) -> Any:
        """Run a query and read its answer whole."""
        result = super().query(*args, **kwargs)
        if hasattr(result, "result_set"):
            _ = result.result_set
        return result

    @_mapped
    def insert(self, *args: Any, **kwargs: Any) -> QuerySummary:
        """Insert rows or columns of Python values."""
        return super().insert(*args, **kwargs)

    @_mapped
    def insert_arrow(self, *args: Any, **kwargs: Any) -> QuerySummary:
        """Insert a pyarrow table."""
        return super().insert_arrow(*args, **kwargs)

    def _map_calls(self) -> None:
        """Map the errors of everything that is sent, and switch off the client's own repetition of inserts.

        The client repeats an insert whose connection closed without an answer, although it may have been
        executed.
        """
        backend = self._backend
        for name in ("execute_query", "execute_command", "execute_raw_query", "execute_raw_stream"):
            setattr(backend, name, _mapped(getattr(backend, name)))
        for name in ("execute_data_insert", "execute_raw_insert"):
            setattr(backend, name, _mapped(_once(getattr(backend, name))))


def _once(method: Callable[..., R]) -> Callable[..., R]:
    def call(*args: Any) -> R:
        return method(*(replace(each, retryable=False) if isinstance(each, QueryRuntime) else each for each in args))

    return call


def connect(
    endpoint: ClickHouseEndpoint,
    *,
    query_prefix: str | None = None,
    settings: Mapping[str, Any] | None = None,
    connect_timeout_seconds: int = 10,
    timeout_seconds: int = 600,
) -> ClickHouseClient:
    """Connect without a session, so that one client may run several statements at once.

    Args:
        query_prefix: tags every statement as its ``log_comment``. A server and the embedded engine alike then
            list and kill it by ``startsWith(Settings['log_comment'], prefix)`` over ``system.processes``.
        settings: engine settings for every statement of this client.
        timeout_seconds: how long an answer may keep silent before the outcome counts as unknown.

    Raises:
        DponeError: DPONE_ENGINE_UNAVAILABLE, DPONE_ENGINE_REFUSED.
    """
    all_settings = dict(settings or {})
    if query_prefix is not None:
        all_settings["log_comment"] = query_prefix
    with mapped_errors():
        client = ClickHouseClient(
            "https" if endpoint.secure else "http",
            endpoint.host,
            endpoint.port,
            endpoint.user,
            endpoint.password,
            endpoint.database,
            compress=endpoint.compress,
            connect_timeout=connect_timeout_seconds,
            send_receive_timeout=timeout_seconds,
            settings=all_settings,
            autogenerate_session_id=False,
            # No text of the server in exceptions: it quotes statements and values.
            show_clickhouse_errors=False,
            # A pool of its own, past any proxy in the environment: closing one client leaves the others
            # alone.
            pool_mgr=get_pool_manager(maxsize=8),
        )
    client._map_calls()
    return client
