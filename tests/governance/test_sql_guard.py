"""What SQL does, decided by hand here and compared with the guard."""

import subprocess
import sys

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpone_dagster.errors import DponeError
from dpone_dagster.governance import sql_names
from dpone_dagster.governance.sql_guard import MAX_DEPTH, analyse, require_reading, split
from resources.embedded.postgres import PostgresEndpoint

READS = {
    "tsql": [
        "SELECT 1",
        "select count(*), COUNT_BIG(*), GETDATE(), SYSUTCDATETIME(), ISNULL(a, 0), LEN(a) FROM dbo.t",
        "SELECT DATEDIFF(day, a, b), OBJECT_ID('x'), TRY_CAST(a AS int), CONVERT(varchar(10), a, 120) FROM t",
        "SELECT STRING_AGG(a, ','), IIF(a = 1, 1, 2), HASHBYTES('SHA2_256', a) FROM t GROUP BY a",
        "SELECT [drop] FROM [dbo].[insert into] WHERE [a]]b] = 1",
        'SELECT "delete" FROM "truncate"',
        "SELECT 'DROP TABLE t; EXEC p' AS a",
        "SELECT N'it''s; DELETE FROM t'",
        "-- DROP TABLE t\nSELECT 1",
        "/* DROP TABLE t; /* nested */ EXEC p */ SELECT 1",
        "WITH x AS (SELECT a FROM t) SELECT * FROM x ORDER BY a OFFSET 0 ROWS FETCH NEXT 5 ROWS ONLY",
        "SELECT a FROM t UNION ALL SELECT b FROM u EXCEPT SELECT c FROM v",
        "SELECT ROW_NUMBER() OVER (PARTITION BY a ORDER BY b) FROM t WITH (NOLOCK) OPTION (RECOMPILE)",
        "SELECT 1\nGO\nSELECT 2\nGO 3\n",
        "SELECT * FROM t CROSS APPLY OPENJSON(t.j) AS j",
        "SELECT a FROM t; SELECT b FROM u;",
        "SELECT EOMONTH(a), DATENAME(day, a), CONCAT_WS(',', a, b), VAR(a), STUFF(a, 1, 1, b), @@ROWCOUNT FROM t",
        "SELECT created, updated, executed, dropped FROM intos",
    ],
    "postgres": [
        "SELECT 1",
        "select 'a;drop table t' /* /* x */ ; drop */ -- ; drop\n",
        "SELECT $a$ ; DROP TABLE t $b$ $a$",
        "SELECT E'\\'; DROP TABLE t; --'",
        "with x(a) as (values (1)) select count(*) filter (where a > 1), a::numeric(10, 2) from x where a in (1, 2)",
        "select extract(year from now()), interval '1 day', date_trunc('day', ts), coalesce(a, 1) from t",
        "select * from generate_series(1, 2) as g(n) join lateral (select 1) as l on (true)",
        'select pg_catalog.sum(a), "sum"(a), row_number() over (partition by a order by (b)) from t',
        "select a from t where not exists (select 1) group by rollup (a), grouping sets ((a), (b))",
        'select "drop", "Insert" from "update"',
        "select (a like ('x')) from t where b not in (1)",
        "with x as materialized (select 1) select * from x; select 2",
        "select gen_random_uuid(), random(), clock_timestamp()",
        "table t",
        "values (1), (2)",
        "select 1;;; ; select 2",
        "select cast(a as character varying(10)), array(select 1), array[1, 2] from t",
        "select percentile_cont(0.5) within group (order by a) from t",
        "select 1e5, .5, 1.5e-3, 0xFF from t",
    ],
    "clickhouse": [
        "SELECT count() FROM db.t FINAL",
        "SELECT countIf(a = 1), uniqExact(b), quantile(0.5)(a), sumIf(a, b) FROM t PREWHERE a SETTINGS max_threads = 1",
        "SELECT arrayMap(x -> x + 1, [1, 2]), toDateTime64(a, 6, 'UTC'), t.1, a::Decimal(10, 2) FROM t ARRAY JOIN b",
        "SELECT if(b, 1, 2), multiIf(a, 1, 2), CAST(a AS Nullable(UInt8)), dictGet('d', 'x', 1) FROM (SELECT 1 AS a)",
        "SELECT * FROM numbers(10)",
        "SELECT * FROM merge('db', '^t')",
        "WITH 1 AS x SELECT x",
        "WITH x AS (SELECT 1 AS a) SELECT a FROM x LIMIT 1 BY a",
        'SELECT `drop`, "insert" FROM `db`.`alter`',
        "SELECT 'it\\'s; DROP TABLE t'",
        "SELECT $h$ ; DROP TABLE t $h$",
        "SELECT truncate(1.5)",
        "SELECT COLUMNS('a') APPLY(sum), * EXCEPT (a) REPLACE (b + 1 AS b) FROM t",
        "SELECT a, count() OVER (PARTITION BY a) FROM t WHERE d >= today() - INTERVAL 1 DAY QUALIFY a = 1",
        "SELECT url FROM remote",  # columns and tables may be called what functions are called
        "SELECT 1; SELECT 2",
        "SELECT myUserDefinedLambda(a) FROM t",
    ],
}

