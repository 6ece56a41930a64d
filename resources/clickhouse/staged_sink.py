"""ClickHouse as the sink of a governed load: staged, with every finalizer, and straight for what cannot be exchanged.

Every table of a load carries the load's id in its name and is dropped by the UUID that was recorded for it. A shadow's
name carries the epoch too, so that a late request of an overtaken worker finds no table.
"""

# ruff: noqa: S608 - names are quoted; values go through ``literal``.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

import pyarrow as pa
from pydantic import Field

from dpone_dagster.contracts.mart import Relation, Scope
from dpone_dagster.declarations.manifest import Process
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import (
    Columns,
    FinalizeOutcome,
    FinalizeReport,
    FinalizerTraits,
    LoadColumn,
    PhysicalDesign,
    ProbePort,
    StagedLoad,
    Visibility,
    Window,
)
from dpone_dagster.publication.load import places_of
from resources.clickhouse import finalizers, loading, quiescence
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.ddl import Ddl
from resources.clickhouse.design import check_columns, check_exchangeable, read_design
from resources.clickhouse.dialect import relation_sql, row_text_sql
from resources.clickhouse.finalizers import Rebuild, describe, in_scope, partitions_of, target_state
from resources.clickhouse.probe import ClickHouseProbe
from resources.clickhouse.proof import prove_all_visible
from resources.clickhouse.shadow import create_with_untouched, present_partitions
from resources.clickhouse.statements import BOUNDED, Statements, literal, literals, names, replaced

LOAD_ID = LoadColumn(name="__dpone__load_id", type="nvarchar(36)", nullable=False)
LOADED_AT = LoadColumn(name="__dpone__loaded_at", type="datetime2(6)", nullable=False)
ROW_ID = LoadColumn(name="__dpone__row_id", type="nvarchar(64)", nullable=False)
RESERVED = "__dpone__"
_ROLES = {"stage": "load", "projected": "projected", "shadow": "shadow", "removed": "removed"}
# A table is a file ``<database>.<table>.<uuid>.sql`` while it is being dropped, and file names end at 255 bytes.
_FILE_NAME_BYTES = 255 - len("..") - 36 - len(".sql")

AnyName = Annotated[str, Field(min_length=1)]


class Table(Relation):
    """A table of any name."""

    schema_name: AnyName
    name: AnyName


