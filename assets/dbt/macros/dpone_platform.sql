{# The platform's names in this project's namespace. Nothing else belongs into this file. #}

{% macro get_incremental_dpone_scope_merge_sql(arg_dict) %}
  {{ return(dpone_platform.dpone_scope_merge(arg_dict)) }}
{% endmacro %}

{% macro get_create_table_as_sql(temporary, relation, sql) %}
  {{ return(dpone_platform.dpone_create_table_as_sql(temporary, relation, sql)) }}
{% endmacro %}

{% macro generate_schema_name(custom_schema_name, node) %}
  {{ return(custom_schema_name or target.schema) }}
{% endmacro %}

{% macro dpone_scope_start() %}{{ return(dpone_platform.dpone_scope_bound('start')) }}{% endmacro %}

{% macro dpone_scope_end() %}{{ return(dpone_platform.dpone_scope_bound('end')) }}{% endmacro %}

{% macro get_where_subquery(relation) %}{{ return(dpone_platform.dpone_where_subquery(relation)) }}{% endmacro %}
