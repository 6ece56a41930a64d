"""A workflow of two marts, broken in every state that an operation can be left in: running it again always helps."""

import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from dbt_support import pair_project  # noqa: F401

from dpone_dagster.contracts.mart import Relation, Scope
from dpone_dagster.contracts.names import image_name
from dpone_dagster.errors import DponeError
from dpone_dagster.planning.plans import Workflow
from dpone_dagster.run import publish_day
from resources.runtime import Runtime
from tests.e2e.conftest import identity
from tests.e2e.faulty import Standing, failing
from tests.e2e.test_pair import DAY, Pair, pair  # noqa: F401

pytestmark = pytest.mark.xdist_group("pair")

OTHER = "2024-03-11"


def broken(pair: Pair, boundary: str, *, nth: int = 1, day: str = DAY, replay: bool = False) -> None:  # noqa: F811
    """A run that dies at a boundary, as far as anybody else can tell."""
    with failing(boundary, nth=nth):
        assert pair.fail(day, replay=replay).code == "DPONE_UNEXPECTED"


def states(pair: Pair) -> list[list[str]]:  # noqa: F811
    return [[o[0] for o in pair.operations(mart)] for mart in ("events", "totals")]


def assert_whole(pair: Pair, devices: list[int], *, day: str = DAY) -> None:  # noqa: F811
    """Both marts' day is published as given, and nothing is open or left over."""
    assert [device for device, _ in pair.mart()] == [device for device, _ in pair.target()] == devices
    assert pair.mart("totals") == pair.target("totals")
    heads = pair.sql.execute("select mart from dpone_control.scope_head where scope_start = %s order by 1", [day])
    assert heads.fetchall() == [("events",), ("totals",)]
    assert {s for mart in states(pair) for s in mart} <= {"COMPLETE", "FAILED_PRE_COMMIT"}
    assert pair.scratch() == []
    images = pair.sql.execute("select count(*) from pg_tables where schemaname = 'dpone_images'").fetchall()
    assert images == [(0,)]
    for mart in ("events", "totals"):
        (head,) = pair.sql.execute(
            "select uuid from dpone_control.generation_head where target = %s", [f"marts.{mart}"]
        ).fetchall()
        assert head == (pair.uuid(mart),)


# ----------------------------------------------------------------------------------- every state left behind


@pytest.mark.parametrize(
    ("boundary", "nth", "left"),
    [
        ("admit.after", 1, ("PREPARING", "PREPARING")),
        ("prepared.after", 1, ("PREPARED", "PREPARED")),
        ("exchange.before", 1, ("COMMITTING", "PREPARED")),
        ("target_committed.after", 1, ("TARGET_COMMITTED", "PREPARED")),
        ("exchange.before", 2, ("COMPLETE", "COMMITTING")),
        ("exchange.after", 2, ("COMPLETE", "COMMITTING")),
        ("publish.before", 2, ("COMPLETE", "TARGET_COMMITTED")),
    ],
)
def test_whatever_is_left_the_next_run_of_any_day_settles_it(
    pair: Pair,  # noqa: F811
    boundary: str,
    nth: int,
    left: tuple[str, str],
) -> None:
    pair.event(1)
    pair.total(1, 10)
    broken(pair, boundary, nth=nth)
    assert states(pair) == [[left[0]], [left[1]]]
    pair.event(2, day=OTHER)
    pair.publish(OTHER)
    pair.publish()
    assert_whole(pair, [1, 2])
    assert states(pair)[1].count("COMPLETE") == 2


@pytest.mark.parametrize(("boundary", "nth"), [("exchange.before", 2), ("publish.after", 1)])
def test_a_worker_overtaken_between_two_marts_changes_neither(pair: Pair, boundary: str, nth: int) -> None:  # noqa: F811
    pair.event(1)
    pair.total(1, 10)

    def work() -> None:
        runtime = Runtime(home=pair.runtime.home, engines=pair.runtime.engines, project=pair.runtime.project)
        try:
            runtime.publish("events", Scope.day(DAY), identity=identity(), replay=False)
        finally:
            runtime.journal.close()

    with Standing(boundary, work, nth=nth) as worker:
        pair.runtime.takeover("events", Scope.day(DAY), reason="test")
        assert {r.action for r in pair.publish().values()} == {"finished"}
        assert_whole(pair, [1])
        uuids = pair.uuid("events"), pair.uuid("totals")
        worker.go_on()
    assert isinstance(worker.error, DponeError)
    assert worker.error.code in ("DPONE_LEASE_LOST", "DPONE_FENCED")
    assert uuids == (pair.uuid("events"), pair.uuid("totals"))
    assert_whole(pair, [1])