class ClickHouseStagedSink:
    """``StagedLoadPort`` on plain MergeTree tables of Atomic databases.

    Args:
        client: the HTTP client, of either profile.
        query_prefix: what every query id starts with; one load's own, since ``quiesce`` ends what has it.
    """

    visibility = Visibility.PER_PARTITION
    retry_safe = True

    def __init__(self, client: ClickHouseClient, *, query_prefix: str) -> None:
        self.query_prefix = query_prefix
        self._statements = Statements(client, query_prefix)

    def describe(self, strategy: str) -> FinalizerTraits:
        """Say what a reader sees while the strategy finalizes, and whether it may be sent again."""
        return describe(strategy)

    # ------------------------------------------------------------------------------------------ rows into staging

    def stage(
        self, process: Process, columns: Columns, batches: Iterator[pa.RecordBatch], *, load_id: str, epoch: int
    ) -> tuple[StagedLoad, int]:
        """Create staging and stream the batches into it; return it and the number of rows.

        A target that would be refused later is refused before the first row moves.

        Raises:
            DponeError: DPONE_CLUSTER_UNAVAILABLE, DPONE_COLUMN_RESERVED, DPONE_STAGING_DATABASE_ENGINE,
                DPONE_TARGET_*, DPONE_NAME_TOO_LONG, DPONE_ARTIFACT_SCHEMA, DPONE_VALUE_NULL,
                DPONE_VALUE_OUTSIDE_DOMAIN.
        """
        ddl = single_node(process)
        refuse_reserved(columns)
        design = self._design(process, columns)
        staged = StagedLoad(
            load_id=load_id,
            epoch=epoch,
            target_uuid=design.uuid if design else None,
            facts={"places": places_of(process)},
        )
        stage = _scratch(process, staged, "stage")
        self._admit_database(ddl, stage.schema_name)
        if _lineage(process):
            self._statements.create_scratch(stage, ddl.create_table(stage, columns), never=staged.target_uuid)
        else:
            self._create_ready(ddl, process, columns, staged, stage, design)
        rows = loading.load(self._statements, stage, in_order(self._statements, stage, batches), lambda _: None)
        facts = {
            "staged_rows": rows,
            "columns": [c.as_json() for c in table_columns(process, columns)],
            "decisions": _decisions(process),
        }
        return self._recorded(staged, facts=facts, stage=stage), rows

    def project(self, process: Process, columns: Columns, staged: StagedLoad, *, loaded_at: datetime) -> StagedLoad:
        """Project the lineage columns in the engine's SQL; the same ``staged`` where lineage is off.

        Args:
            loaded_at: aware; kept to the microsecond in UTC.
        """
        if not _lineage(process):
            return staged
        ddl, design = single_node(process), self._design(process, columns)
        self._check_target(process, design, staged)
        stage, projected = self._own(staged, "stage"), _scratch(process, staged, "projected")
        self._create_ready(ddl, process, columns, staged, projected, design)
        moment = loaded_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        values = [names([c.name for c in columns]), literal(staged.load_id), f"toDateTime64('{moment}', 6, 'UTC')"]
        if key := _row_identity(process, columns):
            values.append(f"lower(hex(SHA256({row_text_sql(key)})))")
        self._statements.run(
            f"INSERT INTO {relation_sql(projected)} ({names(c.name for c in table_columns(process, columns))})"
            f" SELECT {', '.join(values)} FROM {relation_sql(stage)}",
            **BOUNDED,
        )
        return self._recorded(staged, projected=projected)

    def staged_probe(self, process: Process, columns: Columns, staged: StagedLoad) -> ProbePort:
        """Measure the staged rows."""
        ready = self._ready(staged)
        return self._probe(columns, ready, "1", side="staged")

    def target_probe(self, process: Process, columns: Columns, staged: StagedLoad, window: Window) -> ProbePort:
        """Measure, in the target, the rows that the load is answerable for: its day, its keys, or everything.

        Raises:
            DponeError: DPONE_ACCEPTANCE_UNAVAILABLE for ``append`` without lineage: nothing tells its rows apart.
        """
        strategy, where = process.sink.strategy, "1"
        if strategy == "append":
            where = _of_load(process, staged.load_id)
        elif strategy == "merge":
            key = names(process.sink.unique_key or ())
            where = f"({key}) IN (SELECT {key} FROM {relation_sql(self._ready(staged))})"
        elif strategy == "partition_replace":
            where = f"_partition_id IN ({literals(staged.facts['touched'])})"
        elif strategy == "replace" and window.scope is not None:
            where = in_scope(str(process.source.read.column), window.scope)
        return self._probe(columns, _target(process, staged), where, side="target")

    # ----------------------------------------------------------------------------------------------- the next state

    def prepare(self, process: Process, columns: Columns, staged: StagedLoad, window: Window) -> StagedLoad:
        """Check the target and build everything that ``finalize`` swaps in; the target stays as it is.

        Raises:
            DponeError: DPONE_TARGET_*, DPONE_PARTITION_WIDER_THAN_SCOPE, DPONE_KEY_NOT_UNIQUE, DPONE_KEY_NULL,
                DPONE_STAGE_MISMATCH, DPONE_PROOF_FAILED, DPONE_TABLE_REPLACED.
        """
        ddl, design = single_node(process), self._design(process, columns)
        self._check_target(process, design, staged)
        ready, rows = self._ready(staged), int(staged.facts["staged_rows"])
        if (found := self._statements.count(ready)) != rows:
            raise DponeError("DPONE_STAGE_MISMATCH", f"{rows} rows were staged and {ready.dotted} has {found}.")
        self._check_scope(process, ready, window.scope)
        key = _key(process, columns)
        if process.sink.strategy == "merge":
            finalizers.check_keys(self._statements, ready, key)
            finalizers.check_unique(self._statements, ready, [c.name for c in key], rows)
        # What an earlier attempt built has another state of the target in it.
        for role in ("shadow", "removed"):
            self._drop_scratch(process, staged, role)
        if design is None:
            return self._prepare_first(ddl, process, staged, ready, rows)
        if process.sink.strategy == "partition_replace":
            return self._prepare_partitions(ddl, process, staged, design, ready, rows, window.scope)
        return self._prepare_exchange(process, columns, staged, design, ready, rows, window.scope)

    def _prepare_first(self, ddl: Ddl, process: Process, staged: StagedLoad, ready: Table, rows: int) -> StagedLoad:
        """There is no target: the shadow becomes it, whatever the strategy."""
        target, shadow = _target(process, staged), _scratch(process, staged, "shadow")
        self._admit_database(ddl, target.schema_name)
        partitions = sorted(present_partitions(self._statements, ready))
        create_with_untouched(self._statements, ready, shadow, partitions, ())
        self._check_rows(shadow, rows)
        facts = {
            "finalizer": "rename",
            "target_rows": 0,
            "kept_rows": 0,
            "expected_rows": rows,
            "touched": partitions if process.sink.strategy == "partition_replace" else [],
            "touched_partitions": len(partitions),
        }
        return self._recorded(staged, facts=facts, shadow=shadow)

    def _prepare_exchange(
        self,
        process: Process,
        columns: Columns,
        staged: StagedLoad,
        design: PhysicalDesign,
        ready: Table,
        rows: int,
        scope: Scope | None,
    ) -> StagedLoad:
        statements, target, shadow = self._statements, _target(process, staged), _scratch(process, staged, "shadow")
        before = target_state(statements, target)
        rebuild = self._rebuild(process, columns, target, ready, rows, scope)
        built = finalizers.build(
            statements,
            single_node(process),
            design=design,
            columns=table_columns(process, columns),
            ready=ready,
            shadow=shadow,
            staged_rows=rows,
            rebuild=rebuild,
            target_rows=before.rows,
        )
        if target_state(statements, target).sha256() != before.sha256():
            raise _changed(target)
        facts = {
            "finalizer": "exchange",
            "target_rows": before.rows,
            "kept_rows": built.kept_rows,
            "expected_rows": built.rows,
            "design_sha256": design.sha256,
            "state_sha256": before.sha256(),
            "touched_partitions": len(rebuild.touched),
            "untouched_by_parts": built.by_parts,
            "untouched_by_digest": built.by_digest,
        }
        return self._recorded(staged, facts=facts, shadow=shadow)

    def _rebuild(
        self, process: Process, columns: Columns, target: Table, ready: Table, rows: int, scope: Scope | None
    ) -> Rebuild:
        statements, strategy = self._statements, process.sink.strategy
        if strategy == "append":
            return Rebuild(touched=frozenset())
        staged = partitions_of(statements, ready)
        if strategy == "merge":
            key = _key(process, columns)
            key_names = tuple(c.name for c in key)
            touched = staged | finalizers.key_holders(statements, target, ready, key_names, rows)
            finalizers.check_keys(statements, target, key, where=f"_partition_id IN ({literals(sorted(touched))})")
            return Rebuild(touched=frozenset(touched), gone=None, key=key_names)
        if strategy == "replace" and scope is not None:
            gone = in_scope(str(process.source.read.column), scope)
            return Rebuild(touched=frozenset(staged | partitions_of(statements, target, gone)), gone=gone)
        return Rebuild(touched=frozenset(staged | present_partitions(statements, target)))

    def _prepare_partitions(
        self,
        ddl: Ddl,
        process: Process,
        staged: StagedLoad,
        design: PhysicalDesign,
        ready: Table,
        rows: int,
        scope: Scope | None,
    ) -> StagedLoad:
        statements, target, shadow = self._statements, _target(process, staged), _scratch(process, staged, "shadow")
        before = target_state(statements, target)
        mine = partitions_of(statements, ready)
        touched = set(mine)
        if scope is not None:
            day = in_scope(str(process.source.read.column), scope)
            touched |= partitions_of(statements, target, day)
            outside = f"_partition_id IN ({literals(sorted(touched))}) AND NOT {day}"
            if wider := statements.count(target, outside):
                raise DponeError(
                    "DPONE_PARTITION_WIDER_THAN_SCOPE",
                    f"{wider} rows of other days share a partition of {target.dotted} with {scope.key}.",
                    rows=wider,
                )
        going = f"_partition_id IN ({literals(sorted(touched))})"
        prove_all_visible(statements, target, sorted(touched))
        gone = statements.count(target, going)
        create_with_untouched(statements, target, shadow, (), ())
        if mine and not design.detail["constraints"]:
            statements.run(ddl.attach(shadow, ready))
        elif mine:
            columns = names(name for name, _ in design.columns)
            statements.run(
                f"INSERT INTO {relation_sql(shadow)} ({columns}) SELECT {columns} FROM {relation_sql(ready)}", **BOUNDED
            )
        self._check_rows(shadow, rows)
        made = {"shadow": shadow}
        if emptied := sorted((touched - mine) & before.blocks.keys()):
            # REPLACE takes no partition without parts, and a DROP would name nothing that only this load has.
            made["removed"] = _scratch(process, staged, "removed")
            create_with_untouched(statements, target, made["removed"], (), ())
        facts = {
            "finalizer": "partition_replace",
            "target_rows": before.rows,
            "kept_rows": before.rows - gone,
            "expected_rows": before.rows - gone + rows,
            "design_sha256": design.sha256,
            "state_sha256": before.sha256(without=sorted(touched)),
            "blocks": {key: block for key, block in before.blocks.items() if key in touched},
            "touched": sorted(touched),
            "emptied": emptied,
            "touched_partitions": len(touched),
        }
        return self._recorded(staged, facts=facts, **made)

    # ------------------------------------------------------------------------------------------------- the change

    def recheck(self, process: Process, staged: StagedLoad) -> None:
        """Refuse a target that changed since ``prepare``. Nothing has been sent: a refusal here is pre-commit.

        Raises:
            DponeError: DPONE_TARGET_REPLACED, DPONE_TARGET_DESIGN_CHANGED, DPONE_TARGET_CHANGED, DPONE_SHADOW_LOST,
                DPONE_PROOF_FAILED.
        """
        statements, target, facts = self._statements, _target(process, staged), staged.facts
        shadow = _table(staged, "shadow")
        if statements.find_uuid(shadow) != staged.tables["shadow"]["uuid"]:
            raise DponeError("DPONE_SHADOW_LOST", f"Table {shadow.dotted} is not the one that was proven.")
        design = read_design(statements, target)
        self._check_target(process, design, staged)
        if facts["finalizer"] == "rename":
            self._check_rows(shadow, int(facts["expected_rows"]))
            return
        if design is None or design.sha256 != facts["design_sha256"]:
            raise DponeError(
                "DPONE_TARGET_DESIGN_CHANGED", f"Target {target.dotted} does not have the design that was observed."
            )
        state = target_state(statements, target)
        if facts["finalizer"] == "exchange":
            self._check_rows(shadow, int(facts["expected_rows"]))
            if state.sha256() != facts["state_sha256"]:
                raise _changed(target)
            return
        # Some partitions may be in place already: an earlier finalize is finished forward.
        moved = [each for each in facts["touched"] if state.blocks.get(each) != facts["blocks"].get(each)]
        if state.sha256(without=facts["touched"]) != facts["state_sha256"] or self._not_in_place(target, staged, moved):
            raise _changed(target)

    def finalize(self, process: Process, staged: StagedLoad) -> None:
        """Recheck, then send what changes the target, once. Any exception means unknown; ``outcome`` decides."""
        self.recheck(process, staged)
        ddl, target, shadow = single_node(process), _target(process, staged), _table(staged, "shadow")
        match staged.facts["finalizer"]:
            case "rename":
                self._statements.run(ddl.rename(shadow, target))
            case "exchange":
                self._statements.run(ddl.exchange(target, shadow))
            case _:
                present = present_partitions(self._statements, target)
                for partition in staged.facts["touched"]:
                    if partition not in staged.facts["emptied"]:
                        self._statements.run(ddl.replace_partition(target, partition, shadow))
                    elif partition in present:
                        self._statements.run(ddl.move_partition(target, partition, _table(staged, "removed")))

    def outcome(self, process: Process, staged: StagedLoad, *, end: bool = True) -> FinalizeOutcome:
        """Read from the engine whether ``finalize`` took effect.

        Before it says anything but COMMITTED no statement of this load may be left that could still take effect.

        Args:
            end: end such statements; otherwise the answer is UNKNOWN while there are any, since a worker may be alive.
        """
        if "finalizer" not in staged.facts:
            return FinalizeOutcome.NOT_COMMITTED  # nothing was prepared, so nothing was ever sent
        try:
            if (found := self._outcome(process, staged)) is not FinalizeOutcome.COMMITTED:
                if end:
                    self.quiesce(staged)
                elif quiescence.running(self._statements, self.query_prefix):
                    return FinalizeOutcome.UNKNOWN
                found = self._outcome(process, staged)
        except DponeError as error:
            if error.code in ("DPONE_ENGINE_UNAVAILABLE", "DPONE_ENGINE_BUSY"):
                return FinalizeOutcome.UNKNOWN
            raise
        return found

    def _outcome(self, process: Process, staged: StagedLoad) -> FinalizeOutcome:
        target, shadow_uuid = _target(process, staged), staged.tables["shadow"]["uuid"]
        now = self._statements.find_uuid(target)
        if staged.facts["finalizer"] != "partition_replace":
            if now == shadow_uuid:
                return FinalizeOutcome.COMMITTED
            waiting = self._statements.find_uuid(_table(staged, "shadow")) == shadow_uuid
            return FinalizeOutcome.NOT_COMMITTED if waiting or now == staged.target_uuid else FinalizeOutcome.UNKNOWN
        touched, blocks = staged.facts["touched"], staged.facts["blocks"]
        if now != staged.target_uuid:
            return FinalizeOutcome.UNKNOWN
        state = target_state(self._statements, target)
        waiting = self._statements.find_uuid(_table(staged, "shadow")) == shadow_uuid
        if waiting and not self._not_in_place(target, staged, touched):
            return FinalizeOutcome.COMMITTED
        as_before = all(state.blocks.get(each) == blocks.get(each) for each in touched)
        if as_before and state.sha256(without=touched) == staged.facts["state_sha256"]:
            return FinalizeOutcome.NOT_COMMITTED
        return FinalizeOutcome.UNKNOWN

    def report(self, process: Process, columns: Columns, staged: StagedLoad) -> FinalizeReport:
        """Say what a committed finalize did."""
        facts, target = staged.facts, _target(process, staged)
        first = facts["finalizer"] == "rename"
        traits = describe("full_refresh" if first else process.sink.strategy)
        return FinalizeReport(
            strategy=process.sink.strategy,
            visibility=traits.visibility,
            retry_safe=traits.retry_safe,
            rows=int(facts["staged_rows"]),
            rows_replaced=int(facts["target_rows"]) - int(facts["kept_rows"]),
            target_rows=self._statements.count(target),
            target_uuid=self._statements.find_uuid(target),
        )

    def cleanup(self, process: Process, staged: StagedLoad) -> None:
        """Drop scratch tables by UUID; never the target. Safe to repeat, before or after a finalize.

        What was made and not recorded goes too: no other load has its name.
        """
        target, shadow = _target(process, staged), staged.tables.get("shadow")
        if shadow is not None and self._statements.find_uuid(target) == shadow["uuid"]:
            self._statements.run(single_node(process).start_merges(target))
        for role in _ROLES:
            self._drop_scratch(process, staged, role)

    def quiesce(self, staged: StagedLoad) -> None:
        """End this load's statements and return once none is left (DPONE_ENGINE_BUSY)."""
        quiescence.quiesce(self._statements, self.query_prefix)

    # --------------------------------------------------------------------------------------------------- the parts

    def _design(self, process: Process, columns: Columns) -> PhysicalDesign | None:
        """The target's design, checked; None where there is no target yet."""
        design = read_design(self._statements, _target(process))
        if design is not None:
            check_exchangeable(design)
            check_columns(design, table_columns(process, columns))
        return design

    def _check_target(self, process: Process, design: PhysicalDesign | None, staged: StagedLoad) -> None:
        target, observed = _target(process, staged), design.uuid if design else None
        if observed != staged.target_uuid or target != _target(process):
            raise DponeError(
                "DPONE_TARGET_REPLACED",
                f"Target {target.dotted} is no longer the table that the rows were staged for.",
                expected_uuid=staged.target_uuid,
                observed_uuid=observed,
            )

    def _admit_database(self, ddl: Ddl, name: str) -> None:
        """Create a missing database; refuse one whose tables have no UUID."""
        wanted = f"SELECT engine FROM system.databases WHERE name = {literal(name)}"
        if not (found := self._statements.rows(wanted)):
            self._statements.run(ddl.create_database(name))
            found = self._statements.rows(wanted)
        if (engine := found[0][0]) != "Atomic":
            raise DponeError("DPONE_STAGING_DATABASE_ENGINE", f"Database {name} has engine {engine}.")

    def _create_ready(
        self,
        ddl: Ddl,
        process: Process,
        columns: Columns,
        staged: StagedLoad,
        table: Table,
        design: PhysicalDesign | None,
    ) -> None:
        """Create the table whose parts can become the target's."""
        all_columns = table_columns(process, columns)
        if design is None:
            storage = process.sink.physical_design.storage.clickhouse
            key = storage.order_by if storage.order_by is not None else process.sink.unique_key or ()
            sql = ddl.create_table(table, all_columns, partition_by=storage.partition_by or "", order_by=key)
        elif design.detail["constraints"]:
            # They are checked when the shadow is built: not every engine says so when a load breaks one.
            sql = ddl.create_table(table, all_columns, partition_by=design.partition_key)
        else:
            sql = ddl.create_as(table, _target(process))
        self._statements.create_scratch(table, sql, never=staged.target_uuid)

    def _recorded(self, staged: StagedLoad, *, facts: Mapping[str, Any] | None = None, **made: Table) -> StagedLoad:
        tables = dict(staged.tables)
        for role, table in made.items():
            uuid = self._statements.uuid_of(table)
            tables[role] = {"schema": table.schema_name, "name": table.name, "uuid": uuid}
        return replace(staged, tables=tables, facts={**staged.facts, **(facts or {})})

    def _own(self, staged: StagedLoad, role: str) -> Table:
        """A recorded table, checked to be the one that was recorded."""
        table, uuid = _table(staged, role), staged.tables[role]["uuid"]
        if (observed := self._statements.find_uuid(table)) != uuid:
            raise replaced(table, expected=uuid, observed=observed)
        return table

    def _ready(self, staged: StagedLoad) -> Table:
        return self._own(staged, "projected" if "projected" in staged.tables else "stage")

    def _check_rows(self, shadow: Table, rows: int) -> None:
        if (found := self._statements.count(shadow)) != rows:
            raise DponeError(
                "DPONE_PROOF_FAILED",
                f"Table {shadow.dotted} has {found} rows where {rows} belong.",
                expected_rows=rows,
                observed_rows=found,
            )

    def _check_scope(self, process: Process, ready: Table, scope: Scope | None) -> None:
        column = process.source.read.column
        if scope is None or column is None:
            return
        if outside := self._statements.count(ready, f"NOT {in_scope(column, scope)}"):
            raise DponeError("DPONE_STAGE_MISMATCH", f"{outside} staged rows are outside {scope.key}.", rows=outside)

    def _not_in_place(self, target: Table, staged: StagedLoad, partitions: Sequence[str]) -> set[str]:
        columns = [LoadColumn.parse(column) for column in staged.facts["columns"]]
        shadow = _table(staged, "shadow")
        return finalizers.differing_partitions(self._statements, columns, target, shadow, partitions)

    def _drop_scratch(self, process: Process, staged: StagedLoad, role: str) -> None:
        """Drop the tables that have this load's name for a role, of whatever epoch."""
        stem, recorded = _stem(process, staged, role), staged.tables.get(role)
        schema = _scratch(process, staged, role).schema_name
        found = self._statements.rows(
            f"SELECT name, toString(uuid) FROM system.tables WHERE database = {literal(schema)}"
            f" AND startsWith(name, {literal(stem)})"
        )
        for name, uuid in found:
            table = Table(schema_name=schema, name=name)
            if recorded is not None and name == recorded["name"] and uuid not in (recorded["uuid"], staged.target_uuid):
                raise replaced(table, expected=recorded["uuid"], observed=uuid)
            if uuid == staged.target_uuid:
                self._check_predecessor(process, staged, table)
            self._statements.drop(table, uuid)

    def _check_predecessor(self, process: Process, staged: StagedLoad, table: Table) -> None:
        """The table that was exchanged has the shadow's name now. Keep it where it is the only copy of a row."""
        if self._statements.find_uuid(_target(process, staged)) in (None, staged.target_uuid):
            raise replaced(table, expected="(not the target)", observed=staged.target_uuid)
        # A stranger's insert that was on its way during the exchange arrives in the table that it was sent to.
        if target_state(self._statements, table).sha256() != staged.facts.get("state_sha256"):
            raise DponeError(
                "DPONE_TARGET_CHANGED",
                f"Table {table.dotted}, which was exchanged, was written to meanwhile, so it is kept.",
                next_step=f"Copy what is missing into the target, drop {table.dotted}, then run the load again.",
            )

    def _probe(self, columns: Columns, table: Table, where: str, *, side: str) -> ProbePort:
        return _probe(self._statements, columns, table, where, side=side)


