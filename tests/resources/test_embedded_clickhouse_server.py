"""The embedded ClickHouse process, spoken to with plain HTTP as well as through the client."""

import base64
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import psutil
import pyarrow as pa
import pytest

from dpone_dagster.errors import DponeError
from resources.clickhouse.client import ClickHouseClient, ClickHouseEndpoint, connect, mapped_errors
from resources.embedded import clickhouse_server
from resources.embedded.clickhouse_server import answer_format, first_word, split_insert
from resources.embedded.engines import Engines
from resources.embedded.home import Home

Call = Callable[..., http.client.HTTPResponse]


def basic(endpoint: ClickHouseEndpoint, password: str | None = None) -> dict[str, str]:
    secret = endpoint.password if password is None else password
    return {"Authorization": "Basic " + base64.b64encode(f"default:{secret}".encode()).decode()}


@pytest.fixture
def call(engines: Engines, ch_database: str) -> Iterator[Call]:
    """Sends one request and returns the response, its body unread."""
    connections: list[http.client.HTTPConnection] = []

    def send(
        sql: str | bytes = "",
        *,
        method: str = "POST",
        path: str = "/",
        headers: dict[str, str] | None = None,
        password: str | None = None,
        **params: str,
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(engines.clickhouse.host, engines.clickhouse.port, timeout=60)
        connections.append(connection)
        query = urlencode({"database": ch_database, **params})
        sent = {**basic(engines.clickhouse, password), **(headers or {})}
        connection.request(method, f"{path}?{query}", sql, sent)
        return connection.getresponse()

    yield send
    for connection in connections:
        connection.close()


@pytest.fixture
def server(home: Home, engines: Engines) -> psutil.Process:
    record = clickhouse_server.find(home)
    assert record is not None
    return psutil.Process(record.pid)


# ---------------------------------------------------------------------------------------- who may come in


def test_it_listens_on_the_loopback_only(server: psutil.Process) -> None:
    listening = [each.laddr.ip for each in server.net_connections() if each.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]


def test_ping_needs_no_token_and_everything_else_does(call: Call, engines: Engines) -> None:
    connection = http.client.HTTPConnection(engines.clickhouse.host, engines.clickhouse.port)
    connection.request("GET", "/ping")
    assert connection.getresponse().read() == b"Ok.\n"
    for wrong in ("", "x", engines.clickhouse.password[:-1], engines.clickhouse.password + "x"):
        answer = call("SELECT 1", password=wrong)
        assert answer.status == 403
        assert answer.headers["X-ClickHouse-Exception-Code"] == "516"
    assert call("SELECT 1", headers={"Authorization": "Bearer x"}).status == 403
    by_header = call("SELECT 1", headers={"Authorization": "", "X-ClickHouse-Key": engines.clickhouse.password})
    assert by_header.read() == b"1\n"


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (405, {"method": "PUT"}),
        (405, {"method": "DELETE"}),
        (404, {"path": "/replicas_status"}),
        (400, {"sql": ""}),
        (400, {"sql": "SELECT 1; SELECT 2"}),
        (400, {"sql": b"SELECT '\xff'"}),
        (400, {"sql": "SELECT 1", "max_threads = 1, max_block_size": "1"}),
        (501, {"sql": "SELECT 1", "session_id": "s"}),
        (501, {"sql": "SELECT 1", "role": "r"}),
        (501, {"sql": "SELECT 1", "compress": "1"}),
        (501, {"sql": "x=1", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}),
        (415, {"sql": "SELECT 1", "headers": {"Content-Encoding": "gzip"}}),
        (500, {"sql": "SELECT 1", "no_such_setting": "1"}),
        (500, {"sql": "SELECT 1", "database": "no_such_database"}),
    ],
)
def test_what_is_not_supported_is_refused(call: Call, status: int, request_: dict[str, str]) -> None:
    answer = call(**request_)
    assert answer.status == status
    assert answer.read()


