"""The ClickHouse engine behind a small HTTP process on the loopback address, one per ``DPONE_HOME``.

One process at a time may open the engine's folder, so workers, tests and the command line share this one and
speak to it as to a ClickHouse server. It is a way to run the engine (chdb), never a database of our own: it
understands what clickhouse-connect's HTTP client sends and refuses the rest.

Understood: ``GET /ping``; ``GET`` and ``POST /`` with the statement in the body, the ``query`` parameter or
both; ``database``, ``query_id``, ``param_*`` and every engine setting as URL parameters, for this statement
only; ``INSERT .. FORMAT X`` followed by data, plain or chunked, in constant memory; ``wait_end_of_query``.
Refused: sessions, roles, compression (the loopback needs none; answers are always plain), forms, other
methods.

What differs from a server:
  * The engine ignores a query id. It becomes the statement's ``log_comment`` unless the client sets one, so
    running statements are found, in both profiles, by ``Settings['log_comment']`` of ``system.processes``.
  * A statement outlives a client that goes away before the first byte of the answer: whoever takes over
    kills it.
  * A statement that is killed mostly fails with 394, but in its last moments it may instead end with a part of
    its answer, even none, and no error. So a kill is for statements whose answers nobody acts on any more, and
    every attempt has a ``log_comment`` prefix of its own.
  * Sync settings are the engine's own: parts are written without fsync. Data survives the death of any
    process, power loss only as far as the file system goes.

Answers in a streamable format are passed on as the engine makes them, so a large one needs constant memory
here; with ``wait_end_of_query=1`` they are spooled first (to ``run/`` beyond a few megabytes), so that an
error always has its own HTTP status. Other formats are small by their use and are buffered by the engine. A
failure in mid-answer sends ClickHouse's in-band exception and breaks the connection off, so it never looks
complete.

Statements, data and the engine's messages are never logged; the engine's message goes to the client that
asked.
"""

import argparse
import base64
import contextlib
import functools
import hmac
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import psutil
import pyarrow as pa

from dpone_dagster.errors import DponeError
from resources.clickhouse.client import ClickHouseEndpoint
from resources.embedded.home import Home
from resources.embedded.processes import end, is_running, keep, private

DATABASE = "marts"
RECORD = "clickhouse.json"
LOG = "clickhouse.log"
START_SECONDS = 90
AFTER_EXIT_SECONDS = 5
STOP_SECONDS = 30
CLOSE_SECONDS = 5
SPOOL_BYTES = 8 << 20
UNKNOWN_EXCEPTION = 1002  # ClickHouse's own number for what has none
STATEMENT_BYTES = 64 << 20

# ------------------------------------------------------------------------------- starting and stopping it


@dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """``run/clickhouse.json``: how to reach the process and how to be sure that it is the one.

    Attributes:
        started: the process's start time in seconds since the epoch; that of a recycled pid differs.
        token: the password; the file is readable by its owner only.
    """

    pid: int
    started: float
    port: int
    token: str

    @property
    def endpoint(self) -> ClickHouseEndpoint:
        """The record as the endpoint that clients connect to."""
        return ClickHouseEndpoint(
            host="127.0.0.1", port=self.port, user="default", password=self.token, database=DATABASE
        )