MUTATES = {
    "tsql": [
        "EXEC p",
        "EXECUTE [schema].[p_refresh_base] @a = 1",
        "exec('drop table t')",
        "p_refresh",
        "p_refresh 1",
        "dbo.p",
        "SELECT 1 EXEC p",
        "SELECT 1\nDROP TABLE t",
        "SELECT a FROM t DROP TABLE x",
        "SELECT a FROM t\nUPDATE x SET y = 1",
        "SELECT 1.DROP TABLE t",
        "SELECT 1.e5DROP TABLE t",
        "SELECT 0x1DROP TABLE t",
        "SELECT 1eDROP TABLE t",
        "SELECT 'a'DROP TABLE t",
        "SELECT [a]DROP TABLE t",
        "SELECT 1\nGO\nDROP TABLE t",
        "SELECT 1\nGO\np_refresh",
        "WITH x AS (SELECT 1 AS a) DELETE FROM x",
        "WITH x AS (SELECT 1 AS a) INSERT INTO t SELECT a FROM x",
        "SELECT a INTO #t FROM t",
        "SELECT a INTO dbo.t2 FROM t",
        "MERGE t USING u ON t.a = u.a WHEN MATCHED THEN DELETE;",
        "TRUNCATE TABLE t",
        "CREATE TABLE t (a int)",
        "ALTER TABLE t ADD b int",
        "IF 1 = 1 DELETE FROM t",
        "BEGIN SELECT 1; DROP TABLE t; END",
        "BEGIN TRAN; COMMIT",
        "DECLARE @x int = 1; SELECT @x",
        "SET IDENTITY_INSERT t ON",
        "SELECT NEXT VALUE FOR s",
        "SELECT * FROM OPENROWSET('a', 'b')",
        "SELECT * FROM OPENQUERY(srv, 'delete from t')",
        "SELECT * FROM OPENDATASOURCE('a', 'b').db.dbo.t",
        "SELECT dbo.f(1)",
        "SELECT * FROM dbo.f(1)",
        "SELECT * FROM f(1)",
        "SELECT [f](1)",
        "SELECT * FROM t JOIN dbo.f(1) AS x ON 1 = 1",
        "SELECT * FROM sys.dm_exec_sql_text(1)",
        "SELECT 1 RECEIVE * FROM q",
        "SELECT * FROM t CROSS APPLY dbo.f(t.a)",
        "SELECT f(1)",
        "SELECT master.dbo.xp_cmdshell('x')",
        "EXEC xp_cmdshell 'x'",
        "EXEC sp_executesql N'select 1'",
        "SELECT a FROM t WITH (UPDLOCK)",
        "SELECT a FROM t WITH (TABLOCKX)",
        "GRANT SELECT ON t TO u",
        "DENY SELECT ON t TO u",
        "DBCC CHECKDB",
        "KILL 55",
        "BACKUP DATABASE d TO DISK = 'x'",
        "SELECT 1 WAITFOR DELAY '0:0:1'",
        "BULK INSERT t FROM 'x'",
        "USE other",
        "DISABLE TRIGGER x ON t",
        "SELECT 1 /* open",
        "SELECT 'open",
        "SELECT 1 -- comment\rDROP TABLE t",
        "/*! DROP TABLE t */ SELECT 1",
        "SELECT 1 /* /* */ */ DROP TABLE t",
        "nonsense of some kind",
        "SELECT $(x)",
        "SELECT 1\u2028DROP TABLE t",
        "SELECT 1\u00a0DROP TABLE t",
    ],
    "postgres": [
        "CALL p()",
        "DO $$ begin delete from t; end $$",
        "WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x",
        "WITH x AS (INSERT INTO t VALUES (1) RETURNING *), y AS (SELECT 1) SELECT * FROM y",
        "WITH x AS (UPDATE t SET a = 1 RETURNING *) SELECT * FROM x",
        "SELECT * FROM (SELECT 1) q; WITH x AS (MERGE INTO t USING u ON true WHEN MATCHED THEN DELETE) SELECT 1",
        "SELECT a INTO t2 FROM t",
        "CREATE TABLE x AS SELECT 1",
        "SELECT nextval('s')",
        "SELECT setval('s', 1)",
        "SELECT pg_terminate_backend(1)",
        "SELECT pg_advisory_lock(1)",
        "SELECT * FROM dblink('x', 'delete from t') AS d(a int)",
        "SELECT lo_unlink(1)",
        "SELECT lo_import('/etc/passwd')",
        "SELECT pg_notify('a', 'b')",
        "SELECT set_config('a.b', 'c', false)",
        "SELECT query_to_xml('delete from t', true, true, '')",
        "SELECT pg_read_file('x')",
        "SELECT my_function(1)",
        "SELECT my_function (1)",
        'SELECT "MyFunction"(1)',
        'SELECT "Sum"(a) FROM t',
        "SELECT my_function/* */(1)",
        "SELECT my_function -- x\n(1)",
        "SELECT myschema.sum(a) FROM t",
        'SELECT "myschema" . "sum" (a) FROM t',
        "SELECT transform(a) FROM t",
        "SELECT explode(a) FROM t",
        "SELECT filter(1)",
        "SELECT (f)(1)",
        "SELECT * FROM t ORDER BY f(a)",
        "SELECT * FROM ROWS FROM (f(1)) AS x",
        "SELECT EXTRACT(EPOCH FROM f(1))",
        "SELECT over(1)",
        "SELECT rollup(1)",
        "SELECT a, cube(1)",
        "SELECT join(1)",
        "SELECT not like(1)",
        "SELECT evil(1) FROM (SELECT 1) AS q",
        "SELECT evil(1) FROM (SELECT 1) AS evil(a)",
        "SELECT * FROM evil(1) AS e(a)",
        "SELECT 1 OPERATOR(public.+) 2",
        "SELECT a FROM t FOR UPDATE",
        "SELECT a FROM t FOR SHARE",
        "SELECT a FROM t FOR NO KEY UPDATE",
        "SELECT a FROM t FOR KEY SHARE SKIP LOCKED",
        "SELECT * FROM (SELECT a FROM t FOR SHARE) q",
        "COPY t TO STDOUT",
        "COPY (SELECT 1) TO PROGRAM 'x'",
        "EXPLAIN ANALYZE DELETE FROM t",
        "VACUUM t",
        "ANALYZE t",
        "REFRESH MATERIALIZED VIEW v",
        "NOTIFY x",
        "LISTEN x",
        "DISCARD ALL",
        "LOCK TABLE t",
        "SET search_path TO evil",
        "SET ROLE admin",
        "RESET ALL",
        "BEGIN",
        "COMMIT",
        "PREPARE x AS DELETE FROM t",
        "EXECUTE x",
        "TRUNCATE t",
        "GRANT ALL ON t TO public",
        "COMMENT ON TABLE t IS 'x'",
        "REINDEX TABLE t",
        "SELECT 'a\\'; DROP TABLE t; --'",
        "SELECT 1; SELECT 2; DROP TABLE t",
        "SELECT $a$ x $b$; DROP TABLE t",
        "SELECT $1",
        "SELECT a$b$; DROP TABLE t; SELECT a$b$",
        "SELECT 1 -- x\rDROP TABLE t",
        "SELECT 1 /* /* */ ; DROP TABLE t",
        "\\! rm x",
        "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT 2; END",
        "SELECT xmlelement(name foo, my_function(1))",
        'SELECT U&"\\0066"(1)',
    ],
    "clickhouse": [
        "OPTIMIZE TABLE t FINAL",
        "OPTIMIZE TABLE t FINAL DEDUPLICATE",
        "SYSTEM RELOAD CONFIG",
        "KILL QUERY WHERE 1",
        "INSERT INTO t SELECT 1",
        "INSERT INTO t VALUES (1)",
        "INSERT INTO FUNCTION file('a') SELECT 1",
        "SELECT * FROM url('http://x')",
        "SELECT * FROM `url`('http://x')",
        "SELECT * FROM URL('http://x')",
        "SELECT * FROM \"u\\x72l\"('http://x')",
        'SELECT "sl\\x65ep"(1)',
        "SELECT * FROM s3('x')",
        "SELECT * FROM remote('x', db.t)",
        "SELECT * FROM file('x')",
        "SELECT file('x')",
        "SELECT * FROM executable('x', 'CSV', 'a Int8')",
        "SELECT * FROM mysql('x')",
        "SELECT * FROM cluster('c', db.t)",
        "SELECT * FROM someNewFunction('x')",
        "SELECT * FROM v(x = 1)",
        "SELECT 1 WHERE 1 IN (SELECT * FROM s3('x'))",
        "SELECT a FROM t WHERE a IN url('x')",
        "SELECT generateSerialID('x')",
        "SELECT sleep(3)",
        "SELECT COLUMNS('a') APPLY(generateSerialID) FROM t",
        "SELECT COLUMNS('a') APPLY generateSerialID FROM t",
        "SELECT * FROM view(SELECT * FROM url('x'))",
        "EXCHANGE TABLES a AND b",
        "RENAME TABLE a TO b",
        "ATTACH TABLE a",
        "DETACH TABLE a",
        "UNDROP TABLE a",
        "DROP TABLE a",
        "TRUNCATE TABLE a",
        "ALTER TABLE t DELETE WHERE 1",
        "DELETE FROM t WHERE 1",
        "UPDATE t SET a = 1 WHERE 1",
        "CREATE TABLE a ENGINE = Memory AS SELECT 1",
        "SELECT 1 INTO OUTFILE 'x'",
        "SELECT 1 PARALLEL WITH DROP TABLE t",
        "SET max_threads = 1",
        "USE db",
        "GRANT SELECT ON t TO u",
        "BACKUP TABLE t TO Disk('x')",
        "RESTORE TABLE t FROM Disk('x')",
        "MOVE USER x TO y",
        "EXPLAIN SELECT 1",
        "SHOW TABLES",
        "WATCH v",
        "SELECT 1; DROP TABLE t",
        "SELECT 'a\\\\'; DROP TABLE t; SELECT ''",
        "SELECT 1 /* /* */ ; DROP TABLE t; /* */ */",
        "# x\nSELECT 1",
        "SELECT 1 #! x\n; DROP TABLE t",
        "SELECT $ a; DROP TABLE t; $",
        "SELECT 1 \u2028; DROP TABLE t",
    ],
}


