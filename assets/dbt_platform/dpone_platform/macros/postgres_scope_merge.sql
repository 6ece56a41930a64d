{#
  `dpone_scope_merge` on PostgreSQL, the stand-in for SQL Server: one DO block inside the adapter's transaction.

  The order is spec R's, "SQL Server scope mutation". The block never begins, commits, merges or retries, and it
  deletes only in the restore branch. Every refusal is a stable code with names and counts (ERRCODE DP001, one
  line, no row values); an exception rolls the whole transaction back, so a refusal leaves neither image nor receipt.

  `op` comes from resources/dbt_builder.py: names, the fence, and the SQL of the set digest and the domain
  checks, whose one definition is resources/postgres/dialect.py.
#}

{% macro postgres__dpone_scope_merge(arg_dict) %}
{%- set op = dpone_platform.dpone_operation() -%}
{%- set mart = arg_dict.target_relation -%}
{%- set temp = arg_dict.temp_relation -%}
{%- set event = adapter.quote(op.event_time) -%}
{%- set starts = dpone_platform.dpone_scope_bound('start') -%}
{%- set ends = dpone_platform.dpone_scope_bound('end') -%}
{%- set within = '(' ~ event ~ ' >= ' ~ starts ~ ' and ' ~ event ~ ' < ' ~ ends ~ ')' -%}
{%- set columns = [] -%}{%- for name in op.columns -%}{%- do columns.append(adapter.quote(name)) -%}{%- endfor -%}
{%- set keys = [] -%}{%- for name in op.key -%}{%- do keys.append(adapter.quote(name)) -%}{%- endfor -%}
{%- set values = columns | reject('in', keys) | list -%}
{%- set all_columns = columns | join(', ') -%}
do $dpone$
declare
  dpone_fault text;
  dpone_guard record;
  dpone_known record;
  dpone_failed record;
  dpone_now_is record;
  dpone_before record;
  dpone_after record;
  dpone_source_rows bigint;
  dpone_updated_rows bigint := 0;
  dpone_inserted_rows bigint := 0;
begin
  -- Waits end; a full table of values never meets an estimate of none with a nested loop.
  perform set_config('lock_timeout', '{{ var("dpone").lock_seconds }}s', true);
  perform set_config('enable_nestloop', 'off', true);

  -- 1. The adapter's own transaction made the temporary table: nobody committed or began in between.
  if not exists (
    select from pg_catalog.pg_class
    where oid = '{{ temp }}'::regclass and xmin = pg_current_xact_id()::xid
  ) then
    {{ dpone_platform.postgres__dpone_refuse('DPONE_TRANSACTION_MISSING') }}
  end if;

  -- 2. The mutation lock of the mart, and the mart against every other writer and all DDL.
  begin
    perform pg_advisory_xact_lock({{ op.lock_key }});
    lock table {{ mart }} in share row exclusive mode;
    perform from dpone_control.resource_guard where resource_id = '{{ op.guard }}' for update;
  exception when lock_not_available then
    {{ dpone_platform.postgres__dpone_refuse('DPONE_MART_LOCKED') }}
  end;
  analyze {{ temp }};

  -- 3. The fence, compared under its lock.
  select g.epoch, g.worker_id, g.operation_id, o.operation_plan_sha256, o.state, o.fencing_epoch,
         o.worker_id as operation_worker
  into dpone_guard
  from dpone_control.resource_guard as g
  inner join dpone_control.operation as o on o.operation_id = g.operation_id
  where g.resource_id = '{{ op.guard }}';
  if not found
    or dpone_guard.epoch <> {{ op.epoch }} or dpone_guard.fencing_epoch <> {{ op.epoch }}
    or dpone_guard.worker_id <> '{{ op.worker_id }}' or dpone_guard.operation_worker <> '{{ op.worker_id }}'
    or dpone_guard.operation_id <> '{{ op.operation_id }}'
    or dpone_guard.operation_plan_sha256 <> '{{ op.operation_plan_sha256 }}'
    or dpone_guard.state <> 'PREPARING'
  then
    {{ dpone_platform.postgres__dpone_refuse('DPONE_FENCED') }}
  end if;

  -- 4. An exact receipt means that this very operation has mutated already: there is no second mutation.
  select * into dpone_known from dpone_control.model_receipt where operation_id = '{{ op.operation_id }}';
  if found then
    select * into dpone_now_is from ({{ op.scope_digest_sql }}) as d (rows, l0, l1, l2, l3);
    if dpone_known.operation_plan_sha256 <> '{{ op.operation_plan_sha256 }}' then
      {{ dpone_platform.postgres__dpone_refuse('DPONE_JOURNAL_CORRUPT', 'operation_plan_sha256') }}
    end if;
    if {{ dpone_platform.postgres__dpone_set('dpone_now_is') }}
      <> {{ dpone_platform.postgres__dpone_set('dpone_known', 'after_') }}
    then
      {{ dpone_platform.postgres__dpone_refuse('DPONE_MUTATION_DIVERGED', 'receipt') }}
    end if;
    return;
  end if;
{% if op.restore %}
  -- 4b. RESTORE_THEN_REBUILD: the day is exactly what the failed operation left, and goes back to exactly what
  -- it found. The only place that deletes.
  select * into dpone_failed from dpone_control.model_receipt where operation_id = '{{ op.restore.operation_id }}';
  if not found or to_regclass('{{ op.restore.before_image }}') is null then
    {{ dpone_platform.postgres__dpone_refuse('DPONE_RESTORE_DIVERGED', 'before_image') }}
  end if;
  select * into dpone_now_is from ({{ op.scope_digest_sql }}) as d (rows, l0, l1, l2, l3);
  if {{ dpone_platform.postgres__dpone_set('dpone_now_is') }}
    <> {{ dpone_platform.postgres__dpone_set('dpone_failed', 'after_') }}
  then
    {{ dpone_platform.postgres__dpone_refuse('DPONE_RESTORE_DIVERGED', 'scope') }}
  end if;
  delete from {{ mart }} where {{ within }};
  insert into {{ mart }} ({{ all_columns }}) select {{ all_columns }} from {{ op.restore.before_image }};
  select * into dpone_now_is from ({{ op.scope_digest_sql }}) as d (rows, l0, l1, l2, l3);
  if {{ dpone_platform.postgres__dpone_set('dpone_now_is') }}
    <> {{ dpone_platform.postgres__dpone_set('dpone_failed', 'before_') }}
  then
    {{ dpone_platform.postgres__dpone_refuse('DPONE_RESTORE_DIVERGED', 'restored_scope') }}
  end if;
{% endif %}
  -- 5. The whole scope as it was.
  if to_regclass('{{ op.before_image }}') is not null or to_regclass('{{ op.after_image }}') is not null then
    {{ dpone_platform.postgres__dpone_refuse('DPONE_IMAGE_CONFLICT') }}
  end if;
  create table {{ op.before_image }} as select {{ all_columns }} from {{ mart }} where {{ within }};
  select * into dpone_before from ({{ op.before_digest_sql }}) as d (rows, l0, l1, l2, l3);

  -- 6. The model's rows of this scope. An event time that is NULL or no date is in no scope, so it is looked
  -- for in all rows; a model that promised to bound its reading must not yield another day's.
{%- if op.bounded %}
  select format('DPONE_EVENT_TIME_OUTSIDE_SCOPE field={{ op.event_time }} rows=%s side=source', count(*)) into dpone_fault
  from {{ temp }} where not {{ within }} and not ({{ op.event_time_violation_sql }}) having count(*) > 0;
  {{ dpone_platform.postgres__dpone_refuse_fault() }}
{%- endif %}
  {{ dpone_platform.postgres__dpone_gates(op, temp, event, within, keys, 'source') }}
  {{ dpone_platform.postgres__dpone_gates(op, mart, event, within, keys, 'target') }}
  select count(*) into dpone_source_rows from {{ temp }} where {{ within }};

  -- 7. UPDATE what differs, INSERT what is missing. Rows that the model no longer yields stay.
{%- if values %}
  update {{ mart }} as t
  set {% for name in values %}{{ name }} = s.{{ name }}{{ ', ' if not loop.last }}{% endfor %}
  from (select {{ all_columns }} from {{ temp }} where {{ within }}) as s
  where {% for name in keys %}t.{{ name }} = s.{{ name }} and {% endfor %}
    t.{{ event }} >= {{ starts }} and t.{{ event }} < {{ ends }}
    and ({% for name in values %}t.{{ name }}{{ ', ' if not loop.last }}{% endfor %})
      is distinct from ({% for name in values %}s.{{ name }}{{ ', ' if not loop.last }}{% endfor %});
  get diagnostics dpone_updated_rows = row_count;
{%- endif %}
  insert into {{ mart }} ({{ all_columns }})
  select {{ all_columns }} from {{ temp }} as s
  where {{ within }} and not exists (
    select from (select {{ keys | join(', ') }} from {{ mart }} where {{ within }}) as t
    where {% for name in keys %}t.{{ name }} = s.{{ name }}{{ ' and ' if not loop.last }}{% endfor %}
  );
  get diagnostics dpone_inserted_rows = row_count;

  -- 8. The target again, and every row that the model yielded is in it, value by value.
  {{ dpone_platform.postgres__dpone_gates(op, mart, event, within, keys, 'target') }}
  select format('DPONE_MUTATION_DIVERGED rows=%s', count(*)) into dpone_fault
  from (
    select {{ all_columns }} from {{ temp }} where {{ within }}
    except all
    select {{ all_columns }} from {{ mart }} where {{ within }}
  ) as lost
  having count(*) > 0;
  {{ dpone_platform.postgres__dpone_refuse_fault() }}

  -- 9. The whole scope as it is, and the receipt that proves it. The adapter's COMMIT makes both true at once.
  create table {{ op.after_image }} as select {{ all_columns }} from {{ mart }} where {{ within }};
  select * into dpone_after from ({{ op.after_digest_sql }}) as d (rows, l0, l1, l2, l3);
  insert into dpone_control.model_receipt (
    operation_id, operation_plan_sha256, workflow_execution_id, fencing_epoch, worker_id,
    before_schema, before_name, before_rows, before_l0, before_l1, before_l2, before_l3,
    after_schema, after_name, after_rows, after_l0, after_l1, after_l2, after_l3,
    updated_rows, inserted_rows, source_rows, created_at
  ) values (
    '{{ op.operation_id }}', '{{ op.operation_plan_sha256 }}', '{{ op.workflow_execution_id | replace("'", "''") }}',
    {{ op.epoch }}, '{{ op.worker_id }}',
    '{{ op.image_schema }}', '{{ op.before_name }}', {{ dpone_platform.postgres__dpone_set('dpone_before', parens=false) }},
    '{{ op.image_schema }}', '{{ op.after_name }}', {{ dpone_platform.postgres__dpone_set('dpone_after', parens=false) }},
    dpone_updated_rows, dpone_inserted_rows, dpone_source_rows, clock_timestamp() at time zone 'utc'
  );
end
$dpone$
{% endmacro %}


{% macro postgres__dpone_gates(op, relation, event, within, keys, side) %}
{#- Nulls and domains of every column in one pass, then keys. The event time is looked at in all rows of the
    model, everything else within the scope. -#}
  select (array_remove(array[
  {%- for gate in op.gates %}
    {%- set rows = gate.violation if (gate.field == op.event_time and side == 'source')
        else within ~ ' and (' ~ gate.violation ~ ')' %}
    case when count(*) filter (where {{ rows }}) > 0 then
      format('{{ gate.code }} field={{ gate.field }} rows=%s side={{ side }}', count(*) filter (where {{ rows }})) end
    {{- ',' if not loop.last }}
  {%- endfor %}
  ], null))[1] into dpone_fault
  from {{ relation }}{{ ' where ' ~ within if side == 'target' }};
  {{ dpone_platform.postgres__dpone_refuse_fault() }}
  select format('DPONE_KEY_DUPLICATE rows=%s side={{ side }}', count(*)) into dpone_fault
  from (
    select from {{ relation }} where {{ within }} group by {{ keys | join(', ') }} having count(*) > 1
  ) as duplicate
  having count(*) > 0;
  {{ dpone_platform.postgres__dpone_refuse_fault() }}
{%- endmacro %}


{% macro postgres__dpone_set(record, prefix='', parens=true) -%}
{#- A set digest of a record, as five values to compare or to write. -#}
  {{ '(' if parens }}{% for part in ['rows', 'l0', 'l1', 'l2', 'l3'] %}{{ record }}.{{ prefix }}{{ part }}
  {{- ', ' if not loop.last }}{% endfor %}{{ ')' if parens }}
{%- endmacro %}


{% macro postgres__dpone_refuse_fault() -%}
  if dpone_fault is not null then raise exception using errcode = 'DP001', message = dpone_fault; end if;
{%- endmacro %}


{% macro postgres__dpone_refuse(code, field=none) -%}
  raise exception using errcode = 'DP001', message = '{{ code }}{{ " field=" ~ field if field }}';
{%- endmacro %}
