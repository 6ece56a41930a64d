"""What docs/flights-data.md says of the data, counted in SQL and, where it matters, from the file itself."""

import csv
import io
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import Any

import psycopg
import pytest

from assets.sources.flights import FIRST_DAY, LAST_DAY, data_folder, load_flights, revise_day, withdraw_day
from resources.embedded.engines import Engines


@pytest.fixture(scope="module")
def loaded(engines: Engines) -> Iterator[psycopg.Connection[Any]]:
    name = "t_flights_source"
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as connection:
        connection.execute(f"drop database if exists {name} with (force)")
        connection.execute(f"create database {name}")
    conninfo = engines.pg.with_database(name).conninfo
    first = load_flights(conninfo)
    assert (first.flights, first.carriers, first.airports, first.replayed) == (336_776, 16, 1_462, False)
    said: list[str] = []
    assert load_flights(conninfo, progress=said.append).replayed
    assert said == ["The source tables already hold 336,776 flights."]
    connection = psycopg.connect(conninfo, autocommit=True)
    yield connection
    connection.close()
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as admin:
        admin.execute(f"drop database {name} with (force)")


def one(connection: psycopg.Connection[Any], sql: str) -> tuple[Any, ...]:
    row = connection.execute(sql).fetchone()
    assert row is not None
    return row


def test_time_hour_is_utc_and_covers_366_days(loaded: psycopg.Connection[Any]) -> None:
    offsets = loaded.execute(
        """select extract(hour from time_hour - make_timestamp(year, month, day, hour, 0, 0))::int, count(*)
           from source_data.flights group by 1 order by 1"""
    ).fetchall()
    assert offsets == [(4, 222_819), (5, 113_957)]
    # New York's summer time of 2013, from a calendar: March 10, 7:00 UTC to November 3, 6:00 UTC.
    assert one(
        loaded,
        """select count(*) from source_data.flights
           where (time_hour >= '2013-03-10 07:00' and time_hour < '2013-11-03 06:00')
             <> (time_hour - make_timestamp(year, month, day, hour, 0, 0) = interval '4 hours')""",
    ) == (0,)
    days = loaded.execute("select time_hour::date, count(*) from source_data.flights group by 1 order by 1").fetchall()
    assert len(days) == 366
    assert (days[0][0], days[-1]) == (FIRST_DAY, (LAST_DAY, 88))
    assert (min(n for _, n in days), max(n for _, n in days)) == (88, 1_022)


def test_the_key_and_what_is_none(loaded: psycopg.Connection[Any]) -> None:
    def repeated(columns: str) -> int:
        sql = f"""select coalesce(sum(n), 0)::int from
                  (select count(*) as n from source_data.flights group by {columns} having count(*) > 1) as d"""
        return int(one(loaded, sql)[0])

    assert repeated("time_hour, carrier, flight") == 0
    assert repeated("time_hour, carrier, flight, origin") == 0
    assert repeated("year, month, day, carrier, flight") == 48
    assert one(loaded, "select count(*) from source_data.flights where tailnum is null") == (2_512,)


def test_the_surprises(loaded: psycopg.Connection[Any]) -> None:
    assert one(
        loaded,
        """select count(*) filter (where dep_time is null), count(*) filter (where arr_time is null),
                  count(*) filter (where arr_delay is null), count(*) filter (where air_time is null),
                  count(*) filter (where dep_time is null and num_nonnulls(dep_delay, arr_time, air_time) > 0),
                  count(*) filter (where dep_time = 2400)
           from source_data.flights""",
    ) == (8_255, 8_713, 9_430, 9_430, 0, 29)
    unknown = loaded.execute("select airport from source_data.airports where airport = name order by 1").fetchall()
    assert unknown == [("BQN",), ("PSE",), ("SJU",), ("STT",)]


def test_the_lookups_lose_no_flight(loaded: psycopg.Connection[Any]) -> None:
    assert one(
        loaded,
        """select count(*) from source_data.flights as f
           join source_data.carriers as c using (carrier)
           join source_data.airports as o on o.airport = f.origin
           join source_data.airports as d on d.airport = f.dest""",
    ) == (336_776,)
    assert one(loaded, "select carrier_id, name from source_data.carriers where carrier = 'AA'") == (
        2,
        "American Airlines Inc.",
    )


def test_the_table_is_the_file(loaded: psycopg.Connection[Any]) -> None:
    with zipfile.ZipFile(data_folder() / "flights.csv.zip") as archive, archive.open("flights.csv") as raw:
        in_file = Counter(
            (row["carrier"], row["time_hour"][:10], row["dep_delay"] == "NA")
            for row in csv.DictReader(io.TextIOWrapper(raw, encoding="ascii"))
        )
    in_table = Counter(
        {
            (carrier, day.isoformat(), cancelled): count
            for carrier, day, cancelled, count in loaded.execute(
                """select carrier, time_hour::date, dep_delay is null, count(*)
                   from source_data.flights group by 1, 2, 3"""
            )
        }
    )
    assert in_table == in_file


def test_a_day_can_be_revised_and_withdrawn(loaded: psycopg.Connection[Any]) -> None:
    conninfo, day = loaded.info.dsn, date(2013, 7, 4)
    within = "time_hour >= '2013-07-04' and time_hour < '2013-07-05'"
    total = f"select coalesce(sum(arr_delay), 0), count(*) from source_data.flights where {within}"
    before, outside = one(loaded, total), one(loaded, total.replace(within, f"not ({within})"))
    changed = revise_day(conninfo, day)
    assert changed > 0
    assert one(loaded, total) == (before[0] + changed, before[1])
    removed = withdraw_day(conninfo, day, keep_one_in=2)
    assert one(loaded, total)[1] == before[1] - removed
    assert one(loaded, f"select count(*) from source_data.flights where {within} and flight % 2 = 1") == (0,)
    assert one(loaded, total.replace(within, f"not ({within})")) == outside
