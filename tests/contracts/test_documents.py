"""Every closed document against vectors: the public ones beside the repository, and those of tests/vectors.

Digests are recomputed here with json and hashlib alone, never with the code under test.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpone_dagster.contracts.documents import DOCUMENTS, effective_key_column, parse_document
from dpone_dagster.contracts.mart import Column
from dpone_dagster.errors import DponeError

SHARED = Path(__file__).parents[2].parent / "shared" / "vectors"
OWN = json.loads((Path(__file__).parents[1] / "vectors" / "own-golden-v1.json").read_text("utf-8"))["documents"]
PRE = "dpone.semantic-refresh-"
# The own digest's field is the schema's name and _sha256, except here.
OWN_DIGEST = {
    PRE + "attempt-continuation-receipt.v1": "continuation_receipt_sha256",
    PRE + "durable-workflow-summary.v1": "terminal_summary_sha256",
    PRE + "failed-workflow-summary.v1": "terminal_summary_sha256",
    PRE + "sealed-artifact-manifest.v1": "artifact_manifest_sha256",
    "dpone.postgres-stand-in-lifecycle-policy.v1": "stand_in_lifecycle_policy_sha256",
    "dpone.publication-terminal-receipt.v1": "terminal_receipt_sha256",
}
PLAN, CONTINUATION = PRE + "operation-plan.v1", PRE + "attempt-continuation-receipt.v1"
OPTIONAL = {
    PLAN: {
        "scope_predecessor_operation_id",
        "replaces_failed_operation_id",
        "replacement_ordinal",
        "replacement_reason",
    },
    PRE + "workflow-execution-binding.v1": {"recovery_plan_digest", "workflow_replacement_plan_sha256"},
    PRE + "runtime-assurance-receipt.v1": {
        "ddl_epoch",
        "engine_acl_proof_sha256",
        "engine_acl_proof_status",
        "external_job_inventory_sha256",
        "external_job_inventory_status",
        "organizational_control_sha256",
        "organizational_control_status",
        "platform_allowlist_sha256",
        "platform_allowlist_status",
    },
    "dpone.publication-terminal-receipt.v1": {"clickhouse_terminal_receipt_sha256"},
}


def plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    return "sha256:" + hashlib.sha256(plain(value)).hexdigest()


def own_digest_field(doc: dict[str, Any]) -> str:
    name = doc["schema"].removeprefix(PRE).removeprefix("dpone.").removesuffix(".v1")
    return OWN_DIGEST.get(doc["schema"], name.replace("-", "_") + "_sha256")


def derived(doc: dict[str, Any]) -> dict[str, str]:
    """The digests of other things that a document carries, by the rules of the vectors' own README."""
    if doc["schema"] == PLAN:
        columns = doc["effective_key_columns"]
        templates = [
            {k: v for k, v in c.items() if k != "utc_assurance_sha256"}
            | {"utc_assurance_required": "utc_assurance_sha256" in c}
            for c in columns
        ]
        keys = {
            "effective_key_mapping_sha256": digest({"schema": PRE + "effective-key-mapping.v1", "columns": columns}),
            "effective_key_template_sha256": digest(
                {"schema": PRE + "effective-key-template.v1", "columns": templates}
            ),
        }
        rest = {k: v for k, v in doc.items() if k not in ("operation_id", "operation_plan_sha256")}
        return {**keys, "operation_id": digest({**rest, **keys})}
    if doc["schema"] == CONTINUATION:
        shared = ("operation_id", "original_attempt_binding_sha256", "status", "workflow_execution_binding_sha256")
        seen = {k: doc[k] for k in shared} | {"observed_at": doc["verified_at"]}
        clickhouse = digest(
            seen
            | {
                "schema": PRE + "clickhouse-attempt-quiescence.v1",
                "clickhouse_cluster_authority_id": doc["clickhouse_cluster_authority_id"],
                "query_id_prefix": doc["clickhouse_query_id_prefix"],
                "active_query_ids": [],
            }
        )
        engines = digest(
            seen
            | {
                "schema": PRE + "attempt-engine-quiescence.v1",
                "clickhouse_quiescence_observation_sha256": clickhouse,
                "mssql_active_session_count": doc["mssql_active_session_count"],
                "mssql_guard_lock_status": doc["mssql_guard_lock_status"],
                "original_attempt_termination_receipt_sha256": doc["original_attempt_termination_receipt_sha256"],
            }
        )
        return {
            "clickhouse_quiescence_observation_sha256": clickhouse,
            "engine_quiescence_receipt_sha256": engines,
        }
    return {}


