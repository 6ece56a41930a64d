"""Hooks are read, judged, put in order and run; what came of each is a step without SQL."""

import hashlib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dpone_dagster.declarations.manifest import CustomSqlGate, Process, SqlText
from dpone_dagster.errors import DponeError
from dpone_dagster.governance import hooks as module
from dpone_dagster.governance.hooks import (
    HookPlan,
    blocking,
    build_hooks,
    providers,
    run_phase,
    sql_dependency,
)
from dpone_dagster.ports import HookContext, HookDefinition, HookStep, SqlRunner
from resources.hook_providers import BUILTINS

DIALECTS = {"source": "tsql", "sink": "clickhouse"}


def process(*, pre: list[dict[str, Any]] | None = None, post: list[dict[str, Any]] | None = None) -> Process:
    return Process.parse(
        {
            "name": "orders",
            "source": {
                "type": "mssql",
                "table": {"schema": "dbo", "name": "orders"},
                "options": {"hooks": {"pre_hook": pre or [], "post_hook": post or []}},
            },
            "sink": {"type": "clickhouse", "table": {"schema": "raw", "name": "orders"}, "strategy": "full_refresh"},
        }
    )


def hook(id_: str = "a", **fields: Any) -> dict[str, Any]:
    body = {} if {"sql", "sql_file", "webhook"} & fields.keys() else {"sql": "SELECT 1"}
    return {"id": id_, "kind": "custom", **body, **fields}


def plan(root: Path, *pre: dict[str, Any], dialects: Mapping[str, str] = DIALECTS, **more: Any) -> HookPlan:
    return build_hooks(process(pre=list(pre), **more), root=root, manifest_dir=root, dialects=dialects)


def refusal(root: Path, *pre: dict[str, Any], **more: Any) -> DponeError:
    with pytest.raises(DponeError) as refused:
        plan(root, *pre, **more)
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(refused.value.details)
    return refused.value


def ids(hooks: tuple[HookDefinition, ...]) -> list[str]:
    return [each.hook.id for each in hooks]


# ---------------------------------------------------------------------------------------------------- the graph


def test_hooks_run_after_what_they_depend_on_and_otherwise_as_declared(tmp_path: Path) -> None:
    built = plan(
        tmp_path,
        hook("d", depends_on=["b", "c"]),
        hook("b"),
        hook("e"),
        hook("c", depends_on=["a"]),
        hook("a"),
        post=[hook("z"), hook("a")],
    )
    # d waits for c, which waits for a; b and e are free from the start.
    assert ids(built.pre) == ["b", "e", "a", "c", "d"]
    assert ids(built.post) == ["z", "a"]
    assert [each.phase for each in (*built.pre, *built.post)] == ["pre_hook"] * 5 + ["post_hook"] * 2


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_acyclic_graph_is_ordered_by_its_edges(data: st.DataObject) -> None:
    names = [f"h{n}" for n in range(data.draw(st.integers(1, 8)))]
    edges = {
        name: data.draw(st.lists(st.sampled_from(names[:n]), unique=True)) if n else [] for n, name in enumerate(names)
    }
    declared = data.draw(st.permutations(names))
    order = ids(plan(Path("/"), *(hook(name, depends_on=edges[name]) for name in declared)).pre)
    assert sorted(order) == sorted(names)
    assert all(order.index(before) < order.index(name) for name in names for before in edges[name])
    # Stable: a hook stands after a later declared one only where it had to wait.
    for place, name in enumerate(order):
        for later in order[place + 1 :]:
            if declared.index(later) < declared.index(name):
                assert not set(edges[later]) <= set(order[:place])