def test_get_only_reads(call: Call) -> None:
    assert call(method="GET", query="SELECT 1 + 1").read() == b"2\n"
    answer = call(method="GET", query="CREATE TABLE t (a Int8) ENGINE = Memory")
    assert (answer.status, answer.headers["X-ClickHouse-Exception-Code"]) == (500, "164")  # READONLY


# --------------------------------------------------------------------------------------------- statements


def test_an_error_has_its_number_and_leaves_the_connection_usable(engines: Engines) -> None:
    connection = http.client.HTTPConnection(engines.clickhouse.host, engines.clickhouse.port)
    for sql, number in (("SELECT no_such_column", "47"), ("SELEC 1", "62"), ("SELECT * FROM no_such", "60")):
        connection.request("POST", "/", sql, basic(engines.clickhouse))
        answer = connection.getresponse()
        assert (answer.status, answer.headers["X-ClickHouse-Exception-Code"]) == (500, number)
        assert answer.read().startswith(f"Code: {number}. DB::Exception".encode())
    connection.request("POST", "/", "SELECT 1", basic(engines.clickhouse))
    assert connection.getresponse().read() == b"1\n"


def test_settings_hold_for_their_statement_only(clickhouse: ClickHouseClient) -> None:
    ask = "SELECT getSetting('max_block_size')"
    usual = clickhouse.command(ask)
    assert clickhouse.command(ask, settings={"max_block_size": 77}) == 77
    assert clickhouse.command(ask) == usual != 77
    # A setting that changes what the engine does: 10 rows in blocks of at most 4.
    blocks = clickhouse.query("SELECT DISTINCT blockSize() FROM numbers(10)", settings={"max_block_size": 4})
    assert {row[0] for row in blocks.result_rows} == {4, 2}


def test_bound_parameters_arrive_exactly(clickhouse: ClickHouseClient) -> None:
    text = "a'b\\c\td\ne\"f`é\u4e2d"
    row = clickhouse.query(
        "SELECT {t:String}, {a:Array(String)}, {n:Int64}", parameters={"t": text, "a": ["q'", "r\\"], "n": -5}
    ).result_rows[0]
    assert row == (text, ["q'", "r\\"], -5)


def test_a_format_that_is_not_at_the_end_is_still_whole(call: Call) -> None:
    answer = call("SELECT number FROM numbers(300000) FORMAT ArrowStream -- comment")
    assert pa.ipc.open_stream(answer.read()).read_all().num_rows == 300_000


def test_an_empty_result_is_told_from_ddl(clickhouse: ClickHouseClient) -> None:
    assert clickhouse.command("SELECT 1 WHERE 0") == ""
    assert clickhouse.query("SELECT number FROM numbers(0)").result_rows == []
    empty = clickhouse.query_arrow("SELECT toInt32(number) AS n FROM numbers(0)")
    assert (empty.num_rows, empty.schema.names, empty.schema.field("n").type) == (0, ["n"], pa.int32())
    assert clickhouse.query("SELECT 1 AS a, 'x' AS b LIMIT 0").column_names == ("a", "b")


def test_the_query_id_becomes_the_log_comment_unless_there_is_one(call: Call) -> None:
    ask = "SELECT Settings['log_comment'] FROM system.processes WHERE query LIKE '%q7f3%'"
    answer = call(ask, query_id="id-7")
    assert answer.read() == b"id-7\n"
    assert answer.headers["X-ClickHouse-Query-Id"] == "id-7"
    assert call(ask, query_id="id-7", log_comment="mine").read() == b"mine\n"