def test_a_run_lost_after_its_last_publication_gets_its_summary_from_the_next(pair: Pair) -> None:  # noqa: F811
    pair.event(1)
    broken(pair, "publish.after", nth=2)
    summaries = "select body::json from dpone_control.document where schema_name like '%%durable-workflow-summary%%'"
    assert pair.sql.execute(summaries).fetchall() == []
    for _ in range(2):
        assert {r.action for r in pair.publish().values()} == {"skipped"}
        ((summary,),) = pair.sql.execute(summaries).fetchall()
    found = pair.sql.execute("select operation_id from dpone_control.operation order by mart").fetchall()
    assert [(o,) for o in summary["expected_operation_ids"]] == found
    assert summary["status"] == "FULLY_COMPLETE"
    assert states(pair) == [["COMPLETE"], ["COMPLETE"]]


# ------------------------------------------------------------------------- unknown, and known again when repaired


def test_a_target_moved_away_in_mid_exchange_is_unknown_until_it_is_back(pair: Pair) -> None:  # noqa: F811
    pair.event(1)
    broken(pair, "exchange.before")
    pair.clickhouse.command("rename table marts.events to marts.events__moved")
    for _ in range(2):
        assert pair.fail().code == "DPONE_COMMIT_UNKNOWN"
        assert states(pair) == [["COMMIT_UNKNOWN"], ["PREPARED"]]
    pair.clickhouse.command("rename table marts.events__moved to marts.events")
    assert {r.action for r in pair.publish().values()} == {"finished"}
    assert_whole(pair, [1])


def test_a_target_altered_after_the_exchange_is_incomplete_until_it_is_put_back(pair: Pair) -> None:  # noqa: F811
    pair.event(1)
    broken(pair, "exchange.after")
    pair.clickhouse.command("alter table marts.events add column extra UInt8")
    for _ in range(2):
        assert pair.fail().code == "DPONE_TARGET_CHANGED_AFTER_EXCHANGE"
        assert states(pair)[0] == ["COMMITTED_INCOMPLETE"]
    pair.clickhouse.command("alter table marts.events drop column extra")
    assert {r.action for r in pair.publish().values()} == {"finished"}
    assert_whole(pair, [1])


def test_an_image_of_nobody_keeps_the_outcome_unknown_until_it_is_gone(pair: Pair) -> None:  # noqa: F811
    pair.event(1)
    broken(pair, "admit.after")
    ((operation_id,),) = pair.sql.execute(
        "select operation_id from dpone_control.operation where mart = 'events'"
    ).fetchall()
    image = image_name(operation_id, "before")
    pair.sql.execute(f"create table dpone_images.{image} (x int)")
    for _ in range(2):
        assert pair.fail().code == "DPONE_COMMIT_UNKNOWN"
        assert states(pair) == [["COMMIT_UNKNOWN"], ["PREPARING"]]
    pair.sql.execute(f"drop table dpone_images.{image}")
    pair.publish()
    assert_whole(pair, [1])


def test_a_committed_day_whose_image_was_hidden_is_known_again_when_it_is_back(
    pair: Pair,  # noqa: F811
    pair_project: Path,  # noqa: F811
) -> None:
    pair.event(1)
    pair.crash(pair_project, "mutate.after:kill")
    ((operation_id,),) = pair.sql.execute(
        "select operation_id from dpone_control.operation where mart = 'events'"
    ).fetchall()
    image = image_name(operation_id, "after")
    pair.sql.execute(f"alter table dpone_images.{image} rename to hidden")
    assert pair.fail().code == "DPONE_COMMIT_UNKNOWN"
    pair.sql.execute(f"alter table dpone_images.hidden rename to {image}")
    pair.sql.execute("update loose.events set device = 4")  # without a restore, device 1 would stay as well
    pair.publish()
    assert_whole(pair, [4])
    edges = pair.sql.execute(
        "select from_state, to_state from dpone_control.transition where operation_id = %s and from_state <> to_state"
        " order by version",
        [operation_id],
    ).fetchall()
    assert edges == [
        ("PREPARING", "COMMIT_UNKNOWN"),
        ("COMMIT_UNKNOWN", "PREPARING"),
        ("PREPARING", "FAILED_PRE_COMMIT"),
    ]


# --------------------------------------------------------------------------- replays, replacements and restores


def test_replacements_of_replacements_start_from_the_last_published_day(pair: Pair) -> None:  # noqa: F811
    pair.event(1)
    pair.publish()
    # A replay that commits and fails its dbt test, then another one, then one that rolls back.
    pair.sql.execute("update loose.events set reading = 2, site = null")
    assert pair.fail(replay=True).code == "DPONE_DBT_TEST_FAILED"
    assert pair.mart() == [(1, "2.000")]
    pair.sql.execute("update loose.events set device = 5")
    assert pair.fail(replay=True).code == "DPONE_DBT_TEST_FAILED"
    assert pair.mart() == [(1, "1.500"), (5, "2.000")]
    pair.event(5)
    assert pair.fail(replay=True).code == "DPONE_KEY_DUPLICATE"
    assert pair.mart() == [(1, "1.500"), (5, "2.000")]
    assert pair.target() == [(1, "1.500")]
    # What is published and what SQL holds differ, so the day is not skipped as complete.
    pair.sql.execute("delete from loose.events")
    pair.event(7)
    assert {r.action for r in pair.publish().values()} == {"published"}
    assert_whole(pair, [1, 7])
    assert pair.target() == pair.mart() == [(1, "1.500"), (7, "1.500")]
    assert pair.operations() == [
        ("COMPLETE", "normal", 1, 0),
        ("FAILED_PRE_COMMIT", "complete_scope_replay", 2, 0),
        ("FAILED_PRE_COMMIT", "failed_precommit_replacement", 2, 1),
        ("FAILED_PRE_COMMIT", "failed_precommit_replacement", 2, 2),
        ("COMPLETE", "failed_precommit_replacement", 2, 3),
    ]
    assert {r.action for r in pair.publish().values()} == {"skipped"}