@pytest.mark.parametrize(("dialect", "sql"), [(d, s) for d, bodies in READS.items() for s in bodies])
def test_what_only_reads_is_let_through(dialect: str, sql: str) -> None:
    assert analyse(sql, dialect=dialect).reasons == ()
    assert not analyse(sql, dialect=dialect).mutates


@pytest.mark.parametrize(("dialect", "sql"), [(d, s) for d, bodies in MUTATES.items() for s in bodies])
def test_what_may_change_something_is_found(dialect: str, sql: str) -> None:
    analysis = analyse(sql, dialect=dialect)
    assert analysis.mutates
    assert analysis.reasons
    with pytest.raises(DponeError) as refused:
        require_reading(sql, dialect)
    assert refused.value.code == "DPONE_SQL_NOT_READING"


@pytest.mark.parametrize("dialect", READS)
@pytest.mark.parametrize("sql", ["", " \n\t", ";", " ; ;; ", "-- only a comment", "/* a; b */", "/* a */;-- b"])
def test_an_empty_body_is_refused(dialect: str, sql: str) -> None:
    for call in (lambda: analyse(sql, dialect=dialect), lambda: require_reading(sql, dialect)):
        with pytest.raises(DponeError) as refused:
            call()
        assert refused.value.code == "DPONE_SQL_EMPTY"


