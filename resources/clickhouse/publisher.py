"""``AnalyticsPort`` on ClickHouse over HTTP; every statement that changes something is sent once."""

# ruff: noqa: S608 - names match ``contracts.mart.Identifier`` and are quoted; values go through ``literal``.

from collections.abc import Callable, Iterator

import pyarrow as pa

from dpone_dagster.contracts.mart import MartSpec, Relation, Scope
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import PhysicalDesign, ProofReport, ShadowReport
from resources.clickhouse import loading, proof, quiescence
from resources.clickhouse import shadow as shadows
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.design import check_design, create_sql, partition_key_of, read_design
from resources.clickhouse.dialect import quote, relation_sql, scope_predicate
from resources.clickhouse.statements import Statements, literal, replaced


class ClickHousePublisher:
    """Stage, shadow, proof and exchange of one operation's attempt.

    Args:
        client: the HTTP client, of either profile.
        query_prefix: what every query id starts with.
    """

    def __init__(self, client: ClickHouseClient, query_prefix: str) -> None:
        self.query_prefix = query_prefix
        self._statements = Statements(client, query_prefix)

    # ------------------------------------------------------------------------------------ design and creation

    def design(self, target: Relation) -> PhysicalDesign | None:
        """Read the table's physical design from ``system.*``; None when nothing has the name."""
        return read_design(self._statements, target)

    def check_design(self, mart: MartSpec, design: PhysicalDesign | None) -> None:
        """Refuse what an exchange would lose or what would write behind its back (DPONE_TARGET_*)."""
        check_design(mart, design)

    def create_target(self, mart: MartSpec) -> str:
        """Create an empty target, and its Atomic database if missing; return the table's UUID.

        Raises:
            DponeError: DPONE_TARGET_EXISTS.
        """
        target = mart.target
        if self.uuid(target) is not None:
            raise DponeError("DPONE_TARGET_EXISTS", f"A table {target.dotted} exists.")
        databases = f"SELECT count() FROM system.databases WHERE name = {literal(target.schema_name)}"
        if not self._statements.value(databases):
            self._statements.run(f"CREATE DATABASE {quote(target.schema_name)} ENGINE = Atomic")
        definition = create_sql(mart, partition_key=partition_key_of(mart))
        self._statements.run(f"CREATE TABLE {relation_sql(target)} {definition}")
        return self._statements.uuid_of(target)

    def create_stage(self, mart: MartSpec, name: str) -> str:
        """Create an empty staging table with the target's own design; return its UUID.

        A leftover of the same operation is dropped first. Equal rows have equal ``_partition_id`` in staging and
        target, which is how the touched partitions are found; staging's parts can become the target's.
        """
        design = self.design(mart.target)
        if design is None:
            raise DponeError("DPONE_TARGET_ABSENT", f"Target {mart.target.dotted} does not exist.")
        stage = Relation(schema_name=mart.target.schema_name, name=name)
        definition = f"AS {relation_sql(mart.target)}"
        if design.detail["constraints"]:
            # They are checked when the shadow is built: not every engine says so when a load breaks one.
            definition = create_sql(mart, partition_key=design.partition_key)
        return self._statements.create_scratch(
            stage, f"CREATE TABLE {relation_sql(stage)} {definition}", never=design.uuid
        )

    # ------------------------------------------------------------------------------------------ rows in and out

    def load(self, stage: Relation, batches: Iterator[pa.RecordBatch], on_rows: Callable[[int], None]) -> int:
        """Stream batches into staging in constant memory; return the number of rows.

        Args:
            on_rows: called after each insert with the number of rows that it added.
        """
        return loading.load(self._statements, stage, batches, on_rows)

    def read(self, mart: MartSpec, uuid: str, scope: Scope) -> pa.Table:
        """Return one generation's rows of a scope in key order, with the contract's Arrow types.

        Raises:
            DponeError: DPONE_GENERATION_GONE when no table of the database has the UUID.
        """
        return loading.read(self._statements, mart, uuid, scope)

    def digest(self, mart: MartSpec, table: Relation, scope: Scope | None = None) -> SetDigest:
        """Return the set digest of the table, or of its rows of one scope."""
        return proof.digest(self._statements, mart, table, _where(mart, scope))

    def count(self, table: Relation, mart: MartSpec, scope: Scope | None = None) -> int:
        """Return the number of rows of the table, or of one scope of it."""
        return self._statements.count(table, _where(mart, scope))

    # ----------------------------------------------------------------------------------------- shadow and proof

    def build_shadow(
        self, mart: MartSpec, design: PhysicalDesign, stage: Relation, shadow: Relation, scope: Scope
    ) -> ShadowReport:
        """Build the next generation beside the target (design, step 8)."""
        return shadows.build_shadow(self._statements, mart, design, stage, shadow, scope)

    def prove(
        self,
        mart: MartSpec,
        design: PhysicalDesign,
        stage: Relation,
        shadow: Relation,
        scope: Scope,
        after: SetDigest,
    ) -> ProofReport:
        """Prove the shadow (design, step 9) against the target, which must still be the one of ``design``."""
        return proof.prove(self._statements, mart, design, stage, shadow, scope, after)

    # ------------------------------------------------------------------------------------------- tables by UUID

    def exchange(self, target: Relation, shadow: Relation) -> None:
        """Send EXCHANGE TABLES once. Any exception means unknown; the UUID map decides."""
        self._statements.run(f"EXCHANGE TABLES {relation_sql(target)} AND {relation_sql(shadow)}")

    def uuid(self, table: Relation) -> str | None:
        """Return the UUID of the table that has the name now; None when there is none."""
        return self._statements.find_uuid(table)

    def rename(self, old: Relation, new: Relation, uuid: str) -> None:
        """Rename the table that has ``uuid``; a no-op when ``new`` has it already.

        Raises:
            DponeError: DPONE_TABLE_REPLACED when neither name has the UUID, or another table has the new name.
        """
        at_new = self.uuid(new)
        if at_new == uuid:
            return
        if at_new is not None:
            raise replaced(new, expected=uuid, observed=at_new)
        if (at_old := self.uuid(old)) != uuid:
            raise replaced(old, expected=uuid, observed=at_old)
        self._statements.run(f"RENAME TABLE {relation_sql(old)} TO {relation_sql(new)}")
        if (renamed := self.uuid(new)) != uuid:
            raise replaced(new, expected=uuid, observed=renamed)

    def drop(self, table: Relation, uuid: str) -> None:
        """Drop the table only if it still has ``uuid``; a no-op when absent (DPONE_TABLE_REPLACED)."""
        self._statements.drop(table, uuid)

    def start_merges(self, table: Relation) -> None:
        """Let merges of the table run again."""
        self._statements.run(f"SYSTEM START MERGES {relation_sql(table)}")

    def quiesce(self, query_prefix: str) -> None:
        """Kill queries with the prefix and return once none is left (DPONE_ENGINE_BUSY)."""
        quiescence.quiesce(self._statements, query_prefix)

    def predecessors(self, target: Relation) -> list[tuple[Relation, str]]:
        """Kept earlier generations, newest first: relation and UUID.

        A table's metadata is written when its shadow is created and kept by renames, so its age is the order
        of generations.
        """
        start = f"{target.name}__dpone_prev__"
        found = self._statements.rows(
            f"SELECT name, toString(uuid) FROM system.tables WHERE database = {literal(target.schema_name)}"
            f" AND startsWith(name, {literal(start)}) ORDER BY metadata_modification_time DESC, name"
        )
        return [(Relation(schema_name=target.schema_name, name=name), uuid) for name, uuid in found]


def _where(mart: MartSpec, scope: Scope | None) -> str:
    return scope_predicate(mart.event_time, scope) if scope else "1"
