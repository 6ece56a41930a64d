"""ClickHouse: the row digest in its SQL and its scope predicate.

No expression depends on a session's time zone or output format settings.
"""

from collections.abc import Sequence

from dpone_dagster.contracts.mart import Column, Relation, Scope
from resources.digests import parse

__all__ = ["parse", "quote", "relation_sql", "row_text_sql", "scope_predicate", "set_digest_sql"]


def quote(identifier: str) -> str:
    """Quote one identifier."""
    return "`" + identifier.replace("\\", "\\\\").replace("`", "\\`") + "`"


def relation_sql(relation: Relation) -> str:
    """Quote a two-part name."""
    return f"{quote(relation.schema_name)}.{quote(relation.name)}"


def row_text_sql(columns: Sequence[Column]) -> str:
    """Return a String expression: the ``dpone_row_v1`` encoding of one row, columns in contract order."""
    # The empty one because not every release takes concat() of a single argument.
    return f"concat({', '.join(_field(column) for column in columns)}, '')"


def set_digest_sql(columns: Sequence[Column], relation_sql: str, where_sql: str = "1") -> str:
    """Return a query that yields one row ``(rows, l0..l3)``, all UInt64, for ``parse``.

    Args:
        columns: business columns in contract order.
        relation_sql: a quoted relation or a parenthesised query.
        where_sql: which of its rows.
    """
    # UInt64 arithmetic wraps, which is the sum modulo 2**64; reinterpret reads little-endian, hence reverse. In WHERE
    # an alias hides the column of its name, so it has one that no business column has.
    lanes = ", ".join(
        f"sumWithOverflow(reinterpretAsUInt64(reverse(substring(__dpone__h, {1 + 8 * i}, 8)))) AS l{i}"
        for i in range(4)
    )
    return (
        f"SELECT count() AS rows, {lanes} FROM"  # noqa: S608 - names are quoted
        f" (SELECT SHA256({row_text_sql(columns)}) AS __dpone__h FROM {relation_sql} WHERE {where_sql})"
    )


def scope_predicate(event_time: str, scope: Scope) -> str:
    """Return ``event_time in [start, end)`` as UTC literals of the column's own type."""
    name = quote(event_time)
    start, end = (
        f"toDateTime64('{moment.isoformat(' ')[:19]}.000000', 6, 'UTC')" for moment in (scope.start, scope.end)
    )
    return f"({name} >= {start} AND {name} < {end})"


def _field(column: Column) -> str:
    name, spec = quote(column.name), column.spec
    # A NULL makes the inner concat NULL and nothing else does. if() would take a NULL Bool for false.
    match spec.mapping:
        case "bit_bool":
            return f"ifNull(concat('1:', toString(toUInt8({name}))), '~')"
        case "uniqueidentifier_uuid":
            return f"ifNull(concat('36:', toString({name})), '~')"
        case "date_date":
            return f"ifNull(concat('10:', toString({name})), '~')"
        case "datetime2_utc":
            # toString() can be told to cut trailing zeros; formatDateTime with %f cannot.
            return f"ifNull(concat('26:', formatDateTime({name}, '%Y-%m-%dT%H:%i:%S.%f', 'UTC')), '~')"
        case "decimal_exact":
            text = f"toDecimalString({name}, {spec.scale})"
        case "string_utf8":
            text = f"trimRight({name}, ' ')" if spec.padded else name
        case _:
            text = f"toString({name})"
    return f"ifNull(concat(toString(length({text})), ':', {text}), '~')"
