"""The text of every DDL statement, on a single node and on a cluster."""

import pytest

from dpone_dagster.ports import LoadColumn
from resources.clickhouse.ddl import Ddl
from resources.clickhouse.staged_sink import Table

T, S = Table(schema_name="marts", name="o`r"), Table(schema_name="ops", name="stage")
COLUMNS = (
    LoadColumn(name="id", type="bigint", nullable=False),
    LoadColumn(name="naïve `x`", type="decimal(18,4)", nullable=True),
)
NONE, ON = Ddl(), Ddl("main")

TEXTS = [
    (lambda d: d.create_database("ops"), "CREATE DATABASE IF NOT EXISTS `ops`{} ENGINE = Atomic"),
    (
        lambda d: d.create_table(T, COLUMNS),
        "CREATE TABLE `marts`.`o\\`r`{} (`id` Int64, `naïve \\`x\\`` Nullable(Decimal(18,4)))"
        " ENGINE = MergeTree ORDER BY tuple()",
    ),
    (
        lambda d: d.create_table(T, COLUMNS, partition_by="toYYYYMM(at)", order_by=("id",)),
        "CREATE TABLE `marts`.`o\\`r`{} (`id` Int64, `naïve \\`x\\`` Nullable(Decimal(18,4)))"
        " ENGINE = MergeTree PARTITION BY toYYYYMM(at) ORDER BY `id`",
    ),
    (
        lambda d: d.create_table(S, COLUMNS[1:], order_by=(COLUMNS[1].name,)),
        "CREATE TABLE `ops`.`stage`{} (`naïve \\`x\\`` Nullable(Decimal(18,4)))"
        " ENGINE = MergeTree ORDER BY `naïve \\`x\\`` SETTINGS allow_nullable_key = 1",
    ),
    (lambda d: d.create_as(S, T), "CREATE TABLE `ops`.`stage`{} AS `marts`.`o\\`r`"),
    (
        lambda d: d.create_audit_table(S, (("load_id", "String"), ("version", "UInt64")), ("load_id",)),
        "CREATE TABLE IF NOT EXISTS `ops`.`stage`{} (`load_id` String, `version` UInt64)"
        " ENGINE = ReplacingMergeTree(`version`) ORDER BY (`load_id`)",
    ),
    (lambda d: d.drop(S), "DROP TABLE `ops`.`stage`{} SYNC"),
    (lambda d: d.rename(S, T), "RENAME TABLE `ops`.`stage` TO `marts`.`o\\`r`{}"),
    (lambda d: d.exchange(T, S), "EXCHANGE TABLES `marts`.`o\\`r` AND `ops`.`stage`{}"),
    (lambda d: d.attach(T, S), "ALTER TABLE `marts`.`o\\`r`{} ATTACH PARTITION ALL FROM `ops`.`stage`"),
    (lambda d: d.attach(T, S, "2'4"), "ALTER TABLE `marts`.`o\\`r`{} ATTACH PARTITION ID '2\\'4' FROM `ops`.`stage`"),
    (
        lambda d: d.replace_partition(T, "202403", S),
        "ALTER TABLE `marts`.`o\\`r`{} REPLACE PARTITION ID '202403' FROM `ops`.`stage`",
    ),
    (
        lambda d: d.move_partition(T, "202403", S),
        "ALTER TABLE `marts`.`o\\`r`{} MOVE PARTITION ID '202403' TO TABLE `ops`.`stage`",
    ),
    (lambda d: d.stop_merges(S), "SYSTEM STOP MERGES{} `ops`.`stage`"),
    (lambda d: d.start_merges(S), "SYSTEM START MERGES{} `ops`.`stage`"),
]


@pytest.mark.parametrize(("render", "text"), TEXTS)
def test_every_statement_on_a_node_and_on_a_cluster(render: object, text: str) -> None:
    assert callable(render)
    assert render(NONE) == text.format("")
    assert render(ON) == text.format(" ON CLUSTER `main`")


def test_every_statement_is_here() -> None:
    public = {name for name in vars(Ddl) if not name.startswith("_") and name != "cluster"}
    tried = {name for render, _ in TEXTS for name in render.__code__.co_names}
    assert public <= tried