def test_an_unknown_dialect_is_no_dialect() -> None:
    with pytest.raises(KeyError):
        analyse("SELECT 1", dialect="mysql")


def test_each_statement_is_counted_and_named() -> None:
    analysis = analyse("select 1; insert into t values (';'); select ';'; drop table t;", dialect="postgres")
    assert analysis.statements == 4
    assert analysis.reasons == (
        "statement 2: INSERT (quote it if it is a name)",
        "statement 4: DROP (quote it if it is a name)",
    )


@pytest.mark.parametrize("dialect", READS)
def test_reasons_never_quote_the_body(dialect: str) -> None:
    for sql in (
        "CALL secret_name('secret value')",
        "SELECT secret_name('secret value')",
        "secret_name",
        "SELECT 'secret",
    ):
        analysis = analyse(sql, dialect=dialect)
        assert "secret" not in repr(analysis)


def test_only_plain_maintenance_is_maintenance() -> None:
    def maintenance(sql: str, dialect: str = "clickhouse") -> bool:
        return analyse(sql, dialect=dialect).maintenance

    assert maintenance("OPTIMIZE TABLE raw.orders FINAL")
    assert maintenance("SELECT 1; OPTIMIZE TABLE raw.orders PARTITION '2026-01-01'")
    assert maintenance("ANALYZE t", "postgres")
    assert not maintenance("SELECT 1")
    assert not maintenance("OPTIMIZE TABLE raw.orders FINAL DEDUPLICATE")
    assert not maintenance("OPTIMIZE TABLE raw.orders FINAL CLEANUP")
    assert not maintenance("OPTIMIZE TABLE raw.orders FINAL; DROP TABLE raw.orders")
    assert not maintenance("ANALYZE t; DELETE FROM t", "postgres")