@pytest.mark.parametrize(
    "slow",
    [
        "SELECT count() FROM numbers(1000000000000) WHERE sipHash64(number) = 1",
        "INSERT INTO sink SELECT number FROM numbers(1000000000000) WHERE sipHash64(number) = 1",
    ],
)
def test_running_statements_are_listed_and_killed_by_prefix(
    clickhouse: ClickHouseClient, engines: Engines, ch_database: str, slow: str
) -> None:
    clickhouse.command("CREATE TABLE sink (n UInt64) ENGINE = MergeTree ORDER BY n")
    victim = connect(
        ClickHouseEndpoint(**{**vars(engines.clickhouse), "database": ch_database}), query_prefix="pre-1:op"
    )
    raised: list[BaseException] = []

    def run() -> None:
        try:
            victim.command(slow)
        except DponeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    listed = "SELECT count() FROM system.processes WHERE startsWith(Settings['log_comment'], 'pre-1:')"
    deadline = time.monotonic() + 20
    while clickhouse.command(listed) != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert clickhouse.command(listed.replace("pre-1:", "pre-2:")) == 0
    killed = clickhouse.query("KILL QUERY WHERE startsWith(Settings['log_comment'], 'pre-1:') SYNC")
    assert len(killed.result_rows) == 1
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(raised[0], DponeError)
    assert raised[0].details["number"] == 394  # QUERY_WAS_CANCELLED
    assert clickhouse.command(listed) == 0
    victim.close()


# ------------------------------------------------------------------------------------- data in and out


def test_a_million_rows_go_in_and_out_as_arrow_unchanged(clickhouse: ClickHouseClient) -> None:
    rows = 1_000_000
    table = pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "name": pa.array([None if each % 10 == 0 else f"é{each}" for each in range(rows)], pa.string()),
            "price": pa.array(range(rows), pa.int64()).cast(pa.decimal128(38, 0)).cast(pa.decimal128(38, 4)),
            "at": pa.array(range(1_700_000_000_000_000, 1_700_000_000_000_000 + rows), pa.timestamp("us", "UTC")),
        }
    )
    clickhouse.command(
        "CREATE TABLE t (id Int64, name Nullable(String), price Decimal(38, 4), at DateTime64(6, 'UTC')) "
        "ENGINE = MergeTree ORDER BY id"
    )
    assert clickhouse.insert_arrow("t", table).written_rows == rows
    back = clickhouse.query_arrow("SELECT * FROM t ORDER BY id", use_strings=True)
    assert back.cast(table.schema).equals(table)
    with clickhouse.query_arrow_stream("SELECT * FROM t ORDER BY id", use_strings=True) as stream:
        assert pa.Table.from_batches(stream).cast(table.schema).equals(table)
    assert clickhouse.command("SELECT sum(id), countIf(name IS NULL) FROM t") == [str(499_999_500_000), "100000"]


def test_native_rows_and_a_raw_file_go_in(clickhouse: ClickHouseClient) -> None:
    clickhouse.command("CREATE TABLE t (`FORMAT x` Int8, b String) ENGINE = MergeTree ORDER BY b")
    clickhouse.insert("t", [[1, "one"], [2, "two"]], column_names=["FORMAT x", "b"])
    clickhouse.raw_insert("t", ["FORMAT x", "b"], "3,three\n", fmt="CSV")
    clickhouse.raw_insert("t", ["FORMAT x", "b"], iter([b"4,fo", b"ur\n"]), fmt="CSV")
    clickhouse.command("INSERT INTO t VALUES (5, 'five')")
    clickhouse.command("INSERT INTO t SELECT 6, 'six'")
    rows = clickhouse.query("SELECT * FROM t ORDER BY `FORMAT x`").result_rows
    assert rows == [(1, "one"), (2, "two"), (3, "three"), (4, "four"), (5, "five"), (6, "six")]


def test_an_insert_that_fails_to_parse_has_its_number_and_inserts_nothing(clickhouse: ClickHouseClient) -> None:
    clickhouse.command("CREATE TABLE t (a Int8) ENGINE = MergeTree ORDER BY a")
    with pytest.raises(DponeError) as refused:
        clickhouse.raw_insert("t", ["a"], "1\nx\n", fmt="CSV")
    assert refused.value.details["number"] == 117  # INCORRECT_DATA
    with pytest.raises(DponeError) as refused:
        clickhouse.raw_insert("no_such", ["a"], "1\n", fmt="CSV")
    assert refused.value.details["number"] == 60  # UNKNOWN_TABLE
    assert clickhouse.command("SELECT count() FROM t") == 0


