"""The physical authority of a target: what ``system.*`` says of it, and what of that is refused.

The design's digest covers database engine, complete engine expression, columns with defaults and codecs, partition,
order, primary and sampling keys, storage policy, skipping indices, projections, constraints, TTLs, views that
write into the table, views and dictionaries that hang on it, and unfinished mutations: spec R's list. Absent mechanisms
are in it as empty lists. Names and UUIDs of the table itself are not, so that target, shadow and exchanged
target have one digest.
"""

# ruff: noqa: S608 - names match ``contracts.mart.Identifier`` and are quoted; values go through ``literal``.

import re
from collections.abc import Sequence
from typing import Any, NoReturn

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.mart import Column, MartSpec, Relation
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import PhysicalDesign
from resources.clickhouse.statements import Statements, literal

SCHEMA = "dpone.clickhouse-physical-design.v1"

# The admitted partition expressions of the event time. Its type is DateTime64(6,'UTC'), so these cut in UTC.
_PARTITION_FUNCTIONS = {
    "day": ("toYYYYMMDD", "toDate", "toStartOfDay"),
    "month": ("toYYYYMM", "toStartOfMonth"),
}
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`")


def read_design(statements: Statements, target: Relation) -> PhysicalDesign | None:
    """Read the physical design of a table or view; None when nothing has the name."""
    database, name = literal(target.schema_name), literal(target.name)
    mine = f"database = {database} AND table = {name}"
    has_target = _views_have_target(statements)
    written_by = f"target_database = {database} AND target_table = {name}" if has_target else "0"
    # One statement: it is asked half a dozen times a day, and its answers belong to one moment.
    found = statements.rows(
        "SELECT toString(t.uuid), d.engine, t.engine, t.engine_full, t.partition_key, t.sorting_key, t.primary_key,"
        " t.sampling_key, t.storage_policy, t.create_table_query,"
        " arraySort(arrayZip(t.dependencies_database, t.dependencies_table)),"
        " arraySort(arrayZip(t.loading_dependent_database, t.loading_dependent_table)),"
        f" {_list('position, name, type, default_kind, default_expression, compression_codec', 'columns', mine)},"
        f" {_list('name, type_full, expr, granularity', 'data_skipping_indices', mine)},"
        f" {_list('name, toString(type), query', 'projections', mine)},"
        f" {_list('name, toString(type), expression', 'constraints', mine)},"
        f" {_list('database, name', 'tables', written_by)},"
        f" (SELECT count() FROM system.mutations WHERE {mine} AND NOT is_done)"
        # A lightweight UPDATE waits in a patch part until a merge applies it.
        f" + (SELECT count() FROM system.parts WHERE {mine} AND active AND startsWith(partition_id, 'patch-'))"
        " FROM system.tables AS t JOIN system.databases AS d ON d.name = t.database"
        f" WHERE t.database = {database} AND t.name = {name}",
        show_table_uuid_in_table_create_query_if_not_nil=0,
    )
    if not found:
        return None
    (
        uuid,
        database_engine,
        engine,
        engine_full,
        partition_key,
        sorting_key,
        primary_key,
        sampling_key,
        storage_policy,
        definition,
        outgoing,
        dependents,
        columns,
        skipping_indices,
        projections,
        constraints,
        writers,
        unfinished,
    ) = found[0]
    columns = [list(column[1:]) for column in columns]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "database_engine": database_engine,
        "engine": engine,
        "engine_full": engine_full,
        "columns": columns,
        "partition_key": partition_key,
        "sorting_key": sorting_key,
        "primary_key": primary_key,
        "sampling_key": sampling_key,
        "storage_policy": storage_policy,
        "ttl": _has_ttl(definition),
        "skipping_indices": [list(each) for each in skipping_indices],
        "projections": [list(each) for each in projections],
        "constraints": [list(each) for each in constraints],
        "written_by": [".".join(pair) for pair in writers] if has_target else unseen_writers(statements),
        "read_by": [".".join(pair) for pair in (*outgoing, *dependents)],
        "unfinished_mutations": unfinished,
    }
    return PhysicalDesign(
        relation=target,
        uuid=uuid,
        database_engine=database_engine,
        engine=engine,
        columns=tuple((column[0], column[1]) for column in columns),
        partition_key=partition_key,
        order_key=sorting_key,
        sha256=sha256_of(document),
        detail=document,
    )


def unseen_writers(statements: Statements) -> list[str] | None:
    """On a server whose ``system.tables`` lacks ``target_table``: no writers, or None where it cannot say.

    There only a view with an inner table of its own is known to write elsewhere.
    """
    unknown = statements.value(
        "SELECT count() FROM system.tables WHERE engine LIKE '%View' AND engine != 'View'"
        " AND concat('.inner_id.', toString(uuid)) NOT IN (SELECT name FROM system.tables)"
    )
    return None if unknown else []


def check_exchangeable(design: PhysicalDesign) -> None:
    """Refuse everything that an exchange would lose, or that would write behind its back, whatever the table holds.

    Raises:
        DponeError: one DPONE_TARGET_* code for each kind of refusal.
    """
    detail = design.detail

    def refuse(code: str, sentence: str) -> None:
        raise DponeError(code, f"Target {design.relation.dotted} {sentence}.")

    if design.engine.endswith("View") or design.engine == "Dictionary":
        refuse("DPONE_TARGET_NOT_A_TABLE", f"is a {design.engine}")
    if design.engine.startswith(("Replicated", "Shared")) or design.database_engine in ("Replicated", "Shared"):
        refuse("DPONE_TARGET_REPLICATED", f"is {design.engine} in a {design.database_engine} database")
    if design.database_engine != "Atomic":
        refuse("DPONE_TARGET_DATABASE_ENGINE", f"is in a database of engine {design.database_engine}")
    if design.engine != "MergeTree":
        refuse("DPONE_TARGET_ENGINE", f"has engine {design.engine}")
    if detail["ttl"]:
        refuse("DPONE_TARGET_TTL", "has a TTL")
    if detail["unfinished_mutations"]:
        refuse("DPONE_TARGET_MUTATION_PENDING", f"has {detail['unfinished_mutations']} unfinished mutations")
    if detail["written_by"] is None:
        refuse("DPONE_TARGET_UNOBSERVABLE", "may be written by materialized views that the server does not show")
    if detail["written_by"]:
        refuse("DPONE_TARGET_WRITTEN_BY_VIEW", f"is written by {detail['written_by'][0]}")
    if detail["read_by"]:
        refuse("DPONE_TARGET_READ_BY_VIEW", f"feeds {detail['read_by'][0]}")


def check_design(mart: MartSpec, design: PhysicalDesign | None) -> None:
    """Refuse what cannot be exchanged, and a table that is not what the mart declares.

    Raises:
        DponeError: one DPONE_TARGET_* code for each kind of refusal.
    """
    name = mart.target.dotted
    if design is None:
        raise DponeError("DPONE_TARGET_ABSENT", f"Target {name} does not exist.")
    check_exchangeable(design)
    check_columns(design, mart.columns, in_order=True)
    if _partition_kind(mart.event_time, design.partition_key) != mart.partition_by:
        raise DponeError(
            "DPONE_TARGET_PARTITION",
            f"Target {name} is not partitioned by {mart.partition_by} of {mart.event_time} in UTC.",
            observed=design.partition_key,
        )
    # The engine keeps the brackets round a single column.
    order = re.sub(r"^\((.*)\)$", r"\1", _unquoted(design.order_key))
    if sorted(order.split(", ")) != sorted(mart.key):
        raise DponeError(
            "DPONE_TARGET_KEY",
            f"Target {name} is not sorted by the key ({', '.join(mart.key)}).",
            observed=design.order_key,
        )


def create_sql(mart: MartSpec, *, partition_key: str) -> str:
    """Return what follows the table's name in a CREATE TABLE made from the mart's type mapping."""
    columns = ", ".join(f"`{c.name}` {c.spec.clickhouse_column(c.nullable)}" for c in mart.columns)
    partition = f" PARTITION BY {partition_key}" if partition_key else ""
    key = ", ".join(f"`{name}`" for name in mart.key)
    return f"({columns}) ENGINE = MergeTree{partition} ORDER BY ({key})"


def partition_key_of(mart: MartSpec) -> str:
    """Return the partition expression of a new target; empty for none."""
    if mart.partition_by == "none":
        return ""
    return f"{_PARTITION_FUNCTIONS[mart.partition_by][0]}(`{mart.event_time}`)"


def check_columns(design: PhysicalDesign, columns: Sequence[Column], *, in_order: bool = False) -> None:
    """Refuse a target that has other columns than these.

    Args:
        in_order: refuse another order as well.

    Raises:
        DponeError: DPONE_TARGET_COLUMNS, naming one column.
    """
    target = design.relation.dotted
    expected = {c.name: c.spec.clickhouse_column(c.nullable) for c in columns}
    observed = {name: type_.replace(", ", ",") for name, type_ in design.columns}

    def refuse(name: str, fault: str) -> NoReturn:
        raise DponeError("DPONE_TARGET_COLUMNS", f"Column {name} of {target} {fault}.", field=name)

    for name in (*expected, *(each for each in observed if each not in expected)):
        wanted, seen = expected.get(name), observed.get(name)
        if wanted != seen:
            refuse(name, f"is {seen or 'missing'}; what is published has {wanted or 'no such column'}")
    for name, seen in zip(expected, observed, strict=True) if in_order else ():
        if name != seen:
            refuse(name, f"is not in its place: {seen} is there")
    for name, _, kind, _, _ in design.detail["columns"]:
        # A default never applies, since every insert names every column; a computed column would be lost.
        if kind not in ("", "DEFAULT"):
            refuse(name, f"is {kind}")


def _partition_kind(event_time: str, expression: str) -> str | None:
    text = _unquoted(expression)
    if text in ("", "tuple()"):
        return "none"
    for kind, functions in _PARTITION_FUNCTIONS.items():
        for function in functions:
            call = rf"{function}\({event_time}(, 'UTC')?\)"
            if re.fullmatch(rf"{call}|\({call}\)", text):
                return kind
    return None


def _unquoted(expression: str) -> str:
    return expression.replace("`", "")


def _has_ttl(definition: str) -> bool:
    # No system table shows a column's TTL. The engine's own normalised definition does, with the keyword in
    # capitals; quoted text is taken out first. A column named TTL is refused as well: rather that than the reverse.
    return re.search(r"\bTTL\b", _QUOTED.sub("", definition)) is not None


def _views_have_target(statements: Statements) -> bool:
    return bool(
        statements.value(
            "SELECT count() FROM system.columns"
            " WHERE database = 'system' AND table = 'tables' AND name = 'target_table'"
        )
    )


def _list(columns: str, table: str, where: str) -> str:
    """A scalar subquery: the rows of a system table as an array of tuples, sorted by their first column."""
    return f"(SELECT arraySort(groupArray(({columns}))) FROM system.{table} WHERE {where})"
