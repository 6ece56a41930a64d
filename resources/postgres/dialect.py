"""PostgreSQL, standing in for SQL Server: its type names, the row digest in its SQL, and what it must refuse.

Every expression is independent of the session: DateStyle, TimeZone, extra_float_digits, bytea_output and
lc_time change nothing. Needs PostgreSQL 14 (``sha256()``, numeric ``extract()``) and server encoding UTF8.
"""

import re
from collections.abc import Sequence

from dpone_dagster.contracts.mart import Column, Relation, Scope
from dpone_dagster.contracts.set_digest import LANE_MODULUS
from dpone_dagster.contracts.types import DATE_DOMAIN, DATETIME_DOMAIN, column_type
from dpone_dagster.errors import DponeError
from resources.digests import parse

__all__ = [
    "canonical_type",
    "domain_violation_sql",
    "parse",
    "physical_type",
    "quote",
    "relation_sql",
    "row_text_sql",
    "scope_predicate",
    "set_digest_sql",
]

# Canonical name -> the name that format_type() gives. No tinyint: PostgreSQL has no unsigned byte.
_PHYSICAL = {
    "bigint": "bigint",
    "int": "integer",
    "smallint": "smallint",
    "bit": "boolean",
    "uniqueidentifier": "uuid",
    "date": "date",
    "datetime2(6)": "timestamp without time zone",
    "nvarchar(max)": "text",
}
# Other spellings that a dbt contract may use for the same types.
_ALIASES = {
    "int2": "smallint",
    "int4": "integer",
    "int": "integer",
    "int8": "bigint",
    "bool": "boolean",
    "timestamp": "timestamp without time zone",
    "timestamp(6)": "timestamp without time zone",
    "timestamp(6) without time zone": "timestamp without time zone",
}
_CANONICAL = {physical: name for name, physical in _PHYSICAL.items()}
_NUMERIC = re.compile(r"(?:numeric|decimal)\((\d+),(\d+)\)")
_BOUNDED = re.compile(r"(character varying|varchar|character|char)\((\d+)\)")
_NVARCHAR_LIMIT = 4000


def canonical_type(physical: str) -> str:
    """Return the canonical name of a PostgreSQL type.

    Args:
        physical: as ``format_type()`` or a dbt contract's ``data_type`` spells it.

    Raises:
        DponeError: DPONE_TYPE_UNSUPPORTED for every type without an exact counterpart: floats, money, time,
            interval, timestamptz, timestamp of another precision, numeric without precision, and so on.
    """
    text = re.sub(r"\s*([(),])\s*", r"\1", " ".join(physical.lower().split())).replace(")without", ") without")
    text = _ALIASES.get(text, text)
    if name := _CANONICAL.get(text):
        return name
    if match := _NUMERIC.fullmatch(text):
        return column_type(f"decimal({int(match[1])},{int(match[2])})").name
    if (match := _BOUNDED.fullmatch(text)) and 1 <= int(match[2]) <= _NVARCHAR_LIMIT:
        kind = "nvarchar" if "var" in match[1] else "nchar"
        return f"{kind}({int(match[2])})"
    raise DponeError("DPONE_TYPE_UNSUPPORTED", f"PostgreSQL type {physical!r} has no exact mapping.", type=physical)


def physical_type(name: str) -> str:
    """Return the PostgreSQL type that stands in for a canonical type, as ``format_type()`` spells it.

    Raises:
        DponeError: DPONE_TYPE_UNSUPPORTED for tinyint, varchar and char (code pages), which PostgreSQL lacks.
    """
    if physical := _PHYSICAL.get(name):
        return physical
    spec = column_type(name)
    if spec.mapping == "decimal_exact":
        return f"numeric({spec.precision},{spec.scale})"
    if name.startswith(("nvarchar(", "nchar(")) and 1 <= (spec.max_length or 0) <= _NVARCHAR_LIMIT:
        return f"{'character' if spec.padded else 'character varying'}({spec.max_length})"
    raise DponeError(
        "DPONE_TYPE_UNSUPPORTED", f"The PostgreSQL stand-in has no exact counterpart of {name!r}.", type=name
    )


def quote(identifier: str) -> str:
    """Quote one identifier."""
    return '"' + identifier.replace('"', '""') + '"'


def relation_sql(relation: Relation) -> str:
    """Quote a two-part name."""
    return f"{quote(relation.schema_name)}.{quote(relation.name)}"