def test_a_replay_that_changed_nothing_leaves_the_day_complete(pair: Pair) -> None:  # noqa: F811
    pair.event(1)
    pair.publish()
    broken(pair, "mutate.before", replay=True)
    assert {r.action for r in pair.publish().values()} == {"skipped"}
    assert states(pair)[0] == ["COMPLETE", "FAILED_PRE_COMMIT"]


def test_two_failed_days_are_restored_each_from_its_own_image(pair: Pair) -> None:  # noqa: F811
    pair.event(1, site=None)
    pair.event(2, day=OTHER, site=None)
    for day in (DAY, OTHER):
        assert pair.fail(day).code == "DPONE_DBT_TEST_FAILED"
    pair.sql.execute("update loose.events set site = 7, device = device + 10")
    for day in (OTHER, DAY):
        pair.publish(day)
    assert_whole(pair, [11, 12])


# ----------------------------------------------------------------------------------------- the world moved on


def changed(workflow: Workflow, **mart: object) -> Workflow:
    first, second = workflow.plans
    if not mart:
        return replace(workflow, plans=(first,))
    return replace(workflow, plans=(replace(first, mart=first.mart.model_copy(update=mart)), second))


@pytest.mark.parametrize("mart", [{}, {"target": Relation(schema_name="marts", name="events__new")}])
def test_an_operation_whose_workflow_was_declared_anew_refuses_until_it_is_put_back(
    pair: Pair,  # noqa: F811
    mart: dict[str, object],
) -> None:
    pair.event(1)
    broken(pair, "exchange.before")
    declared = changed(pair.runtime.workflow_of("events"), **mart)
    with pytest.raises(DponeError) as caught:
        publish_day(pair.runtime.ports(), declared, Scope.day(DAY), identity(), replay=False)
    assert caught.value.code == "DPONE_WORKFLOW_CHANGED"
    assert states(pair) == [["COMMITTING"], ["PREPARED"]]
    pair.publish()
    assert_whole(pair, [1])


def test_a_published_day_is_not_skipped_when_its_table_is_gone(pair: Pair) -> None:  # noqa: F811
    pair.event(1)
    pair.publish()
    pair.clickhouse.command("rename table marts.events to marts.events__moved")
    assert pair.fail().code == "DPONE_TARGET_ABSENT"
    pair.clickhouse.command("create table marts.events as marts.events__moved")
    assert pair.fail().code == "DPONE_TARGET_REPLACED"
    pair.clickhouse.command("exchange tables marts.events and marts.events__moved")
    assert {r.action for r in pair.publish().values()} == {"skipped"}


def test_two_tries_that_count_alike_are_two_executions(pair: Pair) -> None:  # noqa: F811
    pair.event(1)
    first = identity()
    pair.runtime.publish("events", Scope.day(DAY), identity=first, replay=False)
    again = replace(first, worker_id=str(uuid.uuid4()))
    with failing("admit.after"), pytest.raises(DponeError):
        pair.runtime.publish("events", Scope.day(DAY), identity=again, replay=True)
    assert states(pair)[0] == ["COMPLETE", "PREPARING"]
    assert {r.action for r in pair.publish(replay=True).values()} == {"published"}
    assert_whole(pair, [1])
    assert states(pair)[0] == ["COMPLETE", "FAILED_PRE_COMMIT", "COMPLETE"]


def test_a_clock_that_went_back_changes_no_order(pair: Pair) -> None:  # noqa: F811
    pair.event(1, site=None)
    assert pair.fail().code == "DPONE_DBT_TEST_FAILED"
    # As if the machine that did it had been two days ahead.
    for column in ("admitted_at", "updated_at"):
        pair.sql.execute(f"update dpone_control.operation set {column} = {column} + interval '2 days'")
    pair.sql.execute("update dpone_control.transition set changed_at = changed_at + interval '2 days'")
    pair.sql.execute("update loose.events set site = 7, device = 3")
    pair.publish()
    pair.publish(replay=True)
    assert_whole(pair, [3])
    assert [o[1:] for o in pair.operations()] == [
        ("normal", 1, 0),
        ("failed_precommit_replacement", 1, 1),
        ("complete_scope_replay", 2, 0),
    ]