def test_a_body_that_breaks_off_inserts_nothing(
    clickhouse: ClickHouseClient, engines: Engines, ch_database: str
) -> None:
    clickhouse.command("CREATE TABLE t (a Int8) ENGINE = MergeTree ORDER BY a")
    endpoint = engines.clickhouse
    head = (
        f"POST /?database={ch_database} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        f"X-ClickHouse-Key: {endpoint.password}\r\n\r\n"
    )
    statement = b"INSERT INTO t FORMAT CSV\n1\n2\n3\n"
    with socket.create_connection((endpoint.host, endpoint.port)) as raw:
        raw.sendall(head.encode() + b"%x\r\n%b\r\n" % (len(statement), statement))
        time.sleep(0.3)  # the rows are there; the end of the body never comes
    running = "SELECT count() FROM system.processes WHERE query LIKE 'INSERT INTO t%' AND current_database = "
    deadline = time.monotonic() + 20
    while clickhouse.command(f"{running}'{ch_database}'") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert clickhouse.command("SELECT count() FROM t") == 0


def test_large_answers_stream_in_flat_memory(own_home: Home) -> None:
    # An engine of its own: what other tests do to the shared one would be measured as well.
    own_home.create()
    found = clickhouse_server.start(own_home)
    clickhouse, server = connect(found.endpoint), psutil.Process(found.pid)

    def read(rows: int) -> tuple[int, int]:
        peak = size = 0
        response = clickhouse.raw_stream(
            f"SELECT number, repeat('x', 1000) FROM numbers({rows})",
            fmt="Native",
            settings={"max_threads": 1, "max_block_size": 8192},
        )
        for chunk in response.stream(1 << 20):
            size += len(chunk)
            peak = max(peak, server.memory_info().rss)
        return size, peak

    read(100_000)  # warm
    _, small = read(100_000)
    size, large = read(1_000_000)
    assert size > 1_000_000_000
    assert large - small < 150 << 20  # a buffered answer would add a gigabyte


def test_answers_to_be_waited_for_are_whole_and_plain(call: Call) -> None:
    answer = call("SELECT number FROM numbers(3000000) FORMAT CSV", wait_end_of_query="1")
    assert answer.headers["Transfer-Encoding"] is None
    lines = answer.read().split()
    assert (len(lines), lines[0], lines[-1]) == (3_000_000, b"0", b"2999999")


def test_a_failure_in_mid_answer_never_looks_like_success(call: Call, clickhouse: ClickHouseClient) -> None:
    sql = "SELECT number, throwIf(number = 5000000) FROM numbers(10000000)"
    streamed = call(f"{sql} FORMAT Native", max_threads="1")
    assert streamed.status == 200
    with pytest.raises(http.client.IncompleteRead) as broken:
        streamed.read()
    assert b"Code: 395" in broken.value.partial[-2000:]

    waited = call(f"{sql} FORMAT Native", wait_end_of_query="1")
    assert (waited.status, waited.headers["X-ClickHouse-Exception-Code"]) == (500, "395")

    def read_stream(stream: Any) -> None:
        with mapped_errors(), stream as parts:
            for _ in parts:
                pass

    with pytest.raises(DponeError) as refused:
        read_stream(clickhouse.query_row_block_stream(sql))
    assert refused.value.details["number"] == 395
    with pytest.raises(DponeError):
        read_stream(clickhouse.query_arrow_stream(sql))
    for read in (clickhouse.query, clickhouse.query_arrow, clickhouse.raw_query):
        with pytest.raises(DponeError) as refused:
            read(sql)
        assert refused.value.details["number"] == 395