@pytest.mark.parametrize(
    ("dialect", "sql", "wanted"),
    [
        ("postgres", "INSERT INTO t VALUES (1); COMMIT", True),
        ("postgres", "begin; select 1", True),
        ("postgres", "ROLLBACK TO SAVEPOINT x", True),
        ("postgres", "SELECT 'COMMIT'", False),
        ("postgres", "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; SELECT 2", False),
        ("tsql", "UPDATE t SET a = 1 COMMIT", True),
        ("tsql", "BEGIN TRAN", True),
        ("tsql", "BEGIN SELECT 1 END", False),
    ],
)
def test_transaction_control_is_seen(dialect: str, sql: str, wanted: bool) -> None:
    assert analyse(sql, dialect=dialect).controls_transaction is wanted


def test_splitting_keeps_each_statement_as_it_was() -> None:
    body = "-- first\nSELECT 'a;b' AS \"c;d\"; /* x; y */\nINSERT INTO t -- why\nVALUES ($q$;$q$) ;\n"
    assert split(body, "postgres") == (
        "SELECT 'a;b' AS \"c;d\"",
        "INSERT INTO t -- why\nVALUES ($q$;$q$)",
    )
    assert split("SELECT 'a\\';b'; SELECT `c;d`, [1]", "clickhouse") == ("SELECT 'a\\';b'", "SELECT `c;d`, [1]")
    assert split("SELECT [a;b];\nGO\nEXEC p\n  go 5  -- x\nSELECT go FROM t", "tsql") == (
        "SELECT [a;b]",
        "EXEC p",
        "SELECT go FROM t",
    )
    routine = (
        "CREATE OR REPLACE PROCEDURE p() BEGIN ATOMIC INSERT INTO t SELECT CASE WHEN true THEN 1 END; SELECT 1; END"
    )
    assert split(f"{routine}; CALL p()", "postgres") == (routine, "CALL p()")