def test_a_broken_graph_is_refused_and_named(tmp_path: Path) -> None:
    cycle = refusal(
        tmp_path,
        hook("free"),
        hook("a", depends_on=["b"]),
        hook("b", depends_on=["c"]),
        hook("c", depends_on=["a"]),
        hook("behind", depends_on=["a"]),
    )
    assert cycle.code == "DPONE_HOOK_GRAPH"
    assert all(f" {name}" in cycle.sentence for name in "abc")
    assert "behind" not in cycle.sentence
    assert "free" not in cycle.sentence
    itself = refusal(tmp_path, hook("a", depends_on=["a"]))
    assert (itself.code, itself.sentence) == ("DPONE_HOOK_GRAPH", "pre_hook: a depends on itself.")
    unknown = refusal(tmp_path, hook("a", depends_on=["x"]), post=[hook("x")])
    assert (unknown.code, unknown.sentence) == (
        "DPONE_HOOK_GRAPH",
        "pre_hook: a depends on x, which is no hook of this phase.",
    )
    twice = refusal(tmp_path, post=[hook("a"), hook("a")])
    assert (twice.code, twice.sentence) == ("DPONE_HOOK_GRAPH", "post_hook: the id a is used twice.")


# --------------------------------------------------------------------------------------------------- the guard


def test_sql_that_may_change_something_needs_the_author_s_word(tmp_path: Path) -> None:
    refused = refusal(tmp_path, hook("refresh", sql="SELECT 1; EXEC p_secret"))
    assert refused.code == "DPONE_HOOK_MUTATES"
    assert refused.sentence == "pre_hook.refresh: statement 2: EXEC (quote it if it is a name)."
    (said,) = plan(tmp_path, hook("refresh", sql="SELECT 1; EXEC p_secret", mutates_source=True)).pre
    assert said.mutates
    assert said.statements == 2
    (reads,) = plan(tmp_path, hook("look", sql="SELECT 'EXEC p'")).pre
    assert not reads.mutates
    (word,) = plan(tmp_path, hook("look", sql="SELECT * FROM view_with_a_trigger", mutates_source=True)).pre
    assert word.mutates  # the author knows more than the text shows


def test_the_example_of_plain_maintenance_needs_no_word(tmp_path: Path) -> None:
    optimize = "OPTIMIZE TABLE raw.orders FINAL"
    (step,) = plan(tmp_path, post=[hook(kind="target_maintenance", connector="sink", sql=optimize)]).post
    assert step.mutates  # and so it is not sent to a read-only session
    for kind, sql in (("custom", optimize), ("target_maintenance", f"{optimize}; DROP TABLE raw.orders")):
        assert refusal(tmp_path, hook(kind=kind, connector="sink", sql=sql)).code == "DPONE_HOOK_MUTATES"


def test_bodies_that_cannot_be_used_are_refused_with_the_hook(tmp_path: Path) -> None:
    for sql, code in (("-- nothing", "DPONE_SQL_EMPTY"), ("SELECT 'secret", "DPONE_SQL_UNREADABLE")):
        refused = refusal(tmp_path, hook("x", sql=sql, mutates_source=True))
        assert refused.code == code
        assert "pre_hook.x" in refused.sentence
    probe = refusal(tmp_path, hook("x", type="data_quality_probe", sql="SELECT 1; SELECT 2", expect=0))
    assert probe.code == "DPONE_SQL_NOT_READING"
    probe = refusal(tmp_path, hook("x", type="data_quality_probe", sql="EXEC p", expect=0, mutates_source=True))
    assert probe.code == "DPONE_SQL_NOT_READING"
    missing = refusal(tmp_path, hook("x"), dialects={"sink": "clickhouse"})
    assert missing.code == "DPONE_HOOK_ENGINE_MISSING"
    notified = plan(tmp_path, hook("x", kind="notification", type="webhook", webhook="HOOK"), dialects={})
    assert notified.pre[0].sql_hash is None


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"sql": "SELECT 1"}, True),
        ({"sql": "SELECT 1", "connector": "sink"}, True),
        ({"sql": "EXEC p", "mutates_source": True}, False),
        ({"sql": "EXEC p", "mutates_source": True, "autocommit": False}, True),
        ({"sql": "SELECT 1", "mutates_source": True}, False),
        ({"sql": "INSERT INTO t SELECT 1", "mutates_source": True, "connector": "sink"}, False),
        ({"sql": "INSERT INTO t SELECT 1", "mutates_source": True, "connector": "sink", "autocommit": False}, False),
        ({"sql": "OPTIMIZE TABLE t", "kind": "target_maintenance", "connector": "sink"}, False),
    ],
)
def test_what_mutates_is_repeated_only_where_it_can_be_rolled_back(
    tmp_path: Path, fields: dict[str, Any], accepted: bool
) -> None:
    repeated = hook(retry_policy={"attempts": 2}, **fields)
    if accepted:
        assert plan(tmp_path, repeated).pre
    else:
        assert refusal(tmp_path, repeated).code == "DPONE_HOOK_RETRY"