def find(home: Home) -> ServerRecord | None:
    """Return the record of the process that serves this home, else None."""
    try:
        record = ServerRecord(**json.loads((home.run / RECORD).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return record if _process(record) else None


def start(home: Home) -> ServerRecord:
    """Start the process unless it runs; the caller holds the home's lock.

    It gets a session of its own and outlives this process; ``stop`` ends it.

    Raises:
        DponeError: DPONE_ENGINE_UNAVAILABLE.
    """
    if record := find(home):
        return record
    package_root = Path(__file__).resolve().parents[2]
    search_path = os.pathsep.join([str(package_root), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(home.run / LOG, "ab", opener=private) as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "resources.embedded.clickhouse_server", str(home.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home.run,
            env={**os.environ, "PYTHONPATH": search_path, "TZ": "UTC"},
            start_new_session=True,
        )
    keep(child)
    deadline, grace = time.monotonic() + START_SECONDS, 0.0
    while time.monotonic() < deadline:
        if record := find(home):
            return record
        if child.poll() is not None:
            # It fails when a process whose starter was killed has the folder open; that one's record is due.
            grace = grace or time.monotonic() + AFTER_EXIT_SECONDS
            deadline = min(deadline, grace)
        time.sleep(0.02)
    if child.poll() is None:
        child.kill()
        child.wait()
    raise DponeError(
        "DPONE_ENGINE_UNAVAILABLE",
        f"The ClickHouse process did not start (it ended with code {child.returncode}).",
        next_step=f"Look at run/{LOG} in DPONE_HOME, then run `dpone up` again.",
    )


def stop(home: Home) -> bool:
    """Stop the process that serves this home and return whether one ran; the caller holds the home's lock."""
    record = find(home)
    process = _process(record) if record else None
    if process is None:
        return False
    # The engine recovers from SIGKILL, so that is what a process gets that does not end by itself.
    if not any(end(process, number, STOP_SECONDS) for number in (signal.SIGTERM, signal.SIGKILL)):
        raise DponeError(
            "DPONE_ENGINE_UNAVAILABLE",
            f"The ClickHouse process ({process.pid}) did not stop.",
            next_step="Run `dpone down` again.",
        )
    (home.run / RECORD).unlink(missing_ok=True)
    return True


def _process(record: ServerRecord) -> psutil.Process | None:
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.started) < 1 and is_running(process)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return process if same else None


# --------------------------------------------------------------------------- reading what the client sent


class Refused(Exception):
    """A request that is not answered by the engine: HTTP status, ClickHouse's number for it, and why."""

    def __init__(self, status: int, number: int, reason: str) -> None:
        self.status, self.number, self.reason = status, number, reason
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement as the client sent it.

    Attributes:
        insert_format: the format of the data that follows ``INSERT .. FORMAT X``; None for other statements.
        data: the first bytes of that data; the rest is still in the request.
    """

    sql: str
    insert_format: str | None = None
    data: bytes = b""


# Quoted text, a comment, a word, or any other single byte.
_TOKEN = re.compile(
    rb"`(?:[^`\\]|\\.|``)*`|\"(?:[^\"\\]|\\.|\"\")*\"|'(?:[^'\\]|\\.|'')*'|--[^\n]*|/\*.*?\*/|\w+|\S",
    re.DOTALL,
)
_FORMAT_SOMEWHERE = re.compile(r"\bFORMAT\b", re.IGNORECASE)
_FORMAT_NAME = re.compile(rb"\s+(\w+)[ \t]*;?[ \t]*(?:\r?\n)?")
_FIRST_WORD = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/|\()*(\w*)", re.DOTALL)
_FORMAT_AT_END = re.compile(r"\bFORMAT\s+(\w+)\s*(?:SETTINGS\s+[\w\s=,'.-]+)?;?\s*$", re.IGNORECASE | re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*", re.ASCII)
_NUMBER = re.compile(r"Code: (\d+)\. DB::")

# What the HTTP client sends to the transport, and not to the statement.
_TRANSPORT = {"query", "database", "query_id", "wait_end_of_query", "default_format", "buffer_size"}
_TRANSPORT |= {"client_protocol_version", "enable_http_compression", "send_progress_in_http_headers"}
_TRANSPORT |= {"http_headers_progress_interval_ms", "cancel_http_readonly_queries_on_client_close"}
_UNSUPPORTED = {"session_id", "session_timeout", "session_check", "role", "quota_key"}
_UNSUPPORTED |= {"compress", "decompress"}

# A statement that starts so has an answer, even one without rows; the client tells it from DDL by a header.
_ANSWERED = {"SELECT", "WITH", "SHOW", "DESCRIBE", "DESC", "EXISTS", "EXPLAIN", "KILL", "CHECK", "VALUES"}

# Formats whose pieces, one after the other, are the whole; and Arrow's two, whose pieces are framed anew.
_PIECEWISE = {"Native", "TabSeparated", "TSV", "CSV", "JSONEachRow", "RowBinary"}
_ARROW = {"Arrow", "ArrowStream"}


def split_insert(head: bytes, *, complete: bool) -> Statement | None:
    """Recognise ``INSERT INTO .. FORMAT X`` followed by data; None for any other statement.

    Args:
        head: the beginning of the request.
        complete: whether that is all of it; if not, a line break after the format shows that its name is whole.
    """
    words = (each for each in _TOKEN.finditer(head) if not each.group().startswith((b"--", b"/*")))
    if [each.group().upper() for each in itertools.islice(words, 2)] != [b"INSERT", b"INTO"]:
        return None
    for each in words:
        word = each.group().upper()
        if word in (b"SELECT", b"VALUES", b"WITH", b"FROM"):
            return None
        if word == b"FORMAT":
            named = _FORMAT_NAME.match(head, each.end())
            if not named or not (complete or named.group().endswith(b"\n")):
                return None
            return Statement(
                sql=_decode(head[: each.start()]),
                insert_format=named.group(1).decode(),
                data=head[named.end() :],
            )
    return None


def _decode(sql: bytes) -> str:
    try:
        return sql.decode()
    except UnicodeDecodeError:
        raise Refused(400, 62, "The statement is not UTF-8.") from None


def _literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


class Body:
    """A request body, plain or chunked, read piece by piece; a body that ends early raises ConnectionError."""

    def __init__(self, stream: BufferedIOBase, headers: Any) -> None:
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused(415, 48, "Compressed bodies are not supported here: connect with compress=False.")
        if headers.get("Content-Type", "").lower().startswith(("multipart/", "application/x-www-form")):
            raise Refused(501, 48, "Forms are not supported here.")
        self._stream = stream
        self._chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        try:
            self._left = 0 if self._chunked else int(headers.get("Content-Length") or 0)
        except ValueError:
            raise Refused(400, 62, "Content-Length is not a number.") from None
        self._done = not self._chunked and self._left == 0

    def read(self, size: int = 1 << 20) -> bytes:
        """Return at most ``size`` bytes; empty at the end."""
        if self._done:
            return b""
        if self._chunked and self._left == 0:
            self._left = int(self._line().split(b";")[0], 16)
            if self._left == 0:
                while self._line():
                    pass  # trailers
                self._done = True
                return b""
        data = self._stream.read(min(size, self._left))
        if not data:
            raise ConnectionError("the request body ended early")
        self._left -= len(data)
        if self._left == 0:
            if self._chunked:
                self._line()
            else:
                self._done = True
        return data

    def drain(self) -> None:
        """Read the rest, so that a client that still sends gets to read its answer."""
        while self.read():
            pass

    def _line(self) -> bytes:
        line = self._stream.readline(1 << 10)
        if not line.endswith(b"\n"):
            raise ConnectionError("the request body ended early")
        return line.strip()


# ---------------------------------------------------------------------------------------------- the engine


class Engine:
    """The engine's folder, open once; every statement gets a connection of its own, so settings never leak.

    Opening the folder leaks and costs, which is why one connection stays open for the life of the process;
    another one beside it costs about a millisecond and leaves nothing behind.
    """

    def __init__(self, folder: Path) -> None:
        import chdb

        self._connect: Callable[[], Any] = functools.partial(chdb.connect, str(folder))
        self._keeper = self._connect()
        self._keeper.query(f"CREATE DATABASE IF NOT EXISTS {DATABASE} ENGINE = Atomic")

    @contextlib.contextmanager
    def connection(self, params: dict[str, str], *, read_only: bool) -> Iterator[Any]:
        """Open a connection with the statement's settings, parameters and database."""
        settings = {name: value for name, value in params.items() if name not in _TRANSPORT}
        if refused := sorted(settings.keys() & _UNSUPPORTED):
            raise Refused(501, 48, f"The URL parameter {refused[0]} is not supported here.")
        if any(not _NAME.fullmatch(name) for name in settings):
            raise Refused(400, 115, "A URL parameter is not the name of a setting.")
        if query_id := params.get("query_id"):
            settings.setdefault("log_comment", query_id)
        if read_only:
            settings["readonly"] = "2"
        connection = self._connect()
        try:
            if database := params.get("database"):
                escaped = database.replace("\\", "\\\\").replace("`", "\\`")
                connection.query(f"USE `{escaped}`")
            if settings:
                pairs = [f"{name} = {_literal(value)}" for name, value in settings.items()]
                connection.query("SET " + ", ".join(pairs))
            yield connection
        finally:
            connection.close()

    def close(self) -> None:
        """End what runs and close the folder; what does not end in time is left to the engine's recovery."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(RuntimeError):
            self._keeper.query("KILL QUERY WHERE query_kind != 'KillQuery' ASYNC")
            running = "SELECT count() > 1 FROM system.processes"
            while self._keeper.query(running).bytes() == b"1\n" and time.monotonic() < deadline:
                time.sleep(0.01)
        self._keeper.close()


def engine_error(error: RuntimeError) -> tuple[int, str]:
    """ClickHouse's number and message of an engine's error, without what chdb says before it."""
    found = _NUMBER.search(str(error))
    return (int(found.group(1)), str(error)[found.start() :]) if found else (UNKNOWN_EXCEPTION, str(error))


class ArrowFrames:
    """Puts the engine's pieces, each an Arrow document of its own, into one document, batch by batch."""

    closed = False  # pyarrow writes to this object as to a file

    def __init__(self, fmt: str) -> None:
        self._is_file = fmt == "Arrow"
        self._written: list[bytes] = []
        self._length = 0
        self._writer: Any = None

    def add(self, piece: bytes) -> bytes:
        """Return what the piece adds to the one document."""
        if self._is_file:
            file = pa.ipc.open_file(piece)
            schema, batches = file.schema, [file.get_batch(at) for at in range(file.num_record_batches)]
        else:
            stream = pa.ipc.open_stream(piece)
            schema, batches = stream.schema, list(stream)
        if self._writer is None:
            new = pa.ipc.new_file if self._is_file else pa.ipc.new_stream
            self._writer = new(pa.PythonFile(cast(Any, self), mode="w"), schema)
        for batch in batches:
            self._writer.write_batch(batch)
        return self._take()

    def end(self) -> bytes:
        """Return the end of the document."""
        self._writer.close()
        return self._take()

    def write(self, data: Any) -> int:
        """Collect what pyarrow writes."""
        self._written.append(bytes(data))
        self._length += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes written so far; Arrow's file format keeps offsets."""
        return self._length

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to close."""

    def _take(self) -> bytes:
        taken = b"".join(self._written)
        self._written.clear()
        return taken


def first_word(sql: str) -> str:
    """The statement's first word in capitals, past comments and opening brackets."""
    match = _FIRST_WORD.match(sql)
    return match.group(1).upper() if match else ""


def answer_format(sql: str, params: dict[str, str]) -> tuple[str, bool]:
    """The output format of a statement, and whether that is certain without a parser of our own."""
    if at_end := _FORMAT_AT_END.search(sql):
        return at_end.group(1), True
    return params.get("default_format", "TabSeparated"), not _FORMAT_SOMEWHERE.search(sql)


def pieces(connection: Any, sql: str, fmt: str, *, certain: bool) -> Generator[bytes, None, None]:
    """Run a statement and yield its answer, piece by piece where statement and format allow it."""
    if certain and first_word(sql) in ("SELECT", "WITH") and fmt in _PIECEWISE | _ARROW:
        frames = ArrowFrames(fmt) if fmt in _ARROW else None
        empty = True
        with connection.send_query(sql, fmt) as stream:
            for piece in stream:
                empty = False
                yield frames.add(piece.bytes()) if frames else piece.bytes()
        if frames and not empty:
            yield frames.end()
        if not (frames and empty):
            return
        # A stream without rows has no schema, and Arrow needs one: ask again, buffered.
    yield connection.query(sql, fmt).bytes()


# ------------------------------------------------------------------------------------------------ over HTTP


class Server(ThreadingHTTPServer):
    """The listening socket, one thread a client connection."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, engine: Engine, token: str, run: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine, self.token, self.run_folder = engine, token, run

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event; nothing of its request is logged."""


class Handler(BaseHTTPRequestHandler):
    """One client connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    timeout = 3600  # an idle keep-alive connection is closed after that
    server: Server
    _answering = False

    def log_message(self, format: str, *args: Any) -> None:
        """No request is logged."""

    def do_GET(self) -> None:
        """Answer a ping or a reading statement."""
        if self.path == "/ping":
            self._answer(200, b"Ok.\n", {})
        else:
            self._serve(read_only=True)

    def do_POST(self) -> None:
        """Answer any statement."""
        self._serve(read_only=False)

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._answer(405, b"Only GET and POST are understood here.\n", {"Allow": "GET, POST"})

    do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = _refuse_method

    def _serve(self, *, read_only: bool) -> None:
        body: Body | None = None
        self._answering = False
        try:
            self._authenticate()
            target = urlsplit(self.path)
            if target.path != "/":
                raise Refused(404, 48, "There is nothing at this path.")
            params = dict(parse_qsl(target.query, keep_blank_values=True))
            body = Body(self.rfile, self.headers)
            head = params.get("query", "").encode()
            head += b"\n" if head else b""
            insert = None
            while not insert and len(head) < STATEMENT_BYTES and (data := body.read()):
                head += data
                insert = split_insert(head, complete=False)
            insert = insert or split_insert(head, complete=True)
            if not insert and body.read(1):
                raise Refused(413, 62, f"A statement may have {STATEMENT_BYTES} bytes.")
            with self.server.engine.connection(params, read_only=read_only) as connection:
                if insert:
                    self._insert(connection, insert, body, params)
                else:
                    self._query(connection, _decode(head).strip(), params)
        except ConnectionError:
            self.close_connection = True
        except Refused as refused:
            self._fail(refused.status, refused.number, refused.reason, body)
        except RuntimeError as error:  # chdb's own error class is one
            self._fail(500, *engine_error(error), body)

    def _authenticate(self) -> None:
        given = self.headers.get("X-ClickHouse-Key", "")
        scheme, _, credentials = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                given = base64.b64decode(credentials).decode().partition(":")[2]
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise Refused(403, 516, "Authentication failed.")

    def _insert(self, connection: Any, insert: Statement, body: Body, params: dict[str, str]) -> None:
        # Leaving the block without finish() cancels: a body that ends early inserts no further block.
        with connection.send_insert(insert.sql, insert.insert_format) as inserter:
            data = insert.data or body.read()
            while data:
                inserter.append(data)
                data = body.read()
            written = inserter.finish()
        self._answer(200, b"", self._headers(params, rows=written.rows_written, bytes_=written.bytes_written))

    def _query(self, connection: Any, sql: str, params: dict[str, str]) -> None:
        if not sql:
            raise Refused(400, 62, "There is no statement.")
        if connection._conn.classify_query(sql)["statement_count"] > 1:
            raise Refused(400, 62, "One statement at a time.")
        fmt, certain = answer_format(sql, params)
        headers = self._headers(params) | ({"X-ClickHouse-Format": fmt} if first_word(sql) in _ANSWERED else {})
        # Closing the answer cancels what still runs, for instance after the client went away.
        with contextlib.closing(pieces(connection, sql, fmt, certain=certain)) as answer:
            if params.get("wait_end_of_query") == "1":
                self._spooled(answer, headers)
            else:
                self._streamed(answer, headers)

    def _spooled(self, answer: Iterator[bytes], headers: dict[str, str]) -> None:
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=str(self.server.run_folder)) as spool:
            for piece in answer:
                spool.write(piece)
            length = spool.tell()
            spool.seek(0)
            self._begin(200, headers | {"Content-Length": str(length)})
            while data := spool.read(1 << 20):
                self.wfile.write(data)

    def _streamed(self, answer: Iterator[bytes], headers: dict[str, str]) -> None:
        first, second = next(answer, b""), next(answer, None)
        if second is None:
            self._answer(200, first, headers)
            return
        tag = secrets.token_hex(8)
        self._begin(200, headers | {"Transfer-Encoding": "chunked", "X-ClickHouse-Exception-Tag": tag})
        try:
            for piece in itertools.chain((first, second), answer):
                self._chunk(piece)
        except RuntimeError as error:
            # No last chunk after this: the client sees the exception, or else an answer that breaks off.
            message = engine_error(error)[1].encode() + b"\n"
            mark = tag.encode()
            self._chunk(b"__exception__\r\n%b\r\n%b%d %b\r\n__exception__\r\n" % (mark, message, len(message), mark))
            self.close_connection = True
            return
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        if data:
            self.wfile.write(b"%x\r\n" % len(data))
            self.wfile.write(data)
            self.wfile.write(b"\r\n")

    def _headers(self, params: dict[str, str], *, rows: int = 0, bytes_: int = 0) -> dict[str, str]:
        return {
            "X-ClickHouse-Query-Id": params.get("query_id", ""),
            "X-ClickHouse-Timezone": "UTC",
            "X-ClickHouse-Summary": json.dumps({"written_rows": str(rows), "written_bytes": str(bytes_)}),
        }

    def _fail(self, status: int, number: int, reason: str, body: Body | None) -> None:
        if self._answering:
            self.close_connection = True
            return
        try:
            if body is None:
                self.close_connection = True
            else:
                body.drain()
            self._answer(status, reason.encode() + b"\n", {"X-ClickHouse-Exception-Code": str(number)})
        except ConnectionError:
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._begin(status, {**headers, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self._answering = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value.replace("\r", "").replace("\n", ""))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def main() -> int:
    """Serve one home until SIGTERM."""
    parser = argparse.ArgumentParser(description="The ClickHouse engine of one DPONE_HOME, over loopback HTTP.")
    parser.add_argument("home", type=Path)
    home = Home(root=parser.parse_args().home)
    os.umask(0o077)
    terminate = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: terminate.set())
    engine = Engine(home.clickhouse)
    # From here on nothing is printed: a crash report of the engine would carry the statement.
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    token = secrets.token_urlsafe(32)
    server = Server(engine, token, home.run)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    record = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "port": server.server_address[1],
        "token": token,
    }
    draft = home.run / f"{RECORD}.new"
    with open(draft, "w", opener=private) as file:
        json.dump(record, file)
    draft.replace(home.run / RECORD)
    terminate.wait()
    server.shutdown()
    server.server_close()
    engine.close()
    # Threads of clients that still hang on must not keep a closed engine's process alive.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