def test_what_engines_read_differently_is_not_split() -> None:
    for dialect, sql in (
        ("postgres", "SELECT 'a"),
        ("clickhouse", "SELECT 1 # x"),
        ("tsql", "SELECT 1 /*"),
        ("clickhouse", "INSERT INTO t FORMAT CSV\n1;2"),
    ):
        with pytest.raises(DponeError) as refused:
            split(sql, dialect)
        assert refused.value.code == "DPONE_SQL_UNREADABLE"


def test_a_reading_query_comes_back_without_what_surrounds_it() -> None:
    assert require_reading("-- x\nSELECT 1 -- y\nFROM t ; -- z", "postgres") == "SELECT 1 -- y\nFROM t"
    for sql in ("SELECT 1; SELECT 2", "SELECT 1 INTO t", "SELECT 1; DROP TABLE t"):
        with pytest.raises(DponeError) as refused:
            require_reading(sql, "postgres")
        assert refused.value.code == "DPONE_SQL_NOT_READING"


def test_the_relation_stands_only_where_a_table_may() -> None:
    sql = "SELECT count(*) FROM {{ relation }} AS r WHERE r.a > 1"
    for dialect in READS:
        assert require_reading(sql, dialect, relation=True) == sql
    assert require_reading("SELECT count(*) FROM {{relation}};", "postgres", relation=True).endswith("{{ relation }}")
    for bad in (
        "SELECT '{{ relation }}'",
        'SELECT 1 AS "{{ relation }}"',
        "SELECT 1 -- {{ relation }}",
        "SELECT 1 FROM a{{ relation }}b; DROP TABLE t",
        "DELETE FROM {{ relation }}",
    ):
        with pytest.raises(DponeError) as refused:
            require_reading(bad, "postgres", relation=True)
        assert refused.value.code == "DPONE_SQL_NOT_READING"