def test_a_transaction_that_cannot_be_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, hook(connector="sink", autocommit=False)).code == "DPONE_HOOK_RETRY"
    commits = hook(sql="UPDATE t SET a = 1 COMMIT", mutates_source=True, autocommit=False)
    assert refusal(tmp_path, commits).code == "DPONE_HOOK_RETRY"
    assert plan(tmp_path, {**commits, "autocommit": True}).pre


# --------------------------------------------------------------------------------------------------- sql_file


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project" / "sql").mkdir(parents=True)
    (tmp_path / "project" / "manifests").mkdir()
    (tmp_path / "outside.sql").write_text("SELECT 'secret'")
    return tmp_path / "project"


def from_file(project: Path, name: str, **fields: Any) -> HookPlan:
    return build_hooks(
        process(pre=[hook("f", sql_file=name, **fields)]),
        root=project,
        manifest_dir=project / "manifests",
        dialects=DIALECTS,
    )


def test_a_file_is_read_before_the_guard_and_hashed_by_its_bytes(project: Path) -> None:
    data = b"\xef\xbb\xbfSELECT 1;\r\nEXEC p_secret;\r\n"
    (project / "sql" / "a.sql").write_bytes(data)
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    built = from_file(project, "../sql/a.sql", mutates_source=True)
    assert built.pre[0].sql_hash == digest
    assert built.pre[0].statements == 2
    assert [(d.path, d.sha256) for d in built.dependencies] == [("sql/a.sql", digest)]
    with pytest.raises(DponeError) as refused:
        from_file(project, "../sql/a.sql")
    assert refused.value.code == "DPONE_HOOK_MUTATES"
    assert "secret" not in str(refused.value)


def test_a_link_inside_the_project_is_followed_and_named_by_what_it_leads_to(project: Path) -> None:
    (project / "sql" / "a.sql").write_text("SELECT 1")
    (project / "manifests" / "link.sql").symlink_to("../sql/a.sql")
    assert [d.path for d in from_file(project, "link.sql").dependencies] == ["sql/a.sql"]


def test_files_that_cannot_be_used_are_refused(project: Path) -> None:
    sql = project / "sql"
    (sql / "link.sql").symlink_to(project.parent / "outside.sql")
    (sql / "loop.sql").symlink_to("loop.sql")
    (sql / "far").symlink_to(project.parent)
    os.mkfifo(sql / "pipe.sql")
    (sql / "latin.sql").write_bytes("SELECT 'é'".encode("latin-1"))
    (sql / "large.sql").write_bytes(b"SELECT 1 --" + b"x" * (1024 * 1024 - 10))
    (sql / "largest.sql").write_bytes(b"SELECT 1 --" + b"x" * (1024 * 1024 - 11))
    for name in (
        "../../outside.sql",
        "../sql/link.sql",
        "../sql/far/outside.sql",
        "../sql/loop.sql",
        "../sql/pipe.sql",
        "../sql/latin.sql",
        "../sql/large.sql",
        "../sql/missing.sql",
        "../sql",
        str(project.parent / "outside.sql"),
        str(sql / "largest.sql"),
        "a\0b",
    ):
        with pytest.raises(DponeError) as refused:
            from_file(project, name)
        assert refused.value.code == "DPONE_SQL_FILE", name
        assert "pre_hook.f.sql_file" in refused.value.sentence
        assert str(project) not in str(refused.value)
    assert from_file(project, "../sql/largest.sql").pre


