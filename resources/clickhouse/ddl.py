"""Every DDL statement of a governed load, with and without ``ON CLUSTER``.

Only the text of the clustered form is tested: there was no cluster to run it on, so a load that names one is refused
(DPONE_CLUSTER_UNAVAILABLE) before it sends anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dpone_dagster.contracts.mart import Relation
from dpone_dagster.ports import LoadColumn
from resources.clickhouse.dialect import quote, relation_sql
from resources.clickhouse.statements import literal, names


@dataclass(frozen=True)
class Ddl:
    """Statements for one cluster, or for a single node.

    Args:
        cluster: the cluster's name; None for a single node.
    """

    cluster: str | None = None

    @property
    def _on(self) -> str:
        return f" ON CLUSTER {quote(self.cluster)}" if self.cluster else ""

    def create_database(self, name: str) -> str:
        """Create a database whose tables have UUIDs."""
        return f"CREATE DATABASE IF NOT EXISTS {quote(name)}{self._on} ENGINE = Atomic"

    def create_table(
        self, table: Relation, columns: Sequence[LoadColumn], *, partition_by: str = "", order_by: Sequence[str] = ()
    ) -> str:
        """Create a MergeTree table.

        Args:
            partition_by: an expression in the engine's SQL; empty for no partitions.
            order_by: the sorting key's columns.
        """
        defined = ", ".join(f"{quote(c.name)} {c.spec.clickhouse_column(c.nullable)}" for c in columns)
        partition = f" PARTITION BY {partition_by}" if partition_by else ""
        # The engine keeps brackets round a single column as part of the key's text.
        order = names(order_by) if len(order_by) == 1 else f"tuple({names(order_by)})"
        nullable = any(c.nullable for c in columns if c.name in order_by)
        settings = " SETTINGS allow_nullable_key = 1" if nullable else ""
        return (
            f"CREATE TABLE {relation_sql(table)}{self._on} ({defined})"
            f" ENGINE = MergeTree{partition} ORDER BY {order}{settings}"
        )

    def create_as(self, table: Relation, like: Relation) -> str:
        """Create an empty table of another's complete design."""
        return f"CREATE TABLE {relation_sql(table)}{self._on} AS {relation_sql(like)}"

    def create_audit_table(self, table: Relation, columns: Sequence[tuple[str, str]], key: Sequence[str]) -> str:
        """Create a table that keeps, for each key, the row of the highest ``version``."""
        defined = ", ".join(f"{quote(name)} {type_}" for name, type_ in columns)
        return (
            f"CREATE TABLE IF NOT EXISTS {relation_sql(table)}{self._on} ({defined})"
            f" ENGINE = ReplacingMergeTree({quote('version')}) ORDER BY ({names(key)})"
        )

    def drop(self, table: Relation) -> str:
        """Drop a table and its rows at once."""
        return f"DROP TABLE {relation_sql(table)}{self._on} SYNC"

    def rename(self, old: Relation, new: Relation) -> str:
        """Rename a table; refused by the engine where the new name is taken."""
        return f"RENAME TABLE {relation_sql(old)} TO {relation_sql(new)}{self._on}"

    def exchange(self, one: Relation, other: Relation) -> str:
        """Swap two tables' names at once."""
        return f"EXCHANGE TABLES {relation_sql(one)} AND {relation_sql(other)}{self._on}"

    def attach(self, table: Relation, source: Relation, partition: str | None = None) -> str:
        """Hard-link the parts of one partition id, or of all, from another table."""
        return f"{self._alter(table)} ATTACH PARTITION {_partition(partition)} FROM {relation_sql(source)}"

    def replace_partition(self, table: Relation, partition: str, source: Relation) -> str:
        """Put another table's partition in the place of the table's own."""
        return f"{self._alter(table)} REPLACE PARTITION {_partition(partition)} FROM {relation_sql(source)}"

    def move_partition(self, table: Relation, partition: str, destination: Relation) -> str:
        """Move a partition out into another table."""
        return f"{self._alter(table)} MOVE PARTITION {_partition(partition)} TO TABLE {relation_sql(destination)}"

    def stop_merges(self, table: Relation) -> str:
        """Keep the parts as they are."""
        return f"SYSTEM STOP MERGES{self._on} {relation_sql(table)}"

    def start_merges(self, table: Relation) -> str:
        """Let parts be merged again."""
        return f"SYSTEM START MERGES{self._on} {relation_sql(table)}"

    def _alter(self, table: Relation) -> str:
        return f"ALTER TABLE {relation_sql(table)}{self._on}"


def _partition(partition: str | None) -> str:
    return "ALL" if partition is None else f"ID {literal(partition)}"