@pytest.mark.parametrize("dialect", READS)
def test_deep_and_long_bodies_do_not_break_the_guard(dialect: str) -> None:
    for sql in (
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT " + "NOT " * 20000 + "1",
        "SELECT " + "CASE WHEN 1 = 1 THEN " * 5000 + "1" + " END" * 5000,
        "SELECT " + "9" * 10_000 + "x",
    ):
        assert analyse(sql, dialect=dialect).mutates
    shallow = "SELECT " + "(" * (MAX_DEPTH // 2) + "1" + ")" * (MAX_DEPTH // 2)
    assert not analyse(shallow, dialect=dialect).mutates
    assert not analyse("SELECT 1" + " + 1" * 5000, dialect=dialect).mutates


def test_the_parser_writes_nothing_to_the_log() -> None:
    # It warns about unsupported syntax, and quotes it.
    code = (
        "import logging; logging.basicConfig(level=0)\n"
        "from dpone_dagster.governance.sql_guard import analyse\n"
        "for dialect in ('tsql', 'postgres', 'clickhouse'):\n"
        "    for sql in ('CALL secret()', 'EXPLAIN secret', 'SYSTEM secret', 'BEGIN secret', 'SELECT secret x y'):\n"
        "        assert analyse(sql, dialect=dialect).mutates\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "secret" not in done.stdout + done.stderr


def test_functions_that_count_as_pure_are_postgresql_s_own_and_not_volatile(fresh_db: PostgresEndpoint) -> None:
    with psycopg.connect(fresh_db.conninfo) as connection:
        volatile = dict(
            connection.execute(
                "select proname, bool_or(provolatile = 'v') from pg_proc "
                "where pronamespace = 'pg_catalog'::regnamespace and prokind in ('f', 'a', 'w') group by proname"
            ).fetchall()
        )
        reserved = {
            word
            for (word,) in connection.execute(
                "select word from pg_get_keywords() where catcode in ('R', 'C')"
            ).fetchall()
        }
    assert {name for name in sql_names.POSTGRES_FUNCTIONS if volatile.get(name, True)} == set()
    assert {name for name in sql_names.POSTGRES_PURE_VOLATILE if not volatile[name]} == set()
    # What passes as syntax wherever it stands can be no function of a user: no function can be called so unquoted,
    # or the engine has one of that name already.
    assert {word for word in sql_names.POSTGRES_SYNTAX if word not in reserved and word not in volatile} == set()


# --------------------------------------------------------------------------------------------- anywhere in a body

_STATEMENTS = {
    "tsql": [
        "EXEC p",
        "DELETE FROM t",
        "SELECT a INTO b FROM c",
        "DROP TABLE t",
        "TRUNCATE TABLE t",
        "SELECT dbo.f(1)",
    ],
    "postgres": ["CALL p()", "DELETE FROM t", "DO $$ begin end $$", "DROP TABLE t", "SELECT nextval('s')", "NOTIFY x"],
    "clickhouse": [
        "DROP TABLE t",
        "INSERT INTO t SELECT 1",
        "SYSTEM STOP MERGES",
        "SELECT * FROM url('x')",
        "SET a = 1",
    ],
}
_JOINTS = [";", " ; ", ";\n", "; -- drop; '\n", "; /* ' ; */ ", ";;"]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_one_mutating_statement_is_found_wherever_it_stands(data: st.DataObject) -> None:
    dialect = data.draw(st.sampled_from(sorted(READS)))
    plain = [sql for sql in READS[dialect] if ";" not in sql.rstrip(";") and "GO" not in sql and "--" not in sql]
    around = data.draw(st.lists(st.sampled_from(plain), min_size=0, max_size=5))
    at = data.draw(st.integers(0, len(around)))
    bodies = [*around[:at], data.draw(st.sampled_from(_STATEMENTS[dialect])), *around[at:]]
    joint = data.draw(st.sampled_from([*_JOINTS, "\nGO\n"] if dialect == "tsql" else _JOINTS))
    analysis = analyse(joint.join(sql.rstrip(";") for sql in bodies), dialect=dialect)
    assert analysis.mutates
    assert analysis.statements == len(bodies)
    assert [reason.split(":")[0] for reason in analysis.reasons] == [f"statement {at + 1}"]
    assert not around or not analyse(joint.join(sql.rstrip(";") for sql in around), dialect=dialect).mutates


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_t_sql_without_semicolons_hides_nothing(data: st.DataObject) -> None:
    around = data.draw(st.lists(st.sampled_from(["SELECT 1", "SELECT a FROM t", "SELECT 'x' AS b"]), max_size=3))
    at = data.draw(st.integers(0, len(around)))
    bad = data.draw(st.sampled_from(["EXEC p", "DROP TABLE t", "UPDATE t SET a = 1", "DELETE t", "INSERT t SELECT 1"]))
    glue = data.draw(st.sampled_from([" ", "\n", "\t", "/* */"]))
    assert analyse(glue.join([*around[:at], bad, *around[at:]]), dialect="tsql").mutates


@given(text=st.text(max_size=200), dialect=st.sampled_from(sorted(READS)))
@settings(max_examples=300, deadline=None)
def test_any_text_gets_an_answer(text: str, dialect: str) -> None:
    try:
        analysis = analyse(text, dialect=dialect)
    except DponeError as error:
        if error.code != "DPONE_SQL_EMPTY":
            raise
    else:
        assert analysis.statements >= 1
        assert analysis.mutates == bool(analysis.reasons)