def resealed(doc: dict[str, Any]) -> dict[str, Any]:
    doc = {**doc, **derived(doc)}
    own = own_digest_field(doc)
    return {**doc, own: digest({k: v for k, v in doc.items() if k != own})}


def documents_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if value.get("schema") in DOCUMENTS:
            yield value
        for item in value.values():
            yield from documents_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from documents_in(item)


def shared_documents() -> list[Any]:
    if not SHARED.is_dir():
        reason = "the public vectors are not in ../shared/vectors beside the repository"
        return [pytest.param(None, id="shared", marks=pytest.mark.skip(reason=reason))]
    found = []
    for path in sorted(SHARED.glob("*.json")):
        docs = documents_in(json.loads(path.read_text("utf-8")))
        found += [pytest.param(d, id=f"{path.stem}-{i}-{d['schema'][6:-3]}") for i, d in enumerate(docs)]
    return found


ALL = [*(pytest.param(d, id=f"own-{i}-{d['schema'][6:-3]}") for i, d in enumerate(OWN)), *shared_documents()]
every_document = pytest.mark.parametrize("doc", ALL)


def refuse(doc: Any) -> DponeError:
    with pytest.raises(DponeError) as caught:
        parse_document(doc)
    return caught.value


# ------------------------------------------------------------------------------------------ every document


def test_the_vectors_cover_every_model() -> None:
    assert {d["schema"] for d in OWN} == set(DOCUMENTS)
    assert len(DOCUMENTS) == 21
    if SHARED.is_dir():
        docs = [param.values[0] for param in shared_documents()]
        assert len(docs) == 36
        # 42 own digests in those files, six of them in documents outside this path; 4 x 3 + 2 derived ones.
        assert sum(len(derived(d)) for d in docs) == 14


@every_document
def test_parses_and_writes_back_byte_for_byte(doc: dict[str, Any]) -> None:
    parsed = parse_document(doc)
    assert plain(parsed.as_json()) == plain(doc)
    assert type(parsed).parse(json.dumps(doc, indent=2)) == parsed


@every_document
def test_every_digest_recomputes(doc: dict[str, Any]) -> None:
    parsed, own = parse_document(doc), own_digest_field(doc)
    expected = derived(doc) | {own: digest({k: v for k, v in doc.items() if k != own})}
    assert parsed.digests() == expected == {field: doc[field] for field in expected}
    assert parsed.sha256 == parsed.recompute() == doc[own]


