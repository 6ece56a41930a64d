"""Type names both ways, the T-SQL text, and what ``parse`` refuses. The engines' own tests are elsewhere."""

from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from dpone_dagster.contracts.mart import Column, Relation, Scope
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.errors import DponeError
from resources.clickhouse import dialect as clickhouse
from resources.digests import parse
from resources.postgres import dialect as postgres
from resources.sqlserver import dialect as sqlserver

PAIRS = [
    ("bigint", "bigint"),
    ("integer", "int"),
    ("smallint", "smallint"),
    ("boolean", "bit"),
    ("uuid", "uniqueidentifier"),
    ("date", "date"),
    ("timestamp without time zone", "datetime2(6)"),
    ("text", "nvarchar(max)"),
    ("numeric(18,4)", "decimal(18,4)"),
    ("numeric(38,38)", "decimal(38,38)"),
    ("numeric(1,0)", "decimal(1,0)"),
    ("character varying(20)", "nvarchar(20)"),
    ("character varying(4000)", "nvarchar(4000)"),
    ("character(5)", "nchar(5)"),
]


@pytest.mark.parametrize(("physical", "canonical"), PAIRS)
def test_types_map_one_to_one(physical: str, canonical: str) -> None:
    assert postgres.canonical_type(physical) == canonical
    assert postgres.physical_type(canonical) == physical


@pytest.mark.parametrize(
    ("spelled", "canonical"),
    [
        ("INT", "int"),
        ("int8", "bigint"),
        ("bool", "bit"),
        ("timestamp", "datetime2(6)"),
        ("timestamp(6)", "datetime2(6)"),
        ("timestamp(6) without time zone", "datetime2(6)"),
        ("TIMESTAMP ( 6 ) WITHOUT  TIME ZONE", "datetime2(6)"),
        ("decimal(10, 2)", "decimal(10,2)"),
        ("NUMERIC( 10 , 2 )", "decimal(10,2)"),
        ("varchar(7)", "nvarchar(7)"),
        ("char (7)", "nchar(7)"),
    ],
)
def test_other_spellings_of_the_same_types(spelled: str, canonical: str) -> None:
    assert postgres.canonical_type(spelled) == canonical


@pytest.mark.parametrize(
    "physical",
    [
        "real",
        "double precision",
        "float",
        "money",
        "timestamp with time zone",
        "timestamptz",
        "timestamp(6) with time zone",
        "timestamp(3)",
        "timestamp(3) without time zone",
        "interval",
        "time",
        "time without time zone",
        "numeric",
        "numeric(10)",
        "numeric(39,0)",
        "numeric(5,6)",
        "numeric(5,-2)",
        "varchar",
        "character varying",
        "varchar(0)",
        "varchar(4001)",
        "char",
        '"char"',
        "bpchar",
        "bytea",
        "json",
        "jsonb",
        "xml",
        "integer[]",
        "tinyint",
        "bit(1)",
        "inet",
        "oid",
        "",
        "bigint; drop table x",
    ],
)
def test_other_postgres_types_are_refused(physical: str) -> None:
    with pytest.raises(DponeError) as caught:
        postgres.canonical_type(physical)
    assert caught.value.code == "DPONE_TYPE_UNSUPPORTED"


@pytest.mark.parametrize(
    "canonical", ["tinyint", "varchar(20)", "varchar(max)", "char(5)", "nchar(max)", "float", "datetime2(3)"]
)
def test_types_that_the_stand_in_lacks_are_refused(canonical: str) -> None:
    with pytest.raises(DponeError) as caught:
        postgres.physical_type(canonical)
    assert caught.value.code == "DPONE_TYPE_UNSUPPORTED"


def test_identifiers_are_quoted_in_each_dialect() -> None:
    assert postgres.quote('a"b') == '"a""b"'
    assert clickhouse.quote("a`b\\") == "`a\\`b\\\\`"
    assert sqlserver.quote("a]b") == "[a]]b]"
    relation = Relation(schema_name="mart", name="order")
    assert postgres.relation_sql(relation) == '"mart"."order"'
    assert clickhouse.relation_sql(relation) == "`mart`.`order`"
    assert sqlserver.relation_sql(relation) == "[mart].[order]"


def test_parse_reads_what_a_driver_gives() -> None:
    assert parse((2, Decimal(0), Decimal(2**64 - 1), 5, 6)) == SetDigest(2, (0, 2**64 - 1, 5, 6))


@pytest.mark.parametrize(
    "row",
    [
        (1, 2, 3, 4),
        (1, 2, 3, 4, 5, 6),
        (1, None, 3, 4, 5),
        (-1, 2, 3, 4, 5),
        (1, -2, 3, 4, 5),
        (1, 2, 3, 4, 2**64),
        (1, 2, 3, 4, Decimal("0.5")),
    ],
)
def test_parse_refuses_what_is_no_digest(row: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="a set digest"):
        parse(row)


