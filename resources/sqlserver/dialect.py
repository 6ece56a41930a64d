"""SQL Server: the row digest in T-SQL, its scope predicate and what it must refuse.

Not run on a SQL Server yet. It keeps to what both SQL Server 2019 and the public TDS server that was tried
accept: bytes hashed in an encoding that the text names, no style 126, lanes summed as decimal(38,0).
"""

from collections.abc import Sequence

from dpone_dagster.contracts.mart import Column, Relation, Scope
from dpone_dagster.contracts.set_digest import LANE_MODULUS
from resources.digests import parse

__all__ = [
    "domain_violation_sql",
    "parse",
    "quote",
    "relation_sql",
    "row_text_sql",
    "scope_predicate",
    "set_digest_sql",
]

_UTF8 = "Latin1_General_100_BIN2_UTF8"


def quote(identifier: str) -> str:
    """Quote one identifier."""
    return "[" + identifier.replace("]", "]]") + "]"


def relation_sql(relation: Relation) -> str:
    """Quote a two-part name."""
    return f"{quote(relation.schema_name)}.{quote(relation.name)}"


def row_text_sql(columns: Sequence[Column]) -> str:
    """Return a varchar(max) expression: the ``dpone_row_v1`` encoding of one row in UTF-8."""
    # The first operand is max, or a sum of short ones would be cut at 8,000 bytes.
    return " + ".join([f"CONVERT(varchar(max), '') COLLATE {_UTF8}", *(_field(column) for column in columns)])


def set_digest_sql(columns: Sequence[Column], relation_sql: str, where_sql: str = "1 = 1") -> str:
    """Return a query that yields one row ``(rows bigint, l0..l3 decimal(38,0))`` for ``parse``.

    Args:
        columns: business columns in contract order.
        relation_sql: a quoted relation or a parenthesised query with an alias.
        where_sql: which of its rows.
    """
    # Lanes arrive signed; SUM(bigint) would overflow; % keeps the sign, hence the second one.
    lanes = ", ".join(
        f"(ISNULL(SUM(CONVERT(decimal(38,0), CONVERT(bigint, SUBSTRING(h, {1 + 8 * i}, 8)))), 0)"
        f" % {LANE_MODULUS} + {LANE_MODULUS}) % {LANE_MODULUS} AS l{i}"
        for i in range(4)
    )
    hashed = f"SELECT HASHBYTES('SHA2_256', CONVERT(varbinary(max), {row_text_sql(columns)})) AS h"
    return (
        f"SELECT COUNT_BIG(*) AS [rows], {lanes}"  # noqa: S608 - names are quoted
        f" FROM ({hashed} FROM {relation_sql} WHERE {where_sql}) AS hashed"
    )


def domain_violation_sql(columns: Sequence[Column]) -> str:
    """Return a search condition: the row has a value that ClickHouse cannot hold exactly.

    Dates and datetimes outside their domains, and strings with a lone surrogate: the conversion to UTF-8
    would put U+FFFD in its place, so it is sought by converting back. NULL is no violation.
    """
    checks = [check for column in columns if (check := _violation(column))]
    return f"({' OR '.join(checks)})" if checks else "(1 = 0)"


def scope_predicate(event_time: str, scope: Scope) -> str:
    """Return ``event_time in [start, end)``; literals in the form that no DATEFORMAT reinterprets."""
    name = quote(event_time)
    start, end = (f"CONVERT(datetime2(6), '{moment.isoformat()[:19]}', 126)" for moment in (scope.start, scope.end))
    return f"({name} >= {start} AND {name} < {end})"


def _utf8(name: str) -> str:
    # By way of nvarchar, so that varchar columns leave their code page too.
    return f"CONVERT(varchar(max), CONVERT(nvarchar(max), {name}) COLLATE {_UTF8})"


def _field(column: Column) -> str:
    name, spec = quote(column.name), column.spec
    match spec.mapping:
        case "bit_bool":
            field = f"'1:' + CONVERT(varchar(1), {name})"
        case "uniqueidentifier_uuid":
            field = f"'36:' + LOWER(CONVERT(varchar(36), {name}))"
        case "date_date":
            field = f"'10:' + CONVERT(varchar(10), {name}, 23)"
        case "datetime2_utc":
            # Style 126 may leave zeros out, and has no T on the public server; 121 does neither.
            field = f"'26:' + STUFF(CONVERT(varchar(26), {name}, 121), 11, 1, 'T')"
        case "string_utf8":
            text = f"RTRIM({_utf8(name)})" if spec.padded else _utf8(name)
            field = f"CONVERT(varchar(20), DATALENGTH({text})) + ':' + {text}"
        case _:
            text = f"CONVERT(varchar(41), {name})"
            field = f"CONVERT(varchar(20), DATALENGTH({text})) + ':' + {text}"
    return f"CASE WHEN {name} IS NULL THEN '~' ELSE {field} END"


def _violation(column: Column) -> str | None:
    name, spec = quote(column.name), column.spec
    if spec.domain:
        kind = "date" if spec.mapping == "date_date" else "datetime2(6)"
        low, high = (f"CONVERT({kind}, '{end}', {23 if kind == 'date' else 126})" for end in spec.domain)
        return f"{name} NOT BETWEEN {low} AND {high}"
    if spec.mapping == "string_utf8" and spec.name.startswith("n"):
        back = f"CONVERT(nvarchar(max), {_utf8(name)})"
        return f"CONVERT(varbinary(max), {back}) <> CONVERT(varbinary(max), CONVERT(nvarchar(max), {name}))"
    return None
