{#
  `dpone_scope_merge` in T-SQL, beside the PostgreSQL one and in the same order. IT HAS NOT RUN ON SQL SERVER:
  until the SQL Server profile ships, the strategy refuses before it sends anything. The text keeps to what both
  SQL Server 2019 and the public TDS server that was tried accept: no MERGE, no UPDATE through a CTE, application
  lock before the guard, no error swallowed.

  Where it differs from PostgreSQL: rows are compared by the bytes of their `dpone_row_v1` text (`op.row_text_sql`),
  because a collation calls 'a' and 'A ' equal; a fault travels as THROW 51001 with the same one-line message.
#}

{% macro sqlserver__dpone_scope_merge(arg_dict) %}
  {{ exceptions.raise_compiler_error('DPONE_PROFILE_UNAVAILABLE field=sqlserver') }}
{% endmacro %}


{% macro sqlserver__dpone_scope_merge_sql(op, mart, temp, starts, ends, lock_milliseconds) %}
{%- set event = '[' ~ op.event_time ~ ']' -%}
{%- set within = '(' ~ event ~ ' >= ' ~ starts ~ ' AND ' ~ event ~ ' < ' ~ ends ~ ')' -%}
{%- set columns = '[' ~ op.columns | join('], [') ~ ']' -%}
{%- set keys = '[' ~ op.key | join('], [') ~ ']' -%}
{%- set values = op.columns | reject('in', op.key) | list -%}
SET NOCOUNT ON;
SET XACT_ABORT ON;
DECLARE @fault nvarchar(400), @n bigint, @lock int;
DECLARE @epoch bigint, @worker nvarchar(64), @operation nvarchar(71), @plan nvarchar(71), @state nvarchar(24);
DECLARE @operation_epoch bigint, @operation_worker nvarchar(64), @ddl_epoch bigint;
DECLARE @source_rows bigint, @updated_rows bigint = 0, @inserted_rows bigint = 0;
DECLARE @now TABLE ([rows] bigint, l0 decimal(38,0), l1 decimal(38,0), l2 decimal(38,0), l3 decimal(38,0));
DECLARE @before TABLE ([rows] bigint, l0 decimal(38,0), l1 decimal(38,0), l2 decimal(38,0), l3 decimal(38,0));
DECLARE @after TABLE ([rows] bigint, l0 decimal(38,0), l1 decimal(38,0), l2 decimal(38,0), l3 decimal(38,0));

-- 1. The adapter's own transaction.
IF @@TRANCOUNT <> 1 OR XACT_STATE() <> 1 {{ dpone_platform.sqlserver__dpone_refuse('DPONE_TRANSACTION_MISSING') }}

-- 2. The mutation lock of the mart, the shared DDL freeze with its epoch, and the mart against other writers.
EXEC @lock = sp_getapplock @Resource = N'mutation:{{ op.guard }}', @LockMode = 'Exclusive',
  @LockOwner = 'Transaction', @LockTimeout = {{ lock_milliseconds }};
IF @lock < 0 {{ dpone_platform.sqlserver__dpone_refuse('DPONE_MART_LOCKED') }}
EXEC @lock = sp_getapplock @Resource = N'ddl-freeze:{{ op.guard }}', @LockMode = 'Shared',
  @LockOwner = 'Transaction', @LockTimeout = {{ lock_milliseconds }};
IF @lock < 0 {{ dpone_platform.sqlserver__dpone_refuse('DPONE_MART_LOCKED') }}
SELECT @ddl_epoch = epoch FROM dpone_control.ddl_freeze WHERE resource_id = N'{{ op.guard }}';
IF @ddl_epoch IS NULL OR @ddl_epoch <> {{ op.ddl_epoch }} {{ dpone_platform.sqlserver__dpone_refuse('DPONE_FENCED') }}
SELECT @n = COUNT_BIG(*) FROM {{ mart }} WITH (TABLOCKX, HOLDLOCK) WHERE 1 = 0;

-- 3. The fence, compared under its lock.
SELECT @epoch = epoch, @worker = worker_id, @operation = operation_id
FROM dpone_control.resource_guard WITH (UPDLOCK, HOLDLOCK) WHERE resource_id = N'{{ op.guard }}';
SELECT @plan = operation_plan_sha256, @state = state, @operation_epoch = fencing_epoch, @operation_worker = worker_id
FROM dpone_control.operation WHERE operation_id = @operation;
IF @plan IS NULL OR @epoch <> {{ op.epoch }} OR @operation_epoch <> {{ op.epoch }}
  OR @worker <> N'{{ op.worker_id }}' OR @operation_worker <> N'{{ op.worker_id }}'
  OR @operation <> N'{{ op.operation_id }}' OR @plan <> N'{{ op.operation_plan_sha256 }}' OR @state <> N'PREPARING'
  {{ dpone_platform.sqlserver__dpone_refuse('DPONE_FENCED') }}

-- 4. An exact receipt means that this very operation has mutated already: there is no second mutation.
IF EXISTS (SELECT 1 FROM dpone_control.model_receipt WHERE operation_id = N'{{ op.operation_id }}')
BEGIN
  INSERT INTO @now {{ op.scope_digest_sql }};
  IF NOT EXISTS (
    SELECT 1 FROM dpone_control.model_receipt AS r JOIN @now AS d ON {{ dpone_platform.sqlserver__dpone_same('r.after_') }}
    WHERE r.operation_id = N'{{ op.operation_id }}' AND r.operation_plan_sha256 = N'{{ op.operation_plan_sha256 }}'
  ) {{ dpone_platform.sqlserver__dpone_refuse('DPONE_MUTATION_DIVERGED', 'receipt') }}
  RETURN;
END
{% if op.restore %}
-- 4b. RESTORE_THEN_REBUILD; the only place that deletes.
IF OBJECT_ID(N'{{ op.restore.before_image }}') IS NULL
  {{ dpone_platform.sqlserver__dpone_refuse('DPONE_RESTORE_DIVERGED', 'before_image') }}
INSERT INTO @now {{ op.scope_digest_sql }};
IF NOT EXISTS (
  SELECT 1 FROM dpone_control.model_receipt AS r JOIN @now AS d ON {{ dpone_platform.sqlserver__dpone_same('r.after_') }}
  WHERE r.operation_id = N'{{ op.restore.operation_id }}'
) {{ dpone_platform.sqlserver__dpone_refuse('DPONE_RESTORE_DIVERGED', 'scope') }}
DELETE FROM {{ mart }} WHERE {{ within }};
INSERT INTO {{ mart }} ({{ columns }}) SELECT {{ columns }} FROM {{ op.restore.before_image }};
DELETE FROM @now;
INSERT INTO @now {{ op.scope_digest_sql }};
IF NOT EXISTS (
  SELECT 1 FROM dpone_control.model_receipt AS r JOIN @now AS d ON {{ dpone_platform.sqlserver__dpone_same('r.before_') }}
  WHERE r.operation_id = N'{{ op.restore.operation_id }}'
) {{ dpone_platform.sqlserver__dpone_refuse('DPONE_RESTORE_DIVERGED', 'restored_scope') }}
{% endif %}
-- 5. The whole scope as it was.
IF OBJECT_ID(N'{{ op.before_image }}') IS NOT NULL OR OBJECT_ID(N'{{ op.after_image }}') IS NOT NULL
  {{ dpone_platform.sqlserver__dpone_refuse('DPONE_IMAGE_CONFLICT') }}
SELECT {{ columns }} INTO {{ op.before_image }} FROM {{ mart }} WHERE {{ within }};
INSERT INTO @before {{ op.before_digest_sql }};

-- 6. The model's rows of this scope, and their gates and the target's.
{%- if op.bounded %}
SELECT @n = COUNT_BIG(*) FROM {{ temp }} WHERE NOT {{ within }} AND NOT {{ op.event_time_violation_sql }};
IF @n > 0
BEGIN
  SET @fault = CONCAT(N'DPONE_EVENT_TIME_OUTSIDE_SCOPE field={{ op.event_time }} rows=', @n, N' side=source');
  THROW 51001, @fault, 1;
END
{%- endif %}
{{ dpone_platform.sqlserver__dpone_gates(op, temp, within, keys, 'source') }}
{{ dpone_platform.sqlserver__dpone_gates(op, mart, within, keys, 'target') }}
SELECT @source_rows = COUNT_BIG(*) FROM {{ temp }} WHERE {{ within }};

-- 7. UPDATE what differs, INSERT what is missing. Rows that the model no longer yields stay.
{%- if values %}
UPDATE t
SET {% for name in values %}[{{ name }}] = s.[{{ name }}]{{ ', ' if not loop.last }}{% endfor %}
FROM {{ mart }} AS t
JOIN (SELECT {{ columns }}, {{ op.row_text_sql }} AS dpone_text FROM {{ temp }} WHERE {{ within }}) AS s
  ON {% for name in op.key %}t.[{{ name }}] = s.[{{ name }}]{{ ' AND ' if not loop.last }}{% endfor %}
JOIN (SELECT {{ keys }}, {{ op.row_text_sql }} AS dpone_text FROM {{ mart }} WHERE {{ within }}) AS o
  ON {% for name in op.key %}o.[{{ name }}] = s.[{{ name }}]{{ ' AND ' if not loop.last }}{% endfor %}
WHERE CONVERT(varbinary(max), o.dpone_text) <> CONVERT(varbinary(max), s.dpone_text);
SET @updated_rows = ROWCOUNT_BIG();
{%- endif %}
INSERT INTO {{ mart }} ({{ columns }})
SELECT {{ columns }} FROM {{ temp }} AS s
WHERE {{ within }} AND NOT EXISTS (
  SELECT 1 FROM {{ mart }} AS t
  WHERE {% for name in op.key %}t.[{{ name }}] = s.[{{ name }}]{{ ' AND ' if not loop.last }}{% endfor %}
);
SET @inserted_rows = ROWCOUNT_BIG();

-- 8. The target again, and every row that the model yielded is in it, byte by byte.
{{ dpone_platform.sqlserver__dpone_gates(op, mart, within, keys, 'target') }}
SELECT @n = COUNT_BIG(*)
FROM (SELECT {{ keys }}, {{ op.row_text_sql }} AS dpone_text FROM {{ temp }} WHERE {{ within }}) AS s
LEFT JOIN (SELECT {{ keys }}, {{ op.row_text_sql }} AS dpone_text FROM {{ mart }} WHERE {{ within }}) AS t
  ON {% for name in op.key %}t.[{{ name }}] = s.[{{ name }}]{{ ' AND ' if not loop.last }}{% endfor %}
WHERE t.dpone_text IS NULL OR CONVERT(varbinary(max), t.dpone_text) <> CONVERT(varbinary(max), s.dpone_text);
IF @n > 0
BEGIN
  SET @fault = CONCAT(N'DPONE_MUTATION_DIVERGED rows=', @n);
  THROW 51001, @fault, 1;
END

-- 9. The whole scope as it is, and the receipt that proves it. The adapter's COMMIT makes both true at once.
SELECT {{ columns }} INTO {{ op.after_image }} FROM {{ mart }} WHERE {{ within }};
INSERT INTO @after {{ op.after_digest_sql }};
INSERT INTO dpone_control.model_receipt (
  operation_id, operation_plan_sha256, workflow_execution_id, fencing_epoch, worker_id,
  before_schema, before_name, before_rows, before_l0, before_l1, before_l2, before_l3,
  after_schema, after_name, after_rows, after_l0, after_l1, after_l2, after_l3,
  updated_rows, inserted_rows, source_rows, created_at
)
SELECT
  N'{{ op.operation_id }}', N'{{ op.operation_plan_sha256 }}',
  N'{{ op.workflow_execution_id | replace("'", "''") }}', {{ op.epoch }}, N'{{ op.worker_id }}',
  N'{{ op.image_schema }}', N'{{ op.before_name }}', b.[rows], b.l0, b.l1, b.l2, b.l3,
  N'{{ op.image_schema }}', N'{{ op.after_name }}', a.[rows], a.l0, a.l1, a.l2, a.l3,
  @updated_rows, @inserted_rows, @source_rows, SYSUTCDATETIME()
FROM @before AS b CROSS JOIN @after AS a;
{% endmacro %}


{% macro sqlserver__dpone_gates(op, relation, within, keys, side) %}
{%- for gate in op.gates %}
SELECT @n = COUNT_BIG(*) FROM {{ relation }}
WHERE {{ within ~ ' AND ' if not (gate.field == op.event_time and side == 'source') }}({{ gate.violation }});
IF @n > 0
BEGIN
  SET @fault = CONCAT(N'{{ gate.code }} field={{ gate.field }} rows=', @n, N' side={{ side }}');
  THROW 51001, @fault, 1;
END
{%- endfor %}
SELECT @n = COUNT_BIG(*) FROM (
  SELECT {{ keys }} FROM {{ relation }} WHERE {{ within }} GROUP BY {{ keys }} HAVING COUNT_BIG(*) > 1
) AS duplicate;
IF @n > 0
BEGIN
  SET @fault = CONCAT(N'DPONE_KEY_DUPLICATE rows=', @n, N' side={{ side }}');
  THROW 51001, @fault, 1;
END
{%- endmacro %}


{% macro sqlserver__dpone_same(prefix) -%}
  {% for part in ['rows', 'l0', 'l1', 'l2', 'l3'] %}{{ prefix }}{{ part }} = d.[{{ part }}]
  {{- ' AND ' if not loop.last }}{% endfor %}
{%- endmacro %}


{% macro sqlserver__dpone_refuse(code, field=none) -%}
  BEGIN ;THROW 51001, N'{{ code }}{{ " field=" ~ field if field }}', 1; END;
{%- endmacro %}