@every_document
def test_sealing_the_other_fields_gives_the_document(doc: dict[str, Any]) -> None:
    computed = {"schema", own_digest_field(doc), *derived(doc)}
    sealed = DOCUMENTS[doc["schema"]].seal(**{k: v for k, v in doc.items() if k not in computed})
    assert plain(sealed.as_json()) == plain(doc)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place in a document: its leaves and its inner objects and lists."""
    yield path, value
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def changed(doc: dict[str, Any], path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> dict[str, Any]:
    doc = copy.deepcopy(doc)
    holder: Any = doc
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return doc


def another(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + 1
    if value.startswith("sha256:"):
        return "sha256:" + ("0" if value[7] != "0" else "1") + value[8:]
    return value[:-1] + ("x" if value[-1:] != "x" else "y")


@every_document
def test_no_value_can_be_changed_removed_or_nulled(doc: dict[str, Any]) -> None:
    for path, value in places(doc):
        if not path:
            continue
        if not isinstance(value, dict | list):
            refuse(changed(doc, path, lambda holder, key, v=value: holder.__setitem__(key, another(v))))
        refuse(changed(doc, path, lambda holder, key: holder.pop(key)))
        if value is not None:
            refuse(changed(doc, path, lambda holder, key: holder.__setitem__(key, None)))


@every_document
def test_a_digest_of_something_else_is_named_as_such(doc: dict[str, Any]) -> None:
    for field in (own_digest_field(doc), *derived(doc)):
        error = refuse({**doc, field: "sha256:" + "0" * 64})
        assert error.code == "DPONE_DIGEST_MISMATCH"
        # A wrong inner digest shows first in whatever is computed from it.
        assert error.details["field"] in {own_digest_field(doc), *derived(doc)}


@every_document
def test_unknown_fields_are_refused_in_every_object(doc: dict[str, Any]) -> None:
    for path, value in places(doc):
        if isinstance(value, dict) and path[-1:] != ("metrics",):
            grown = changed({"": doc}, ("", *path, "surprise"), lambda holder, key: holder.__setitem__(key, 1))
            error = refuse(resealed(grown[""]))
            assert (error.code, error.details["field"].split(".")[-1]) == ("DPONE_CONTRACT_INVALID", "surprise")


@every_document
def test_null_does_not_stand_for_absent(doc: dict[str, Any]) -> None:
    for field in OPTIONAL.get(doc["schema"], set()) - doc.keys():
        for given in ({**doc, field: None}, resealed({**doc, field: None})):
            error = refuse(given)
            # Also where the digest of the document without the field still fits: the form is wrong.
            assert (error.code, error.details["field"]) == ("DPONE_CONTRACT_INVALID", field)


@pytest.mark.parametrize("data", [{}, {"schema": None}, {"schema": 1}, {"schema": "dpone.nothing.v1"}])
def test_a_document_of_no_known_schema_is_refused(data: dict[str, Any]) -> None:
    assert refuse(data).details["field"] == "schema"


# ------------------------------------------------------------------------------------------------- the rules


def one(schema: str, **having: Any) -> dict[str, Any]:
    """The first own document of a schema with the given values."""
    for doc in OWN:
        if doc["schema"].endswith(schema + ".v1") and having.items() <= doc.items():
            return copy.deepcopy(doc)
    raise LookupError(schema)


D = "sha256:" + "9" * 64
NORMAL = one("operation-plan", operation_kind="normal")
REPLAY = one("operation-plan", operation_kind="complete_scope_replay")
REPLACEMENT = one("operation-plan", operation_kind="failed_precommit_replacement")
W_NORMAL = one("workflow-plan", workflow_mode="normal")
W_REPLAY = one("workflow-plan", workflow_mode="complete_scope_replay")
W_REPLACEMENT = one("workflow-plan", workflow_mode="failed_precommit_replacement")
B_NORMAL = one("workflow-execution-binding", workflow_mode="normal")
B_REPLACEMENT = one("workflow-execution-binding", workflow_mode="failed_precommit_replacement")
REPLACEMENT_PLAN = one("workflow-replacement-plan")
CLOSURE = one("mutation-closure")
READS = one("read-dependency-proof")
MANIFEST = one("sealed-artifact-manifest")
BUILD = one("model-build-receipt")
PUBLISHED = one("publication-terminal-receipt", target_mutation_outcome="EXCHANGED")
EMPTY = one("publication-terminal-receipt", target_mutation_outcome="NOT_REQUIRED_EMPTY_SCOPE")
DURABLE = one("durable-workflow-summary")
FAILED = one("failed-workflow-summary")
GATES = one("gate-report", passed=True)
DDL = next(d for d in OWN if d.get("subject", {}).get("assurance_kind") == "ddl_freeze")
UTC = next(d for d in OWN if d.get("subject", {}).get("assurance_kind") == "utc_semantics")
WRITER = next(d for d in OWN if d.get("subject", {}).get("assurance_kind") == "writer_exclusivity")
LISTS = ("selected_mutating_node_ids", "model_operation_plan_ids", "expected_model_outcome_ids")
A, B = "model.flights.arrivals", "model.flights.departures"


def without(doc: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {k: v for k, v in doc.items() if k not in fields}


def key(doc: dict[str, Any], position: int, **values: Any) -> dict[str, Any]:
    columns = copy.deepcopy(doc["effective_key_columns"])
    columns[position] = {k: v for k, v in {**columns[position], **values}.items() if v is not None}
    return {**doc, "effective_key_columns": columns}


def chunk(position: int, **values: Any) -> dict[str, Any]:
    chunks = copy.deepcopy(MANIFEST["chunks"])
    chunks[position] |= values
    totals = {
        "total_bytes": sum(c["byte_count"] for c in chunks),
        "total_rows": sum(c["row_count"] for c in chunks),
    }
    return {**MANIFEST, "chunks": chunks, **totals}


def gate(**values: Any) -> dict[str, Any]:
    return {**GATES, "results": [GATES["results"][0] | values, GATES["results"][1]]}


BROKEN: dict[str, dict[str, Any]] = {
    # operation kinds: replacement fields there, all of them, and nowhere else
    "normal with an ordinal": {**NORMAL, "replacement_ordinal": 1},
    "normal with a reason": {**NORMAL, "replacement_reason": "model_correction"},
    "normal that replaces": {**NORMAL, "replaces_failed_operation_id": D},
    "normal with a predecessor": {**NORMAL, "scope_predecessor_operation_id": D},
    "normal at revision 2": {**NORMAL, "scope_revision": 2, "scope_predecessor_operation_id": D},
    "replay that replaces": {**REPLAY, "replaces_failed_operation_id": D},
    "replay without a predecessor": without(REPLAY, "scope_predecessor_operation_id"),
    "replay at revision 1": {**without(REPLAY, "scope_predecessor_operation_id"), "scope_revision": 1},
    "replacement without an ordinal": without(REPLACEMENT, "replacement_ordinal"),
    "replacement without a reason": without(REPLACEMENT, "replacement_reason"),
    "replacement of nothing": without(REPLACEMENT, "replaces_failed_operation_id"),
    "replacement ordinal 0": {**REPLACEMENT, "replacement_ordinal": 0},
    "replacement named normal": {**REPLACEMENT, "operation_kind": "normal"},
    "unknown kind": {**NORMAL, "operation_kind": "backfill"},
    # one UTC day, exact text
    "scope of two days": {**NORMAL, "scope_end": "2024-03-02T00:00:00Z"},
    "scope of no days": {**NORMAL, "scope_end": NORMAL["scope_start"]},
    "scope backwards": {**NORMAL, "scope_start": "2024-03-01T00:00:00Z", "scope_end": "2024-02-29T00:00:00Z"},
    "scope not at midnight": {**NORMAL, "scope_start": "2024-02-29T01:00:00Z", "scope_end": "2024-03-01T01:00:00Z"},
    "scope with an offset": {**NORMAL, "scope_start": "2024-02-29T00:00:00+00:00"},
    "scope on February 30": {**NORMAL, "scope_start": "2024-02-30T00:00:00Z"},
    "order of mutation": {**NORMAL, "mutation_order": ["INSERT", "UPDATE"]},
    "one mutation": {**NORMAL, "mutation_order": ["UPDATE"]},
    "rows go missing": {**NORMAL, "missing_key_policy": "delete_missing"},
    # the effective key
    "event time is no key column": {**NORMAL, "event_time_column": "somewhen"},
    "event time is a date": {**NORMAL, "event_time_column": "booked_on"},
    "key repeats a column": key(NORMAL, 4, name="booked_on"),
    "no key": {**NORMAL, "effective_key_columns": []},
    "nullable key": key(NORMAL, 4, nullable=True),
    "nullable key as 0": key(NORMAL, 4, nullable=0),
    "text key": key(NORMAL, 4, source_type="nvarchar(20)", target_type="String", mapping="string_utf8"),
    "wider target": key(NORMAL, 4, target_type="UInt16"),
    "rescaled decimal": key(NORMAL, 2, target_type="Decimal(18,2)"),
    "wrapped target": key(NORMAL, 4, target_type="Nullable(UInt8)"),
    "other mapping": key(NORMAL, 4, mapping="bit_bool"),
    "wider domain": key(NORMAL, 1, domain_max="2150-01-01"),
    "no domain": key(NORMAL, 1, domain_min=None, domain_max=None),
    "half a domain": key(NORMAL, 1, domain_max=None),
    "domain of an integer": key(NORMAL, 4, domain_min="0", domain_max="255"),
    "time without assurance": key(NORMAL, 0, utc_assurance_sha256=None),
    "assurance of an integer": key(NORMAL, 4, utc_assurance_sha256=D),
    # workflow modes and closure
    "normal workflow with actions": {**W_NORMAL, "replacement_action_ids": [B, A]},
    "replay workflow with actions": {**W_REPLAY, "replacement_action_ids": [B, A]},
    "replay workflow at revision 1": {**W_REPLAY, "scope_revision": 1},
    "replacement workflow without actions": {**W_REPLACEMENT, "replacement_action_ids": []},
    "replacement workflow with one action": {**W_REPLACEMENT, "replacement_action_ids": [B]},
    "replacement workflow in another order": {**W_REPLACEMENT, "replacement_action_ids": [A, B]},
    "a plan too few": {**W_NORMAL, "model_operation_plan_ids": [B]},
    "an outcome too many": {**W_NORMAL, "expected_model_outcome_ids": [B, A, "model.flights.other"]},
    "a model twice": {
        **W_NORMAL,
        **{field: [A, A] for field in LISTS},
    },
    "no model": {
        **W_NORMAL,
        "operation_plan_refs": [],
        **{field: [] for field in LISTS},
    },
    "references in another order": {
        **W_NORMAL,
        "operation_plan_refs": W_NORMAL["operation_plan_refs"][::-1],
    },
    "one operation for two models": {
        **W_NORMAL,
        "operation_plan_refs": [
            {**ref, "operation_id": W_NORMAL["operation_plan_refs"][0]["operation_id"]}
            for ref in W_NORMAL["operation_plan_refs"]
        ],
    },
    "recovery in the semantic plan": {**W_REPLACEMENT, "recovery_plan_digest": D},
    "normal binding with recovery": {**B_NORMAL, "recovery_plan_digest": D},
    "normal binding with a replacement": {**B_NORMAL, "workflow_replacement_plan_sha256": D},
    "replacement binding without recovery": without(B_REPLACEMENT, "recovery_plan_digest"),
    "replacement binding without its plan": without(B_REPLACEMENT, "workflow_replacement_plan_sha256"),
    "replacement plan of mode normal": {
        **REPLACEMENT_PLAN,
        "workflow_mode": "normal",
        "replacement_action_ids": [],
        "replacement_actions": [],
    },
    "an action too few": {**REPLACEMENT_PLAN, "replacement_actions": REPLACEMENT_PLAN["replacement_actions"][:1]},
    **{
        f"{action} after {outcome}": {
            **REPLACEMENT_PLAN,
            "replacement_actions": [
                {"action_id": B, "outcome": outcome, "action": action},
                REPLACEMENT_PLAN["replacement_actions"][1],
            ],
        }
        for outcome, right in {
            "COMMITTED_WITH_IMAGES": "RESTORE_THEN_REBUILD",
            "ROLLED_BACK": "BUILD_FRESH",
            "NOT_INVOKED": "BUILD_FRESH",
            "COMMIT_UNKNOWN": "BLOCK",
        }.items()
        for action in ("RESTORE_THEN_REBUILD", "BUILD_FRESH", "BLOCK")
        if action != right
    },
    # closures and proofs
    "closure with an unclassified node": {
        **CLOSURE,
        "unclassified_mutating_node_ids": ["seed.x"],
        "selected_node_ids": [*CLOSURE["selected_node_ids"][:2], "seed.x", CLOSURE["selected_node_ids"][2]],
    },
    "closure that hides a node": {**CLOSURE, "selected_node_ids": [A, B]},
    "closure in another order": {**CLOSURE, "selected_mutating_node_ids": [B, A]},
    "closure with ancestors": {**CLOSURE, "selectors": ["+" + A]},
    "closure with indirect tests": {**CLOSURE, "indirect_selection": "eager"},
    "closure of nothing": {
        **CLOSURE,
        "selected_mutating_node_ids": [],
        "selected_node_ids": CLOSURE["selected_read_only_node_ids"],
    },
    "unknown status": {**CLOSURE, "status": "ASSUMED"},
    "reads more edges than allowed": {**READS, "max_edges": 2},
    "reads more nodes than allowed": {**READS, "max_nodes": 3},
    "reads without a limit": {**READS, "max_depth": 0},
    "base table not listed": {**READS, "base_relation_object_ids": [16400]},
    "base tables in another order": {**READS, "base_relation_object_ids": [16412, 16400]},
    "full refresh": {**one("stand-in-lifecycle-policy"), "full_refresh_allowed": True},
    "no contract": {**one("sqlserver-lifecycle-policy"), "contract_enforced": False},
    "another strategy": {**one("stand-in-lifecycle-policy"), "incremental_strategy": "merge"},
    "coverage backwards": {**one("baseline-adoption-receipt"), "coverage_start": "2013-01-02T00:00:00Z"},
    "upper-case UUID": {
        **one("baseline-adoption-receipt"),
        "clickhouse_target_uuid": "0000000A-0000-4000-8000-000000000001",
    },
    "freeze without an epoch": without(DDL, "ddl_epoch"),
    "epoch of a column": {**UTC, "ddl_epoch": 1},
    "column of a target": {**DDL, "subject": {**DDL["subject"], "column_name": "x"}},
    "column without a name": {**UTC, "subject": without(UTC["subject"], "column_name")},
    "target in UTC": {**UTC, "subject": {**without(UTC["subject"], "column_name"), "subject_type": "target"}},
    "writers half proven": without(WRITER, "external_job_inventory_status"),
    "expired at once": {**DDL, "expires_at": DDL["effective_from"]},
    # receipts
    "build that loses a row": {**BUILD, "after_image_row_count": 8},
    "build out of nothing": {**BUILD, "source_rows": 5},
    "negative rows": {**BUILD, "updated_rows": -1},
    "epoch 0": {**BUILD, "fencing_epoch": 0},
    "seal of a shrunken day": {**one("seal-authorization-receipt"), "after_image_row_count": 6},
    "seal of an unknown outcome": {**one("seal-authorization-receipt"), "mssql_outcome": "COMMIT_UNKNOWN"},
    "seal after PREPARING": {**one("seal-authorization-receipt"), "journal_state": "PREPARED"},
    "row total": {**MANIFEST, "total_rows": 10},
    "byte total": {**MANIFEST, "total_bytes": 601},
    "chunk count": {**MANIFEST, "chunk_count": 2},
    "ordinals from 2": chunk(0, ordinal=4),
    "chunks in another order": {**MANIFEST, "chunks": MANIFEST["chunks"][::-1]},
    "a key twice": chunk(1, object_key="part-0001.parquet"),
    "a key above the store": chunk(1, object_key="../part-0002.parquet"),
    "an absolute key": chunk(1, object_key="/part-0002.parquet"),
    "a chunk of no rows": chunk(1, row_count=0),
    "manifest first": {**MANIFEST, "publication_order": "MANIFEST_FIRST"},
    "another format": {**MANIFEST, "artifact_format": "csv"},
    "exchange without a receipt": without(PUBLISHED, "clickhouse_terminal_receipt_sha256"),
    "empty scope with a receipt": {**EMPTY, "clickhouse_terminal_receipt_sha256": D},
    "empty scope with rows": {**EMPTY, "rows": 1},
    "published while COMMITTING": {**PUBLISHED, "state": "COMMITTING"},
    "generation 0": {**PUBLISHED, "target_generation": 0},
    "swap with itself": {
        **one("clickhouse-terminal-receipt"),
        "successor_uuid": one("clickhouse-terminal-receipt")["predecessor_uuid"],
    },
    "publication too few": {**DURABLE, "publications": DURABLE["publications"][:1]},
    "publications in another order": {**DURABLE, "publications": DURABLE["publications"][::-1]},
    "summary of nothing": {**DURABLE, "publications": [], "expected_operation_ids": []},
    "publication of another run": {**DURABLE, "workflow_execution_binding_sha256": D},
    "half complete": {**DURABLE, "status": "PARTIALLY_COMPLETE"},
    "failed model too few": {**FAILED, "models": FAILED["models"][1:]},
    "failed model twice": {
        **FAILED,
        "models": [FAILED["models"][0]] * 2,
        "expected_operation_ids": [FAILED["expected_operation_ids"][0]] * 2,
    },
    "unknown outcome": {**FAILED, "models": [{**FAILED["models"][0], "mssql_outcome": "OK"}, FAILED["models"][1]]},
    "continuation of the first try": {**one("attempt-continuation-receipt"), "try_number": 1},
    "continuation beside a live session": {**one("attempt-continuation-receipt"), "mssql_active_session_count": 1},
    "session count as false": {**one("attempt-continuation-receipt"), "mssql_active_session_count": False},
    "instant without microseconds": {**one("attempt-continuation-receipt"), "verified_at": "2024-03-01T06:00:00Z"},
    # gates
    "passed over a failure": gate(status="failed"),
    "passed over a skipped error gate": gate(status="skipped"),
    "failed without a failure": {**GATES, "passed": False},
    "an error gate only warns": {**gate(status="warned"), "passed": False},
    "a gate twice": gate(gate_id="counts"),
    "a metric as a fraction": gate(metrics={"row_count": 9.5}),
    "a metric as a verdict": gate(metrics={"row_count": True}),
}


@pytest.mark.parametrize("doc", BROKEN.values(), ids=BROKEN.keys())
def test_a_rule_is_broken(doc: dict[str, Any]) -> None:
    # Resealed, so that the rule refuses it and not the digest.
    error = refuse(resealed(doc))
    assert error.code == "DPONE_CONTRACT_INVALID"
    assert DOCUMENTS[doc["schema"]].__name__ in error.sentence


KEPT: dict[str, dict[str, Any]] = {
    "first publication replaced": {
        **without(REPLACEMENT, "scope_predecessor_operation_id"),
        "scope_revision": 1,
    },
    "blocked by an unknown outcome": {
        **REPLACEMENT_PLAN,
        "replacement_actions": [
            {"action_id": B, "outcome": "COMMIT_UNKNOWN", "action": "BLOCK"},
            {"action_id": A, "outcome": "ROLLED_BACK", "action": "BUILD_FRESH"},
        ],
    },
    "a closure that proves nothing": {
        **CLOSURE,
        "status": "NONCONFORMANT",
        "selected_mutating_node_ids": [A],
        "unclassified_mutating_node_ids": [B],
    },
    "nothing to do": {**BUILD, "updated_rows": 0, "inserted_rows": 0, "after_image_row_count": 7},
    "a failed warning": {**GATES, "results": [GATES["results"][0], {**GATES["results"][1], "status": "failed"}]},
    "no gates": {**GATES, "results": []},
    "exchanged to no rows": {**PUBLISHED, "rows": 0},
}


@pytest.mark.parametrize("doc", KEPT.values(), ids=KEPT.keys())
def test_a_rule_is_kept(doc: dict[str, Any]) -> None:
    assert plain(parse_document(resealed(doc)).as_json()) == plain(resealed(doc))


# --------------------------------------------------------------------------------------- the effective key


@pytest.mark.parametrize(
    ("source", "target", "mapping", "domain"),
    [
        ("bit", "Bool", "bit_bool", None),
        ("tinyint", "UInt8", "integer_width_preserving", None),
        ("smallint", "Int16", "integer_width_preserving", None),
        ("int", "Int32", "integer_width_preserving", None),
        ("bigint", "Int64", "integer_width_preserving", None),
        ("uniqueidentifier", "UUID", "uniqueidentifier_uuid", None),
        ("decimal(38,0)", "Decimal(38,0)", "decimal_exact", None),
        ("date", "Date", "date_date", ("1970-01-01", "2149-06-06")),
        (
            "datetime2(6)",
            "DateTime64(6,'UTC')",
            "datetime2_utc",
            ("1900-01-01T00:00:00.000000Z", "2299-12-31T23:59:59.999999Z"),
        ),
    ],
)
def test_key_column_as_the_spec_admits_it(
    source: str, target: str, mapping: str, domain: tuple[str, str] | None
) -> None:
    column = effective_key_column(Column(name="k", type=source, nullable=False), utc_assurance_sha256=D)
    expected = {"name": "k", "source_type": source, "target_type": target, "mapping": mapping, "nullable": False}
    if domain:
        expected |= {"domain_min": domain[0], "domain_max": domain[1]}
    if mapping == "datetime2_utc":
        expected["utc_assurance_sha256"] = D
    assert column.as_json() == expected


@pytest.mark.parametrize(
    ("source", "nullable", "assurance", "code"),
    [
        ("bigint", True, D, "DPONE_KEY_NULLABLE"),
        ("nvarchar(10)", False, D, "DPONE_KEY_TYPE"),
        ("char(3)", False, D, "DPONE_KEY_TYPE"),
        ("float", False, D, "DPONE_TYPE_UNSUPPORTED"),
        ("datetime2(7)", False, D, "DPONE_TYPE_UNSUPPORTED"),
        ("datetime2(6)", False, None, "DPONE_CONTRACT_INVALID"),
        ("datetime2(6)", False, "sha256:no", "DPONE_CONTRACT_INVALID"),
    ],
)
def test_key_column_refused(source: str, nullable: bool, assurance: str | None, code: str) -> None:
    with pytest.raises(DponeError) as caught:
        effective_key_column(Column(name="k", type=source, nullable=nullable), utc_assurance_sha256=assurance)
    assert caught.value.code == code


def test_the_template_is_known_before_the_assurance() -> None:
    first, second = (parse_document(resealed(key(NORMAL, 0, utc_assurance_sha256="sha256:" + c * 64))) for c in "12")
    assert first.effective_key_template_sha256 == second.effective_key_template_sha256  # type: ignore[attr-defined]
    assert first.effective_key_mapping_sha256 != second.effective_key_mapping_sha256  # type: ignore[attr-defined]


RUN_WORDS = ("dag", "run", "try", "pod", "fence", "fencing", "epoch", "worker", "owner_id", "count", "rows", "_at")


def test_nothing_of_a_run_names_an_operation() -> None:
    fields = DOCUMENTS[PLAN].model_fields
    assert [f for f in fields if any(f == w or f.endswith(w) or f.startswith(w) for w in RUN_WORDS)] == []