class ClickHouseDirectSink:
    """``LegacySinkPort``: one INSERT after the other, straight into a table of any engine.

    Readers see rows as they arrive, and a load that is sent again doubles them. Load id and load time are constants of
    the inserted blocks; a row id would need staging.

    Args:
        client: the HTTP client, of either profile.
        query_prefix: what every query id starts with; one load's own.
    """

    visibility = finalizers.LEGACY.visibility
    retry_safe = finalizers.LEGACY.retry_safe

    def __init__(self, client: ClickHouseClient, *, query_prefix: str) -> None:
        self.query_prefix = query_prefix
        self._statements = Statements(client, query_prefix)

    def check(self, process: Process, columns: Columns) -> None:
        """Refuse a target that does not fit, before anything is written.

        Raises:
            DponeError: DPONE_CLUSTER_UNAVAILABLE, DPONE_COLUMN_RESERVED, DPONE_ROW_IDENTITY_UNSUPPORTED,
                DPONE_TARGET_ABSENT, DPONE_TARGET_NOT_A_TABLE, DPONE_TARGET_COLUMNS.
        """
        single_node(process)
        refuse_reserved(columns)
        identity = process.sink.options.lineage.row_identity
        strict = identity.mode == "required" or (identity.mode == "auto" and identity.unsupported_policy == "error")
        if _lineage(process) and strict:
            raise DponeError("DPONE_ROW_IDENTITY_UNSUPPORTED", "A load without staging computes no __dpone__row_id.")
        design = read_design(self._statements, _target(process))
        if design is None:
            raise DponeError(
                "DPONE_TARGET_ABSENT",
                f"Target {process.sink.table.dotted} does not exist.",
                next_step="Create the table; a load without staging does not.",
            )
        if design.engine.endswith("View") or design.engine == "Dictionary":
            raise DponeError("DPONE_TARGET_NOT_A_TABLE", f"Target {process.sink.table.dotted} is a {design.engine}.")
        check_columns(design, _direct_columns(process, columns))

    def load(
        self,
        process: Process,
        columns: Columns,
        batches: Iterator[pa.RecordBatch],
        *,
        load_id: str,
        loaded_at: datetime,
    ) -> FinalizeReport:
        """Insert the batches; what was inserted before an error stays."""
        self.check(process, columns)
        target = _target(process)
        if _lineage(process):
            batches = (_with_lineage(batch, load_id, loaded_at) for batch in batches)
        rows = loading.load(self._statements, target, in_order(self._statements, target, batches), lambda _: None)
        return FinalizeReport(
            strategy=process.sink.strategy,
            visibility=self.visibility,
            retry_safe=self.retry_safe,
            rows=rows,
            rows_replaced=0,
            target_rows=self._statements.count(target),
            target_uuid=self._statements.find_uuid(target),
        )

    def target_probe(self, process: Process, columns: Columns, window: Window, *, load_id: str) -> ProbePort:
        """Measure the rows that this load added.

        Raises:
            DponeError: DPONE_ACCEPTANCE_UNAVAILABLE where lineage does not tell them.
        """
        return _probe(self._statements, columns, _target(process), _of_load(process, load_id), side="target")


