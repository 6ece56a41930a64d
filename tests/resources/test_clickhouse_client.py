"""The client's errors: codes and numbers, never the server's or the driver's text."""

import contextlib
import logging
import socket
import threading
from dataclasses import replace

import pytest

from dpone_dagster.errors import DponeError
from resources.clickhouse.client import ClickHouseClient, ClickHouseEndpoint, connect
from resources.embedded.engines import Engines


def nobody() -> ClickHouseEndpoint:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ClickHouseEndpoint(host="127.0.0.1", port=port, user="u", password="p", database="d")


def test_nobody_there_is_unavailable() -> None:
    with pytest.raises(DponeError) as refused:
        connect(nobody())
    assert refused.value.code == "DPONE_ENGINE_UNAVAILABLE"


def test_a_server_that_went_away_or_keeps_silent_is_unavailable(clickhouse: ClickHouseClient) -> None:
    for behaviour in ("close", "silence"):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve(listener: socket.socket = listener, behaviour: str = behaviour) -> None:
                for _ in range(3):
                    try:
                        connection, _address = listener.accept()
                    except OSError:
                        return
                    connection.recv(100)
                    if behaviour == "close":
                        connection.close()

            threading.Thread(target=serve, daemon=True).start()
            endpoint = replace(nobody(), port=listener.getsockname()[1])
            with pytest.raises(DponeError) as refused:
                connect(endpoint, timeout_seconds=1)
            assert refused.value.code == "DPONE_ENGINE_UNAVAILABLE"


def test_a_wrong_token_is_refused_with_its_number(engines: Engines) -> None:
    with pytest.raises(DponeError) as refused:
        connect(replace(engines.clickhouse, password="wrong"))
    assert (refused.value.code, refused.value.details["number"]) == ("DPONE_ENGINE_REFUSED", 516)


def test_the_servers_text_is_nowhere_in_the_error(
    clickhouse: ClickHouseClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(DponeError) as refused:
        clickhouse.query("SELECT toInt32('secret-value')")
    assert (refused.value.code, refused.value.details["number"]) == ("DPONE_ENGINE_REFUSED", 6)
    assert refused.value.__suppress_context__ is True
    assert "secret-value" not in f"{refused.value} {refused.value.as_json()}"


def test_a_call_that_the_client_itself_refuses_has_a_code(clickhouse: ClickHouseClient) -> None:
    clickhouse.command("CREATE TABLE t (a Int8) ENGINE = Memory")
    with pytest.raises(DponeError) as refused:
        clickhouse.insert("t", [[1, 2]], column_names=["a"])
    assert refused.value.code == "DPONE_ENGINE_REFUSED"


def test_an_insert_without_an_answer_is_sent_once(engines: Engines, ch_database: str) -> None:
    """The driver alone would send it again, although it may have been executed."""
    seen: list[bytes] = []
    real = engines.clickhouse

    def relay(listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(near,), daemon=True).start()

    def answers(far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                near.sendall(data)

    def serve(near: socket.socket) -> None:
        with near, socket.create_connection((real.host, real.port)) as far:
            threading.Thread(target=answers, args=(far, near), daemon=True).start()
            while data := near.recv(1 << 16):
                if b"INSERT INTO" in data:
                    seen.append(data)
                    return  # the acknowledgement is lost
                far.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=relay, args=(listener,), daemon=True).start()
        client = connect(replace(real, port=listener.getsockname()[1], database=ch_database))
        with pytest.raises(DponeError) as unknown:
            client.raw_insert("t", ["a"], b"1\n", fmt="CSV")
    assert unknown.value.code == "DPONE_ENGINE_UNAVAILABLE"
    assert len(seen) == 1


def test_one_client_runs_statements_at_once(clickhouse: ClickHouseClient) -> None:
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(clickhouse.command(f"SELECT {n} + sleep(0.3)")))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]


def test_settings_and_prefix_go_with_every_statement(engines: Engines) -> None:
    client = connect(engines.clickhouse, query_prefix="dpone:x:1", settings={"max_threads": 3})
    ask = "SELECT getSetting('max_threads'), Settings['log_comment'] FROM system.processes WHERE query LIKE '%zq%'"
    assert client.query(ask).result_rows == [(3, "dpone:x:1")]
    client.close()