def row_text_sql(columns: Sequence[Column]) -> str:
    """Return a text expression: the ``dpone_row_v1`` encoding of one row, columns in contract order.

    A date or timestamp outside its domain encodes with a leading ``!``, as no admitted value does, so that it
    can never pass for one: to_char() would drop the era and turn infinity into NULL.
    """
    return " || ".join(_field(column) for column in columns)


def set_digest_sql(columns: Sequence[Column], relation_sql: str, where_sql: str = "true") -> str:
    """Return a query that yields one row ``(rows bigint, l0..l3 numeric)`` for ``parse``.

    Args:
        columns: business columns in contract order.
        relation_sql: a quoted relation or a parenthesised query with an alias.
        where_sql: which of its rows.
    """
    # The hash has 32 bytes; bit(64)::bigint gives each lane signed, and mod makes the sum unsigned again.
    lanes = ", ".join(
        f"mod(mod(coalesce(sum(('x' || encode(substring(h from {1 + 8 * i} for 8), 'hex'))::bit(64)::bigint),"
        f" 0), {LANE_MODULUS}) + {LANE_MODULUS}, {LANE_MODULUS}) AS l{i}"
        for i in range(4)
    )
    hashed = f"SELECT sha256(convert_to({row_text_sql(columns)}, 'UTF8')) AS h"
    # OFFSET keeps the planner from computing the hash once a lane; as a bigint constant it lets workers help.
    return (
        f"SELECT count(*) AS rows, {lanes}"  # noqa: S608 - names are quoted
        f" FROM ({hashed} FROM {relation_sql} WHERE {where_sql} OFFSET bigint '0') AS hashed"
    )


def domain_violation_sql(columns: Sequence[Column]) -> str:
    """Return a boolean expression, never NULL: the row has a value that ClickHouse cannot hold exactly.

    Dates and timestamps outside their domains, infinities among them; numeric NaN, infinities and values of
    more digits than the contract's. NULL is no violation.
    """
    checks = [check for column in columns if (check := _violation(column))]
    return f"coalesce({' OR '.join(checks)}, false)" if checks else "false"


def scope_predicate(event_time: str, scope: Scope) -> str:
    """Return ``event_time in [start, end)`` with typed literals that no session setting reinterprets."""
    name = quote(event_time)
    start, end = (f"timestamp '{moment.isoformat(' ')[:19]}'" for moment in (scope.start, scope.end))
    return f"({name} >= {start} AND {name} < {end})"


def _field(column: Column) -> str:
    name = quote(column.name)
    match column.spec.mapping:
        case "bit_bool":
            return f"CASE WHEN {name} THEN '1:1' WHEN NOT {name} THEN '1:0' ELSE '~' END"
        case "uniqueidentifier_uuid":
            field = f"'36:' || {name}::text"
        case "date_date":
            return _moment_field(name, "10", "YYYY-MM-DD", _bounds(column))
        case "datetime2_utc":
            return _moment_field(name, "26", 'YYYY-MM-DD"T"HH24:MI:SS.US', _bounds(column))
        case "string_utf8":
            # The cast of character(n) to text drops its trailing blanks.
            text = f"{name}::text"
            field = f"octet_length(convert_to({text}, 'UTF8'))::text || ':' || {text}"
        case _:
            field = f"octet_length({name}::text)::text || ':' || {name}::text"
    return f"CASE WHEN {name} IS NULL THEN '~' ELSE {field} END"


def _moment_field(name: str, length: str, pattern: str, bounds: str) -> str:
    return (
        f"CASE WHEN {name} IS NULL THEN '~'"
        f" WHEN {name} {bounds} THEN '{length}:' || to_char({name}, '{pattern}')"
        f" ELSE '!' || extract(epoch from {name})::text END"
    )


def _bounds(column: Column) -> str:
    if column.spec.mapping == "date_date":
        return f"BETWEEN date '{DATE_DOMAIN[0]}' AND date '{DATE_DOMAIN[1]}'"
    return f"BETWEEN timestamp '{DATETIME_DOMAIN[0]}' AND timestamp '{DATETIME_DOMAIN[1]}'"


def _violation(column: Column) -> str | None:
    name, spec = quote(column.name), column.spec
    # A NULL must not hide a violation beside it; in OR it does not, since NULL OR true is true.
    if spec.mapping in ("date_date", "datetime2_utc"):
        return f"NOT {name} {_bounds(column)}"
    if spec.mapping == "decimal_exact":
        # PostgreSQL orders NaN above every number, so one comparison refuses all three specials.
        return f"NOT abs({name}) < 1e{spec.precision - spec.scale}::numeric"
    return None