# T-SQL: no server here to run it on, so its text is held still.


def column(name: str, type_: str) -> Column:
    return Column(name=name, type=type_, nullable=True)


UTF8 = "Latin1_General_100_BIN2_UTF8"
T_TEXT = f"CONVERT(varchar(max), CONVERT(nvarchar(max), [t]) COLLATE {UTF8})"


@pytest.mark.parametrize(
    ("type_name", "field"),
    [
        ("bit", "'1:' + CONVERT(varchar(1), [t])"),
        ("uniqueidentifier", "'36:' + LOWER(CONVERT(varchar(36), [t]))"),
        ("date", "'10:' + CONVERT(varchar(10), [t], 23)"),
        ("datetime2(6)", "'26:' + STUFF(CONVERT(varchar(26), [t], 121), 11, 1, 'T')"),
        (
            "tinyint",
            "CONVERT(varchar(20), DATALENGTH(CONVERT(varchar(41), [t]))) + ':' + CONVERT(varchar(41), [t])",
        ),
        (
            "decimal(38,38)",
            "CONVERT(varchar(20), DATALENGTH(CONVERT(varchar(41), [t]))) + ':' + CONVERT(varchar(41), [t])",
        ),
        ("nvarchar(20)", f"CONVERT(varchar(20), DATALENGTH({T_TEXT})) + ':' + {T_TEXT}"),
        ("char(5)", f"CONVERT(varchar(20), DATALENGTH(RTRIM({T_TEXT}))) + ':' + RTRIM({T_TEXT})"),
    ],
)
def test_sqlserver_row_text(type_name: str, field: str) -> None:
    assert sqlserver.row_text_sql([column("t", type_name)]) == (
        f"CONVERT(varchar(max), '') COLLATE {UTF8} + CASE WHEN [t] IS NULL THEN '~' ELSE {field} END"
    )


def test_sqlserver_set_digest() -> None:
    columns = [column("a", "bit"), column("b", "bit")]
    lanes = ", ".join(
        f"(ISNULL(SUM(CONVERT(decimal(38,0), CONVERT(bigint, SUBSTRING(h, {start}, 8)))), 0)"
        f" % 18446744073709551616 + 18446744073709551616) % 18446744073709551616 AS l{i}"
        for i, start in enumerate((1, 9, 17, 25))
    )
    assert sqlserver.set_digest_sql(columns, "[mart].[t]", "[a] = 1") == (
        f"SELECT COUNT_BIG(*) AS [rows], {lanes} FROM (SELECT HASHBYTES('SHA2_256', CONVERT(varbinary(max),"
        f" CONVERT(varchar(max), '') COLLATE {UTF8}"
        " + CASE WHEN [a] IS NULL THEN '~' ELSE '1:' + CONVERT(varchar(1), [a]) END"
        " + CASE WHEN [b] IS NULL THEN '~' ELSE '1:' + CONVERT(varchar(1), [b]) END"
        ")) AS h FROM [mart].[t] WHERE [a] = 1) AS hashed"
    )


def test_sqlserver_domain_violation() -> None:
    assert sqlserver.domain_violation_sql([column("a", "int")]) == "(1 = 0)"
    back = f"CONVERT(nvarchar(max), {T_TEXT})"
    columns = [column("d", "date"), column("m", "datetime2(6)"), column("n", "int"), column("t", "nchar(3)")]
    assert sqlserver.domain_violation_sql(columns) == (
        "([d] NOT BETWEEN CONVERT(date, '1970-01-01', 23) AND CONVERT(date, '2149-06-06', 23)"
        " OR [m] NOT BETWEEN CONVERT(datetime2(6), '1900-01-01T00:00:00.000000', 126)"
        " AND CONVERT(datetime2(6), '2299-12-31T23:59:59.999999', 126)"
        f" OR CONVERT(varbinary(max), {back}) <> CONVERT(varbinary(max), CONVERT(nvarchar(max), [t])))"
    )


def test_scope_predicates() -> None:
    scope = Scope.day(date(2024, 12, 31))
    assert sqlserver.scope_predicate("at", scope) == (
        "([at] >= CONVERT(datetime2(6), '2024-12-31T00:00:00', 126)"
        " AND [at] < CONVERT(datetime2(6), '2025-01-01T00:00:00', 126))"
    )
    assert postgres.scope_predicate("at", scope) == (
        "(\"at\" >= timestamp '2024-12-31 00:00:00' AND \"at\" < timestamp '2025-01-01 00:00:00')"
    )
    assert clickhouse.scope_predicate("at", scope) == (
        "(`at` >= toDateTime64('2024-12-31 00:00:00.000000', 6, 'UTC')"
        " AND `at` < toDateTime64('2025-01-01 00:00:00.000000', 6, 'UTC'))"
    )