def test_the_reader_serves_queries_and_gates_too(project: Path) -> None:
    (project / "sql" / "q.sql").write_text("SELECT 1")
    where = {"root": project, "manifest_dir": project / "manifests", "where": "x"}
    digest = "sha256:" + hashlib.sha256(b"SELECT 1").hexdigest()
    gate = CustomSqlGate.parse({"id": "g", "type": "custom_sql", "sql_file": "../sql/q.sql", "min": 1})
    body = sql_dependency(gate, **where)
    assert (body.sql, body.sha256, body.file and body.file.path) == ("SELECT 1", digest, "sql/q.sql")
    body = sql_dependency(SqlText.parse({"sql": "SELECT 1"}), **where)
    assert (body.sql, body.sha256, body.file) == ("SELECT 1", digest, None)
    assert "SELECT" not in repr(body)


# ------------------------------------------------------------------------------------------------- the digest


def test_the_digest_follows_what_runs_and_shows_no_sql(project: Path) -> None:
    file = project / "sql" / "a.sql"
    file.write_text("SELECT 'secret'")
    one = from_file(project, "../sql/a.sql")
    assert "secret" not in str(one.as_json())
    assert "secret" not in repr(one)
    assert from_file(project, "../sql/../sql/a.sql").digest() == one.digest()
    file.write_text("SELECT 'secret' ")
    assert from_file(project, "../sql/a.sql").digest() != one.digest()
    base = plan(project, hook("a"), hook("b"))
    others = [
        plan(project, hook("b"), hook("a")),
        plan(project, hook("a")),
        plan(project, hook("a"), post=[hook("b")]),
        plan(project, hook("a"), hook("b", kind="notification")),
        plan(project, hook("a"), hook("b", connector="sink")),
        plan(project, hook("a"), hook("b", depends_on=["a"])),
        plan(project, hook("a"), hook("b", lineage={"inputs": ["x"]})),
        plan(project, hook("a"), hook("b", timeout_seconds=1)),
        plan(project, hook("a"), hook("b", mutates_source=True)),
        plan(project, hook("a"), hook("b", sql="SELECT 2")),
    ]
    assert len({base.digest(), *(each.digest() for each in others)}) == len(others) + 1
    assert plan(project, hook("a"), hook("b")).digest() == base.digest()


# --------------------------------------------------------------------------------------------------- providers