# -------------------------------------------------------------------------------------------------------- columns


def table_columns(process: Process, columns: Columns) -> Columns:
    """Return the target's columns: the business columns, then those of lineage."""
    if not _lineage(process):
        return columns
    return (*columns, LOAD_ID, LOADED_AT, *((ROW_ID,) if _row_identity(process, columns) else ()))


def refuse_reserved(columns: Columns) -> None:
    """Refuse source columns with names of the platform or of the engine.

    Raises:
        DponeError: DPONE_COLUMN_RESERVED.
    """
    for column in columns:
        if column.name.startswith(RESERVED) or column.name == "_partition_id":
            raise DponeError("DPONE_COLUMN_RESERVED", f"Column {column.name} is not the source's.", field=column.name)


def in_order(statements: Statements, table: Relation, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Put each batch's columns into a table's order; a batch with other columns is passed on for its refusal."""
    order = list(statements.columns(table))
    for batch in batches:
        yield batch.select(order) if sorted(batch.schema.names) == sorted(order) else batch


def _lineage(process: Process) -> bool:
    return process.sink.options.lineage.enabled


def _key(process: Process, columns: Columns) -> Columns:
    by_name = {c.name: c for c in columns}
    missing = [name for name in process.sink.unique_key or () if name not in by_name]
    if missing:
        raise DponeError("DPONE_SOURCE_COLUMN", f"The source has no key column {missing[0]}.", field=missing[0])
    return tuple(by_name[name] for name in process.sink.unique_key or ())


def _row_identity(process: Process, columns: Columns) -> Columns:
    """The columns that the row id is computed of; none where there is no row id."""
    return () if process.sink.options.lineage.row_identity.mode == "off" else _key(process, columns)


def _decisions(process: Process) -> list[dict[str, str]]:
    identity = process.sink.options.lineage.row_identity
    # The manifest refuses the strict forms without a key before anything runs.
    skipped = _lineage(process) and identity.mode == "auto" and not process.sink.unique_key
    if skipped and identity.unsupported_policy == "warn":
        return [{"decision": "row_identity", "chosen": "none", "reason": "no unique_key"}]
    return []


def _direct_columns(process: Process, columns: Columns) -> Columns:
    return (*columns, LOAD_ID, LOADED_AT) if _lineage(process) else columns


def _with_lineage(batch: pa.RecordBatch, load_id: str, loaded_at: datetime) -> pa.RecordBatch:
    values = {LOAD_ID: load_id, LOADED_AT: loaded_at.astimezone(UTC)}
    for column, value in values.items():
        constant: Any = pa.array([value], column.spec.arrow).take(pa.array([0] * batch.num_rows, pa.int8()))
        batch = batch.append_column(column.name, constant)
    return batch


# ---------------------------------------------------------------------------------------------------------- names


def single_node(process: Process) -> Ddl:
    """Return the DDL of a load.

    Raises:
        DponeError: DPONE_CLUSTER_UNAVAILABLE when it names a cluster: counts, UUIDs and outcomes are one node's.
    """
    cluster = process.sink.physical_design.storage.clickhouse.cluster
    if cluster is not None:
        raise DponeError(
            "DPONE_CLUSTER_UNAVAILABLE",
            f"{process.name} loads into cluster {cluster}.",
            field="sink.physical_design.storage.clickhouse.cluster",
        )
    return Ddl(cluster)


def _target(process: Process, staged: StagedLoad | None = None) -> Table:
    """The target of a load that was staged, else of the manifest."""
    places = staged.facts.get("places") if staged else None
    if places is not None:
        return Table(schema_name=places["target"]["schema"], name=places["target"]["name"])
    return Table(schema_name=process.sink.table.schema_name, name=process.sink.table.name)


def _table(staged: StagedLoad, role: str) -> Table:
    kept = staged.tables[role]
    return Table(schema_name=kept["schema"], name=kept["name"])


def _stem(process: Process, staged: StagedLoad, role: str) -> str:
    short = staged.load_id.replace("-", "")[:16]
    return f"{_target(process, staged).name}__dpone_{_ROLES[role]}__{short}"


def _scratch(process: Process, staged: StagedLoad, role: str) -> Table:
    """The table of a role; those that a finalizer names carry the epoch."""
    places = staged.facts.get("places", {})
    schema = places.get("scratch_schema") or process.sink.staging.schema_name or process.sink.table.schema_name
    suffix = f"_{staged.epoch}" if role in ("shadow", "removed") else ""
    table = Table(schema_name=schema, name=f"{_stem(process, staged, role)}{suffix}")
    if (size := _file_bytes(table.schema_name) + _file_bytes(table.name)) > _FILE_NAME_BYTES:
        raise DponeError("DPONE_NAME_TOO_LONG", f"A scratch table's name has {size} bytes of {_FILE_NAME_BYTES}.")
    return table


def _file_bytes(name: str) -> int:
    """The length of a name in a file name, where everything but ASCII letters, digits and _ is escaped."""
    return sum(1 if byte < 128 and (chr(byte).isalnum() or byte == ord("_")) else 3 for byte in name.encode())


def _of_load(process: Process, load_id: str) -> str:
    if not _lineage(process):
        raise DponeError(
            "DPONE_ACCEPTANCE_UNAVAILABLE",
            f"Nothing tells the rows that {process.name} appended from those that were there.",
            next_step="Switch sink.options.lineage.enabled on, or quality.acceptance.capture.target off.",
            side="target",
        )
    return f"{names([LOAD_ID.name])} = {literal(load_id)}"


def _changed(target: Relation) -> DponeError:
    return DponeError("DPONE_TARGET_CHANGED", f"Target {target.dotted} was written to meanwhile.")


def _probe(statements: Statements, columns: Columns, table: Table, where: str, *, side: str) -> ProbePort:
    return ClickHouseProbe(
        statements,
        columns=columns,
        relation_sql=relation_sql(table),
        where_sql=where,
        side=side,
        dataset=table.dotted,
    )
