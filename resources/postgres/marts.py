"""PostgreSQL standing in for SQL Server as the source: marts, images, receipts and what can be said of a mutation."""

# ruff: noqa: S608 - names are quoted; values are bound.

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.rows import dict_row

from dpone_dagster.contracts.documents import ModelBuildReceipt
from dpone_dagster.contracts.mart import MartSpec, Relation, Scope, arrow_schema
from dpone_dagster.contracts.names import POSTGRES_LIMIT, image_name, session_tag
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import BuildReceipt, CatalogObservation, MutationOutcome, ObservedRelation
from resources.dbt_builder import PARSED_DATABASE, mutation_lock_key
from resources.journal.tables import CONTROL_SCHEMA, IMAGE_SCHEMA
from resources.postgres import dialect
from resources.postgres.reading import raise_if_away, stream

_KINDS = {
    "r": "BASE_TABLE",
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "p": "a partitioned table",
}


class PostgresSource:
    """The embedded profile's source; implements ``SourcePort``.

    Args:
        conninfo: libpq connection string.
        uri: the same engine as a libpq URI, for Arrow reads.
        marts: mart name -> declaration, for images that only an operation names.
        application_name: tag of this adapter's own sessions.
    """

    def __init__(
        self,
        *,
        conninfo: str,
        uri: str,
        marts: Mapping[str, MartSpec] | Sequence[MartSpec],
        application_name: str = "dpone-source",
    ) -> None:
        self._conninfo = conninfo
        self._uri = uri
        known = marts.values() if isinstance(marts, Mapping) else marts
        self._marts = {mart.name: mart for mart in known}
        self._application_name = application_name

    # ------------------------------------------------------------------------------------ the mart's table

    def create_mart(self, mart: MartSpec) -> None:
        """Create the mart's empty table from its contract, with the key as primary key.

        Raises:
            DponeError: DPONE_MART_EXISTS when the name is taken.
        """
        columns = ", ".join(
            f"{dialect.quote(c.name)} {dialect.physical_type(c.type)}{'' if c.nullable else ' not null'}"
            for c in mart.columns
        )
        # The event time leads, so that a day costs a day: every statement of a mutation is bounded by it.
        key = ", ".join(dialect.quote(name) for name in sorted(mart.key, key=lambda name: name != mart.event_time))
        with self._session() as connection:
            if self._kind(connection, mart.source) is not None:
                raise DponeError("DPONE_MART_EXISTS", f"{mart.source.dotted} exists already.")
            connection.execute(f"create schema if not exists {dialect.quote(mart.source.schema_name)}")
            connection.execute(f"create table {dialect.relation_sql(mart.source)} ({columns}, primary key ({key}))")

    def check_mart(self, mart: MartSpec) -> None:
        """Refuse a mart table that is absent, not a plain table, or whose columns drifted from the contract.

        Raises:
            DponeError: DPONE_MART_ABSENT, DPONE_MART_NOT_A_TABLE, DPONE_CONTRACT_DRIFT, DPONE_SCRATCH_CONFLICT.
        """
        with self._session() as connection:
            kind = self._kind(connection, mart.source)
            if kind is None:
                raise DponeError("DPONE_MART_ABSENT", f"{mart.source.dotted} does not exist.")
            if kind != "r":
                raise DponeError(
                    "DPONE_MART_NOT_A_TABLE", f"{mart.source.dotted} is {_KINDS.get(kind, 'something else')}."
                )
            name = dialect.relation_sql(mart.source)
            behind = connection.execute(
                """select c.relpersistence = 'p' as logged, c.relrowsecurity as row_security,
                          c.relhassubclass as subclass,
                          exists (select from pg_inherits where inhrelid = c.oid) as inherits,
                          exists (select from pg_trigger where tgrelid = c.oid and not tgisinternal) as triggers,
                          exists (select from pg_rewrite where ev_class = c.oid) as rules
                   from pg_class as c where c.oid = %s::regclass""",
                [name],
            ).fetchone()
            assert behind is not None
            for what, there in (
                ("an unlogged or temporary table", not behind["logged"]),
                *((word, behind[word.replace(" ", "_")]) for word in ("row security", "triggers", "rules", "inherits")),
                ("a table with subclasses", behind["subclass"]),
            ):
                if there:
                    raise DponeError("DPONE_MART_NOT_A_TABLE", f"{mart.source.dotted} has or is: {what}.")
            _refuse_drift(mart, self._columns(connection, name))
            # dbt drops tables of these names before its transaction begins, whoever they belong to.
            for suffix in ("__dbt_tmp", "__dbt_backup"):
                scratch = Relation(
                    schema_name=mart.source.schema_name,
                    name=mart.source.name[: POSTGRES_LIMIT - len(suffix)] + suffix,
                )
                if self._kind(connection, scratch) is not None:
                    raise DponeError("DPONE_SCRATCH_CONFLICT", f"{scratch.dotted} exists.")

    def _kind(self, connection: psycopg.Connection[dict[str, Any]], relation: Relation) -> str | None:
        row = connection.execute(
            """select c.relkind from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
               where n.nspname = %s and c.relname = %s""",
            [relation.schema_name, relation.name],
        ).fetchone()
        return row["relkind"] if row else None

    @staticmethod
    def _columns(connection: psycopg.Connection[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        return connection.execute(
            """select attname as name, format_type(atttypid, atttypmod) as type, not attnotnull as nullable,
                      attgenerated <> '' or attidentity <> '' as computed
               from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped
               order by attnum""",
            [name],
        ).fetchall()

    # ------------------------------------------------------------------------------------ what a model reads

    def dependencies(self, mart: MartSpec, compiled_sql: str) -> CatalogObservation:
        """Resolve what a compiled query reads: a temporary view of it is made, read back and rolled back.

        The engine itself so proves that it is one query, and says which relations it reads, by object id.

        Raises:
            DponeError: DPONE_CLOSURE_UNPROVEN when it is not one query, uses a volatile function or one of
                somebody's own, or reads a relation that has computed columns; DPONE_MART_ABSENT.
        """
        # The placeholders of the definition proof stand where a moment will: any will do to resolve names.
        sql = compiled_sql.replace(f'"{PARSED_DATABASE}".', "")
        sql = sql.replace("__dpone_scope_start__", "2000-01-01").replace("__dpone_scope_end__", "2000-01-02")
        with self._session(rollback=True) as connection:
            reader = connection.execute(
                "select to_regclass(%s)::oid::bigint as id", [dialect.relation_sql(mart.source)]
            ).fetchone()
            if reader is None or reader["id"] is None:
                raise DponeError("DPONE_MART_ABSENT", f"{mart.source.dotted} does not exist.")
            try:
                # Prepared, because only then does the engine itself refuse a second statement.
                connection.execute(
                    f"create temporary view dpone_reads as select * from (\n{sql}\n) as model", prepare=True
                )
            except psycopg.Error as error:
                raise_if_away(error)
                raise DponeError(
                    "DPONE_CLOSURE_UNPROVEN", f"The query of {mart.name} does not resolve (SQLSTATE {error.sqlstate})."
                ) from None
            found = connection.execute(
                """with depends as (
                       select distinct d.refclassid, d.refobjid from pg_rewrite as r
                       join pg_depend as d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid
                       where r.ev_class = 'dpone_reads'::regclass and d.refobjid <> r.ev_class)
                   select c.oid::bigint as id, n.nspname as schema, c.relname as name, c.relkind as kind,
                          c.relhassubclass as subclass, d.refclassid = 'pg_class'::regclass as relation
                   from depends as d
                   left join pg_class as c on c.oid = d.refobjid and d.refclassid = 'pg_class'::regclass
                   left join pg_namespace as n on n.oid = c.relnamespace
                   order by 1"""
            ).fetchall()
            volatile = connection.execute(
                r"""select exists (
                        select from pg_rewrite as r
                        cross join lateral regexp_matches(r.ev_action::text, ':(?:op)?funcid (\d+)', 'g') as f (ids)
                        join pg_proc as p on p.oid = f.ids[1]::oid
                        where r.ev_class = 'dpone_reads'::regclass and p.provolatile = 'v') as there"""
            ).fetchone()
            if volatile is None or volatile["there"]:
                raise DponeError("DPONE_CLOSURE_UNPROVEN", f"The query of {mart.name} uses a volatile function.")
            if not all(row["relation"] for row in found):
                raise DponeError(
                    "DPONE_CLOSURE_UNPROVEN",
                    f"The query of {mart.name} uses a function, type or operator of somebody's own.",
                )
            relations = []
            for row in found:
                relation = Relation(schema_name=row["schema"], name=row["name"])
                columns = self._columns(connection, dialect.relation_sql(relation))
                if any(column["computed"] and column["name"] for column in columns):
                    raise DponeError(
                        "DPONE_CLOSURE_UNPROVEN", f"{relation.dotted}, read by {mart.name}, has computed columns."
                    )
                text = "\n".join(f"{c['name']} {c['type']} {c['nullable']}" for c in columns)
                relations.append(
                    ObservedRelation(
                        relation=relation,
                        object_id=row["id"],
                        kind="a table with subclasses" if row["subclass"] else _KINDS.get(row["kind"], "unknown"),
                        definition_sha256="sha256:" + hashlib.sha256(text.encode()).hexdigest(),
                    )
                )
            database = connection.info.dbname
        return CatalogObservation(database=database, reader_id=reader["id"], relations=tuple(relations))

    # ------------------------------------------------------------------------------------------- outcome

    def outcome(self, operation: OperationRecord) -> tuple[MutationOutcome, BuildReceipt | None]:
        """Classify a mutation from sessions, receipt and images, in this order; never from what dbt said.

        Sessions come first: when none can commit any more, what is read afterwards is final.

        Returns:
            COMMITTED_WITH_IMAGES with the receipt, else another outcome and None. COMMIT_UNKNOWN stands for
            everything unreadable, live, orphaned or mixed.
        """
        unknown = (MutationOutcome.COMMIT_UNKNOWN, None)
        mart = self._marts.get(operation.mart)
        if mart is None:
            return unknown
        try:
            with self._session() as connection:
                if self._may_still_commit(connection, operation):
                    return unknown
                row = connection.execute(
                    f"select * from {CONTROL_SCHEMA}.model_receipt where operation_id = %s", [operation.operation_id]
                ).fetchone()
                present = [
                    self._kind(connection, _image(operation.operation_id, side)) == "r" for side in ("before", "after")
                ]
        except DponeError as error:
            if error.code != "DPONE_ENGINE_UNAVAILABLE":
                raise
            return unknown
        if row is None:
            if any(present):
                return unknown
            # `mutation_invoked` is durable before dbt is called, so its absence proves that nothing was sent.
            invoked = operation.facts.get("mutation_invoked")
            return (MutationOutcome.ROLLED_BACK if invoked else MutationOutcome.NOT_INVOKED), None
        try:
            receipt = _receipt(row)
        except DponeError:
            return unknown
        same = (
            receipt.operation_plan_sha256 == operation.operation_plan_sha256
            and row["workflow_execution_id"] == operation.workflow_execution_id
            # A later worker may judge what an earlier one committed, never the other way round.
            and receipt.fencing_epoch <= operation.fencing_epoch
            and receipt.before_image == _image(operation.operation_id, "before")
            and receipt.after_image == _image(operation.operation_id, "after")
        )
        if not same or not all(present):
            return unknown
        try:
            images = [
                self.image_digest(mart, image) == digest
                for image, digest in ((receipt.before_image, receipt.before), (receipt.after_image, receipt.after))
            ]
        except DponeError:
            return unknown
        return (MutationOutcome.COMMITTED_WITH_IMAGES, receipt) if all(images) else unknown

    @staticmethod
    def _may_still_commit(connection: psycopg.Connection[dict[str, Any]], operation: OperationRecord) -> bool:
        """Whether a session of the worker is doing something, or any session holds the mart's mutation lock.

        An idle session without a transaction can begin one only while its client lives: the client is this
        process, whose build has ended, or a dead one, whose sessions a takeover has ended.
        """
        key = mutation_lock_key(operation.mart) % 2**64
        row = connection.execute(
            """select exists (
                   select from pg_stat_activity
                   where application_name = %s and pid <> pg_backend_pid() and state is distinct from 'idle'
               ) or exists (
                   select from pg_locks where locktype = 'advisory' and objsubid = 1
                     and database = (select oid from pg_database where datname = current_database())
                     and classid::bigint = %s and objid::bigint = %s
               ) as live""",
            [session_tag(operation.worker_id), key >> 32, key & 0xFFFFFFFF],
        ).fetchone()
        return row is None or bool(row["live"])

    # -------------------------------------------------------------------------------------------- images

    def image_digest(self, mart: MartSpec, image: Relation) -> SetDigest:
        """Digest a whole image."""
        return self._digest(dialect.set_digest_sql(mart.columns, dialect.relation_sql(image)))

    def scope_digest(self, mart: MartSpec, scope: Scope) -> SetDigest:
        """Digest one day of the mart as it is now."""
        within = dialect.scope_predicate(mart.event_time, scope)
        return self._digest(dialect.set_digest_sql(mart.columns, dialect.relation_sql(mart.source), within))

    def read_image(self, mart: MartSpec, image: Relation) -> pa.RecordBatchReader:
        """Stream an image in key order, in batches of a few MiB, cast safely to ``ColumnType.arrow``.

        Raises:
            DponeError: DPONE_VALUE_OUTSIDE_DOMAIN before the first batch when a value would not survive: the driver
                itself turns an infinite timestamp into a year and says nothing.
        """
        relation = dialect.relation_sql(image)
        with self._session() as connection:
            bad = connection.execute(
                f"select exists (select from {relation} where {dialect.domain_violation_sql(mart.columns)}) as bad"
            ).fetchone()
            if bad is None or bad["bad"]:
                raise DponeError(
                    "DPONE_VALUE_OUTSIDE_DOMAIN", f"An image of {mart.name} has a value out of its domain."
                )
        order = ", ".join(dialect.quote(name) for name in mart.key)
        return pa.RecordBatchReader.from_batches(
            arrow_schema(mart.columns),
            stream(self._uri, mart.columns, f"from {relation} order by {order}", what="an image"),
        )

    def drop_images(self, operation: OperationRecord) -> None:
        """Drop both images of an operation; a no-op where they are gone."""
        with self._session() as connection:
            for side in ("before", "after"):
                connection.execute(f"drop table if exists {dialect.relation_sql(_image(operation.operation_id, side))}")

    # ------------------------------------------------------------------------------------------- plumbing

    def _digest(self, sql: str) -> SetDigest:
        with self._session() as connection:
            row = connection.execute(sql).fetchone()
        assert row is not None
        return dialect.parse(tuple(row.values()))

    @contextmanager
    def _session(self, *, rollback: bool = False) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        try:
            connection = psycopg.connect(self._conninfo, application_name=self._application_name, row_factory=dict_row)
        except psycopg.OperationalError:
            raise DponeError("DPONE_ENGINE_UNAVAILABLE", "The SQL engine does not answer.") from None
        try:
            yield connection
            if rollback:
                connection.rollback()
            else:
                connection.commit()
        except psycopg.Error as error:
            raise_if_away(error)
            raise DponeError(
                "DPONE_SOURCE_REFUSED", f"The SQL engine refused a statement (SQLSTATE {error.sqlstate})."
            ) from None
        finally:
            with suppress(psycopg.Error):
                connection.close()


def _image(operation_id: str, side: str) -> Relation:
    return Relation(schema_name=IMAGE_SCHEMA, name=image_name(operation_id, side))


def _refuse_drift(mart: MartSpec, physical: Sequence[dict[str, Any]]) -> None:
    there = {column["name"]: column for column in physical}
    for column in mart.columns:
        if (found := there.get(column.name)) is None:
            raise DponeError(
                "DPONE_CONTRACT_DRIFT", f"{mart.source.dotted} lacks column {column.name}.", field=column.name
            )
        if found["computed"]:
            raise DponeError(
                "DPONE_CONTRACT_DRIFT", f"{mart.source.dotted}.{column.name} is generated.", field=column.name
            )
        if found["type"] != dialect.physical_type(column.type):
            raise DponeError(
                "DPONE_CONTRACT_DRIFT",
                f"{mart.source.dotted}.{column.name} is {found['type']}, the contract says {column.type}.",
                field=column.name,
            )
        if found["nullable"] != column.nullable:
            raise DponeError(
                "DPONE_CONTRACT_DRIFT",
                f"{mart.source.dotted}.{column.name} and the contract differ on NULL.",
                field=column.name,
            )
    if extra := [name for name in there if name not in {c.name for c in mart.columns}]:
        raise DponeError(
            "DPONE_CONTRACT_DRIFT",
            f"{mart.source.dotted} has a column {extra[0]} that the contract lacks.",
            field=extra[0],
        )


def _receipt(row: Mapping[str, Any]) -> BuildReceipt:
    def digest(side: str) -> SetDigest:
        return dialect.parse((row[f"{side}_rows"], *(row[f"{side}_l{lane}"] for lane in range(4))))

    def image(side: str) -> Relation:
        return Relation(schema_name=row[f"{side}_schema"], name=row[f"{side}_name"])

    before, after = digest("before"), digest("after")
    document = ModelBuildReceipt.seal(
        operation_id=row["operation_id"],
        operation_plan_sha256=row["operation_plan_sha256"],
        workflow_execution_id=row["workflow_execution_id"],
        fencing_epoch=row["fencing_epoch"],
        worker_id=row["worker_id"],
        before_image_relation_id=image("before").dotted,
        before_image_row_count=before.rows,
        before_image_sha256=before.sha256,
        after_image_relation_id=image("after").dotted,
        after_image_row_count=after.rows,
        after_image_sha256=after.sha256,
        source_rows=row["source_rows"],
        updated_rows=row["updated_rows"],
        inserted_rows=row["inserted_rows"],
    )
    return BuildReceipt(
        operation_id=row["operation_id"],
        operation_plan_sha256=row["operation_plan_sha256"],
        fencing_epoch=row["fencing_epoch"],
        worker_id=row["worker_id"],
        before_image=image("before"),
        after_image=image("after"),
        before=before,
        after=after,
        updated_rows=row["updated_rows"],
        inserted_rows=row["inserted_rows"],
        source_rows=row["source_rows"],
        sha256=document.sha256,
    )