class Recorder:
    """A provider of somebody else's: answers with what it is told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.ran: list[str] = []

    def run(self, definition: HookDefinition, *, runner: SqlRunner | None) -> Mapping[str, int | str | None]:
        self.ran.append(definition.hook.id)
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


RECORDER = Recorder()


def make_recorder(context: HookContext) -> Recorder:
    return RECORDER


def make_broken(context: HookContext) -> Recorder:
    raise RuntimeError("secret")


def registered(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    found = [EntryPoint(name, value, module.ENTRY_POINTS) for name, value in entries]
    monkeypatch.setattr(module, "_registered", lambda: tuple(found))


CONTEXT = HookContext(process="orders", run_id="run")


def test_what_ships_needs_no_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)
    made = providers(["sql", "webhook", "data_quality_probe"], context=CONTEXT, builtins=BUILTINS)
    assert sorted(made) == ["data_quality_probe", "sql", "webhook"]
    assert all(isinstance(made[name], BUILTINS[name]) for name in made)  # type: ignore[arg-type]


def test_what_ships_is_registered_as_it_is_mapped() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared[module.ENTRY_POINTS] == {
        name: f"{factory.__module__}:{factory.__qualname__}" for name, factory in BUILTINS.items()
    }


def test_others_register_and_nobody_replaces_what_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("sql", "resources.hook_providers:SqlHook")
    theirs = ("acme", f"{__name__}:make_recorder")
    broken = ("broken", f"{__name__}:make_broken")
    registered(monkeypatch, ours, theirs, broken)
    assert providers(["acme"], context=CONTEXT, builtins=BUILTINS) == {"acme": RECORDER}

    def code(*types: str) -> tuple[str, str]:
        with pytest.raises(DponeError) as refused:
            providers(types, context=CONTEXT, builtins=BUILTINS)
        assert "secret" not in str(refused.value)
        return refused.value.code, refused.value.sentence

    assert code("nobody") == (
        "DPONE_PROVIDER_UNKNOWN",
        "The hook type nobody is unknown; known are acme, broken, data_quality_probe, sql, webhook.",
    )
    assert code("broken")[0] == "DPONE_PROVIDER_UNKNOWN"
    registered(monkeypatch, ("sql", f"{__name__}:make_recorder"))
    assert code("webhook")[0] == "DPONE_PROVIDER_SHADOWED"
    registered(monkeypatch, theirs, ("acme", f"{__name__}:make_broken"))
    assert code("sql")[0] == "DPONE_PROVIDER_SHADOWED"
    registered(monkeypatch, theirs, theirs)  # one package found twice on the path is one package
    assert code("nobody")[0] == "DPONE_PROVIDER_UNKNOWN"


# ------------------------------------------------------------------------------------------------------ running


def failed(**details: Any) -> DponeError:
    return DponeError("DPONE_HOOK_FAILED", "It did not.", **details)


LOST = DponeError("DPONE_ENGINE_UNAVAILABLE", "It is gone.")


def run(root: Path, provider: Recorder, *hooks: dict[str, Any], **more: Any) -> tuple[HookStep, ...]:
    return run_phase(plan(root, *hooks).pre, runners={}, providers={"sql": provider}, sleep=lambda _: None, **more)


def statuses(steps: tuple[HookStep, ...]) -> dict[str, str]:
    return {step.id: step.status for step in steps}


def test_hooks_run_in_order_and_say_what_they_did(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    provider = Recorder({"affected_rows": 3}, {})
    steps = run(
        tmp_path,
        provider,
        hook("b", depends_on=["a"], lineage={"outputs": ["x"]}),
        hook("a"),
        on_start=lambda definition: events.append(("start", definition.hook.id)),
        on_step=lambda step: events.append((step.status, step.id)),
    )
    assert events == [("start", "a"), ("succeeded", "a"), ("start", "b"), ("succeeded", "b")]
    assert steps[0].metrics == {"affected_rows": 3}
    assert steps[0].sql_hash == "sha256:" + hashlib.sha256(b"SELECT 1").hexdigest()
    assert steps[1].lineage == {"inputs": [], "outputs": ["x"]}
    assert (steps[1].attempts, steps[1].phase, steps[1].error_code) == (1, "pre_hook", None)
    assert blocking(steps) is None


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (failed(sqlstate="42P01", statement=1, other="secret"), "failed", "DPONE_HOOK_FAILED"),
        (LOST, "unknown", "DPONE_ENGINE_UNAVAILABLE"),
        (RuntimeError("secret"), "unknown", "DPONE_UNEXPECTED"),
    ],
)
def test_the_first_failure_stops_the_rest(tmp_path: Path, answer: Exception, status: str, code: str) -> None:
    provider = Recorder({}, answer)
    steps = run(tmp_path, provider, hook("a"), hook("b"), hook("c"))
    assert statuses(steps) == {"a": "succeeded", "b": status, "c": "skipped"}
    assert provider.ran == ["a", "b"]
    assert steps[1].error_code == code
    assert steps[2].metrics == {"skipped_because": "earlier_failure"}
    assert steps[2].attempts == 0
    assert blocking(steps) == steps[1]
    assert "secret" not in repr(steps)
    if status == "failed":
        assert steps[1].metrics == {"sqlstate": "42P01", "statement": 1}


def test_a_notification_that_fails_stops_nothing(tmp_path: Path) -> None:
    for answer, status in ((failed(http_status=500), "failed"), (LOST, "unknown")):
        steps = run(tmp_path, Recorder(answer), hook("tell", kind="notification"), hook("b", depends_on=["tell"]))
        assert statuses(steps) == {"tell": status, "b": "succeeded"}
        assert blocking(steps) is None


def test_only_what_provably_left_nothing_is_repeated(tmp_path: Path) -> None:
    policy = {"attempts": 3, "delay_seconds": 7}
    slept: list[float] = []

    def attempts(*answers: Any, **fields: Any) -> tuple[str, int]:
        definition = plan(tmp_path, hook(**fields)).pre
        (step,) = run_phase(definition, runners={}, providers={"sql": Recorder(*answers)}, sleep=slept.append)
        return step.status, step.attempts

    again = failed(repeatable=True)
    assert attempts(again, again, {}, retry_policy=policy) == ("succeeded", 3)
    assert slept == [7, 7]
    assert attempts(again, again, again, {}, retry_policy=policy) == ("failed", 3)
    assert attempts(again, {}) == ("failed", 1)
    assert attempts(failed(), {}, retry_policy=policy) == ("failed", 1)
    assert attempts(failed(repeatable=False), {}, retry_policy=policy) == ("failed", 1)
    assert attempts(failed(repeatable="yes"), {}, retry_policy=policy) == ("failed", 1)
    assert attempts(LOST, {}, retry_policy=policy) == ("unknown", 1)
    assert attempts(again, LOST, {}, retry_policy=policy) == ("unknown", 2)
    assert attempts(RuntimeError(), {}, retry_policy=policy) == ("unknown", 1)


def test_what_an_earlier_try_did_is_not_done_again(tmp_path: Path) -> None:
    provider = Recorder()
    started: list[str] = []
    steps = run(
        tmp_path,
        provider,
        hook("a"),
        hook("b"),
        hook("c"),
        done=frozenset({"a", "c"}),
        on_start=lambda definition: started.append(definition.hook.id),
    )
    assert provider.ran == started == ["b"]
    assert statuses(steps) == {"a": "skipped", "b": "succeeded", "c": "skipped"}
    assert steps[0].metrics == {"skipped_because": "succeeded_earlier"}


def test_one_hook_can_be_run_alone_or_all_be_shown_without_running(tmp_path: Path) -> None:
    provider = Recorder()
    declared = (hook("a"), hook("b", depends_on=["a"]))
    assert statuses(run(tmp_path, provider, *declared, only="b")) == {"b": "succeeded"}
    assert provider.ran == ["b"]
    started: list[HookDefinition] = []
    assert statuses(run(tmp_path, provider, *declared, dry_run=True, on_start=started.append)) == {
        "a": "planned",
        "b": "planned",
    }
    assert provider.ran == ["b"]
    assert started == []
    with pytest.raises(DponeError) as refused:
        run(tmp_path, provider, *declared, only="c")
    assert refused.value.code == "DPONE_HOOK_UNKNOWN"
    assert refused.value.sentence == "c is no hook of this phase; its hooks are: a, b."


def test_an_interruption_is_no_hook_s_failure(tmp_path: Path) -> None:
    class Interrupted(Recorder):
        def run(self, definition: HookDefinition, *, runner: SqlRunner | None) -> Mapping[str, int | str | None]:
            raise KeyboardInterrupt

    steps: list[HookStep] = []
    collect: Callable[[HookStep], None] = steps.append
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Interrupted(), hook("a"), on_step=collect)
    assert steps == []


# --------------------------------------------------------------------------------------------------------- docs


def test_the_documented_hooks_are_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    first, second = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.S))
    declared = first["source"]["options"]["hooks"]
    built = plan(tmp_path, *declared["pre_hook"], post=declared["post_hook"])
    assert ids(built.pre) == ["refresh_base", "base_is_there"]
    assert [each.mutates for each in (*built.pre, *built.post)] == [True, False, True, False]
    (retried,) = plan(tmp_path, *second["source"]["options"]["hooks"]["pre_hook"]).pre
    assert retried.hook.retry_policy != "none"
