"""A governed load with tables of its own: orders in PostgreSQL, a target in ClickHouse, looked at with plain SQL."""

import copy
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import yaml

from checks.schema_gate import PanderaSchemaGate
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.publication.load import LoadReport
from resources.load_runtime import Loads, plan_manifest
from resources.runtime import Runtime
from tests.e2e.conftest import Truth, identity

# (id, day, amount, note): ten orders over three days; id 7 has no note.
ORDERS = [
    (1, "2024-03-01 00:00:00", "10.50", "a"),
    (2, "2024-03-01 09:30:00", "20.00", "b"),
    (3, "2024-03-01 23:59:59.999999", "0.01", "c"),
    (4, "2024-03-02 00:00:00", "-5.25", "d"),
    (5, "2024-03-02 12:00:00", "7.00", "e"),
    (6, "2024-03-02 18:00:00", "7.00", "e"),
    (7, "2024-03-02 23:00:00", "1.00", None),
    (8, "2024-03-03 01:00:00", "2.00", "f"),
    (9, "2024-03-03 02:00:00", "3.00", "g"),
    (10, "2024-03-03 03:00:00", "4.00", "h"),
]


@dataclass
class Case:
    """One process, its tables and what it may say.

    ``manifest`` is plain data, changed by tests at will; ``plan()`` writes it to a file and plans it.
    """

    runtime: Runtime
    truth: Truth
    folder: Path
    schema: str
    database: str
    name: str
    manifest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, runtime: Runtime, truth: Truth, folder: Path, schema: str, database: str) -> "Case":
        (folder / ".git").mkdir(exist_ok=True)
        name = f"orders_{uuid.uuid4().hex[:8]}"
        case = cls(runtime, truth, folder, schema, database, name)
        case.sql(
            f"create table {schema}.orders (id integer primary key, at timestamp(6) not null,"
            " amount numeric(10, 2) not null, note varchar(10))"
        )
        case.sql(f"create table {schema}.calls (what text)")
        for order in ORDERS:
            case.sql(f"insert into {schema}.orders values (%s, %s, %s, %s)", *order)
        case.manifest = {
            "kind": "dpone.batch.v1",
            "name": name,
            "source": {"type": "sqlserver", "table": {"schema": schema, "name": "orders"}},
            "sink": {
                "type": "clickhouse",
                "table": {"schema": database, "name": "orders"},
                "strategy": "full_refresh",
                "unique_key": ["id"],
                "options": {"lineage": {"enabled": True}},
            },
            "quality": {
                "gates": [
                    {"id": "same_rows", "type": "row_count_reconciliation"},
                    {"id": "same_values", "type": "typed_hash_reconciliation"},
                ]
            },
        }
        return case

    # ------------------------------------------------------------------------------------- the product

    @property
    def path(self) -> Path:
        return self.folder / "manifests" / "orders.yaml"

    def plan(self, **changes: Any) -> LoadPlan:
        """Write the manifest (with changes by dotted name) and plan it."""
        self.plan_file(**changes)
        return plan_manifest(self.path)

    def plan_file(self, **changes: Any) -> None:
        """Write the manifest, whatever a plan says of it."""
        document = copy.deepcopy(self.manifest)
        for dotted, value in changes.items():
            *above, last = dotted.split("__")
            place = document
            for part in above:
                place = place.setdefault(part, {})
            place[last] = value
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(yaml.safe_dump(document, sort_keys=False))

    @property
    def loads(self) -> Loads:
        return Loads(self.runtime, schema_gate=PanderaSchemaGate())

    def run(self, plan: LoadPlan | None = None, *, day: str | None = None, **options: Any) -> LoadReport:
        return self.loads.run(
            plan or self.plan(), scope=Scope.day(day) if day else None, identity=identity(), **options
        )

    def hook(self, id_: str, sql: str, **more: Any) -> dict[str, Any]:
        return {"id": id_, "kind": "source_refresh", "sql": sql, "mutates_source": True, **more}

    def call(self, what: str) -> str:
        return f"INSERT INTO {self.schema}.calls VALUES ('{what}')"

    # -------------------------------------------------------------------------------------- plain looks

    def sql(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.runtime.engines.pg.conninfo, autocommit=True) as connection:
            cursor = connection.execute(query, parameters)
            return cursor.fetchall() if cursor.description else []

    def calls(self) -> list[str]:
        return [what for (what,) in self.sql(f"select what from {self.schema}.calls")]

    def target(self) -> list[tuple[Any, ...]]:
        """Rows of the target by id: id, time, amount, note; [] without a table."""
        found = self.truth.clickhouse(
            f"select count() from system.tables where database = '{self.database}' and name = 'orders'"
        )
        if found == [(0,)]:
            return []
        rows = self.truth.clickhouse(
            f"select id, formatDateTime(at, '%Y-%m-%d %H:%i:%S.%f'), toString(amount), note"
            f" from {self.database}.orders order by id, at"
        )
        return [(id_, at, amount, note) for id_, at, amount, note in rows]

    def target_uuid(self) -> str:
        ((uuid_,),) = self.truth.clickhouse(
            f"select toString(uuid) from system.tables where database = '{self.database}' and name = 'orders'"
        )
        return str(uuid_)

    def scratch(self) -> list[str]:
        return [
            name
            for (name,) in self.truth.clickhouse(
                f"select name from system.tables where database = '{self.database}' and name like 'orders__dpone_%'"
            )
        ]

    def journal(self) -> list[str]:
        """States of the process's loads, oldest first."""
        query = "select state from dpone_control.load where process = %s order by admitted_epoch"
        return [state for (state,) in self.sql(query, self.name)]

    def guard(self) -> str | None:
        found = self.sql("select status from dpone_control.load_guard where process = %s", self.name)
        return found[0][0] if found else None

    def checkpoint(self) -> str | None:
        found = self.sql("select watermark from dpone_control.load_checkpoint where process = %s", self.name)
        return found[0][0] if found else None

    def has_checkpoint(self) -> bool:
        return bool(self.sql("select 1 from dpone_control.load_checkpoint where process = %s", self.name))

    def audit(self, load_id: str | None) -> list[tuple[Any, ...]]:
        """(phase, status) of the step rows of a load, in order."""
        return self.truth.clickhouse(
            f"select phase, status from {self.database}.__dpone__load_steps final"
            f" where load_id = '{load_id}' and kind = 'step' order by step_id"
        )


def expected(orders: list[tuple[Any, ...]] = ORDERS) -> list[tuple[Any, ...]]:
    """What the target should hold: microseconds spelled out, amounts as they are written in ClickHouse."""
    shown = []
    for id_, at, amount, note in orders:
        whole, _, fraction = at.partition(".")
        # ClickHouse writes decimals without trailing zeros.
        text = amount.rstrip("0").rstrip(".")
        shown.append((id_, f"{whole}.{fraction:0<6}", text or "0", note))
    return shown