def test_a_reader_that_goes_away_ends_its_statement(clickhouse: ClickHouseClient, engines: Engines) -> None:
    reader = http.client.HTTPConnection(engines.clickhouse.host, engines.clickhouse.port)
    sql = "SELECT number FROM system.numbers FORMAT Native"
    reader.request("POST", "/?log_comment=gone-1", sql, basic(engines.clickhouse))
    answer = reader.getresponse()
    assert answer.read(1000)
    listed = "SELECT count() FROM system.processes WHERE Settings['log_comment'] = 'gone-1'"
    assert clickhouse.command(listed) == 1
    answer.close()
    reader.close()
    deadline = time.monotonic() + 20
    while clickhouse.command(listed) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert clickhouse.command(listed) == 0


def test_many_statements_leave_nothing_behind(clickhouse: ClickHouseClient, server: psutil.Process) -> None:
    for _ in range(50):
        clickhouse.command("SELECT 1", settings={"max_threads": 2})
    threads, files, memory = server.num_threads(), server.num_fds(), server.memory_info().rss
    for _ in range(500):
        clickhouse.command("SELECT 1", settings={"max_threads": 2})
    assert server.num_threads() - threads < 20
    assert server.num_fds() - files < 50
    assert server.memory_info().rss - memory < 30 << 20


# --------------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("head", "sql", "fmt", "data"),
    [
        (b"INSERT INTO t (a) FORMAT Native\n\x01\x02", "INSERT INTO t (a) ", "Native", b"\x01\x02"),
        (b"insert into `FORMAT x`\n format CSV \r\n1", "insert into `FORMAT x`\n ", "CSV", b"1"),
        (b"/* FORMAT A */ INSERT INTO t FORMAT B\n", "/* FORMAT A */ INSERT INTO t ", "B", b""),
        (b"INSERT INTO t SETTINGS a = 1 FORMAT Arrow\nARROW1", "INSERT INTO t SETTINGS a = 1 ", "Arrow", b"ARROW1"),
        (b"INSERT INTO t FORMAT Native\n\n\n", "INSERT INTO t ", "Native", b"\n\n"),
    ],
)
def test_an_insert_with_data_is_recognised(head: bytes, sql: str, fmt: str, data: bytes) -> None:
    found = split_insert(head, complete=True)
    assert found is not None
    assert (found.sql, found.insert_format, found.data) == (sql, fmt, data)
    # However the network cuts the request, it is not recognised too early.
    for cut in range(len(head)):
        early = split_insert(head[:cut], complete=False)
        assert early is None or (early.sql, early.insert_format) == (sql, fmt)


@pytest.mark.parametrize(
    "head",
    [
        b"SELECT 1 FORMAT Native\n",
        b"INSERT INTO t SELECT 1 FORMAT Native\n",
        b"INSERT INTO t VALUES (' FORMAT Native ')",
        b"INSERT INTO t WITH 1 AS a SELECT a",
        b"INSERT INTO `t FORMAT x`",
    ],
)
def test_other_statements_are_not(head: bytes) -> None:
    assert split_insert(head, complete=True) is None


def test_format_and_first_word_are_read_off_the_statement() -> None:
    assert answer_format("SELECT 1\n FORMAT Native", {}) == ("Native", True)
    assert answer_format("SELECT 1 format JSON ;", {}) == ("JSON", True)
    assert answer_format("SELECT 1 FORMAT Arrow SETTINGS max_threads = 1", {}) == ("Arrow", True)
    assert answer_format("SELECT 1", {"default_format": "CSV"}) == ("CSV", True)
    assert answer_format("SELECT 1 FORMAT Arrow -- comment", {}) == ("TabSeparated", False)
    assert first_word("-- c\n/* d */ (select 1)") == "SELECT"
    assert first_word("optimize table t") == "OPTIMIZE"


def test_the_summary_counts_what_was_written(call: Call) -> None:
    call("CREATE TABLE t (a Int8) ENGINE = MergeTree ORDER BY a").read()
    answer = call("INSERT INTO t FORMAT CSV\n1\n2\n3\n")
    assert json.loads(answer.headers["X-ClickHouse-Summary"])["written_rows"] == "3"
