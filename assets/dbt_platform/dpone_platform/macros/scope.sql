{#
  What the runtime hands to one build, all of it in the one variable `dpone`: the scope, the deadlines, and for
  each model its operation. Without it (parse, compile, an author's own dbt) the scope bounds are placeholders
  that no engine can cast, so that the definition proof never contains a day and nothing runs by accident.
#}

{% macro dpone_scope_bound(end_of_scope) %}
  {%- set run = var('dpone', none) -%}
  {%- set text = run['scope_' ~ end_of_scope] if run else '__dpone_scope_' ~ end_of_scope ~ '__' -%}
  {{ return(adapter.dispatch('dpone_datetime', 'dpone_platform')(text)) }}
{% endmacro %}

{% macro postgres__dpone_datetime(text) %}{{ return("cast('" ~ text ~ "' as timestamp(6))") }}{% endmacro %}

{% macro sqlserver__dpone_datetime(text) %}{{ return("cast('" ~ text ~ "' as datetime2(6))") }}{% endmacro %}

{% macro dpone_operation() %}
  {%- set run = var('dpone', none) -%}
  {%- if not run or model.unique_id not in run.models -%}
    {{ exceptions.raise_compiler_error('DPONE_FENCED field=operation') }}
  {%- endif -%}
  {{ return(run.models[model.unique_id]) }}
{% endmacro %}

{% macro dpone_where_subquery(relation) %}
  {#- A generic test of a mart looks at the day that is published: its cost follows the day, and rows that an
      earlier day left behind do not fail this one. -#}
  {%- set run = var('dpone', none) -%}
  {%- set op = run.models.get(model.attached_node) if run else none -%}
  {%- if not op -%}{{ return(dbt.default__get_where_subquery(relation)) }}{%- endif -%}
  {%- set event = adapter.quote(op.event_time) -%}
  {%- set where = config.get('where') -%}
  {%- set scoped -%}
    (select * from {{ relation }} where {{ event }} >= {{ dpone_platform.dpone_scope_bound('start') }}
      and {{ event }} < {{ dpone_platform.dpone_scope_bound('end') }}{% if where %} and ({{ where }}){% endif %}) dbt_subquery
  {%- endset -%}
  {{ return(scoped) }}
{% endmacro %}

{% macro dpone_create_table_as_sql(temporary, relation, sql) %}
  {#- Only the existing-table incremental branch is reachable: nothing here ever creates or replaces a mart. -#}
  {%- if not temporary -%}
    {{ exceptions.raise_compiler_error('DPONE_MART_ABSENT field=' ~ model.name) }}
  {%- endif -%}
  {%- do dpone_platform.dpone_operation() -%}
  {{ return(adapter.dispatch('dpone_create_temp_sql', 'dpone_platform')(relation, sql)) }}
{% endmacro %}

{% macro postgres__dpone_create_temp_sql(relation, sql) %}
  set local statement_timeout = '{{ var("dpone").statement_seconds }}s';
  {{ create_table_as(True, relation, sql) }}
{% endmacro %}

{% macro sqlserver__dpone_create_temp_sql(relation, sql) %}
  {{ exceptions.raise_compiler_error('DPONE_PROFILE_UNAVAILABLE field=sqlserver') }}
{% endmacro %}

{% macro dpone_scope_merge(arg_dict) %}
  {{ return(adapter.dispatch('dpone_scope_merge', 'dpone_platform')(arg_dict)) }}
{% endmacro %}
