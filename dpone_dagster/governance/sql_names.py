"""Names that ``sql_guard`` judges by: reserved words, and functions that are known to do nothing or to do something.

A test compares the PostgreSQL functions with the catalog of the engine: each is built in, and none is volatile in any
of its forms but for those in ``POSTGRES_PURE_VOLATILE``.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Unquoted, these are no names in T-SQL, so each begins a statement or a clause that does more than read: T-SQL needs
# no semicolon between statements. A column of that name is quoted.
TSQL_WORDS = _names("""
    add alter authorization backup begin break bulk checkpoint commit create dbcc deallocate declare delete deny disk
    drop dump exec execute exit goto grant identity_insert if insert into kill load merge opendatasource openquery
    openrowset print procedure proc raiserror reconfigure restore return revert revoke rollback save schema set setuser
    shutdown tablock tablockx tran transaction trigger truncate update updatetext updlock use waitfor while writetext
    xlock
""")
# PostgreSQL and ClickHouse let these be names. Here they are not: whoever has such a column quotes it.
POSTGRES_WORDS = _names("alter create delete drop grant insert into merge revoke truncate update")
CLICKHOUSE_WORDS = _names("alter create delete drop grant insert into outfile revoke update")

TRANSACTION_WORDS = _names("abort begin commit end prepare release rollback savepoint start")

POSTGRES_FUNCTIONS = _names("""
    abbrev abs acos acosd acosh age any_value area array_agg array_dims array_fill array_length array_lower array_ndims
    array_position array_positions array_remove array_replace array_to_json array_to_string array_upper ascii asin asind
    asinh atan atan2 atan2d atand atanh avg bit_and bit_count bit_length bit_or bit_xor bool_and bool_or btrim
    cardinality cbrt ceil ceiling char_length character_length chr col_description concat concat_ws convert convert_from
    convert_to corr cos cosd cosh cot cotd count covar_pop covar_samp cume_dist current_database current_schema
    current_schemas current_setting date_add date_bin date_part date_subtract date_trunc daterange decode degrees
    dense_rank div encode enum_first enum_last enum_range erf erfc every exp factorial first_value floor format
    format_type gcd generate_series generate_subscripts get_bit get_byte has_column_privilege has_schema_privilege
    has_table_privilege host hostmask initcap int4multirange int4range int8multirange int8range is_normalized isempty
    isfinite json_agg json_array_elements json_array_elements_text json_array_length json_build_array json_build_object
    json_each json_each_text json_object json_object_agg json_object_keys json_populate_record json_populate_recordset
    json_strip_nulls json_to_record json_to_recordset json_typeof jsonb_agg jsonb_array_elements
    jsonb_array_elements_text jsonb_array_length jsonb_build_array jsonb_build_object jsonb_each jsonb_each_text
    jsonb_insert jsonb_object jsonb_object_agg jsonb_object_keys jsonb_path_exists jsonb_path_match jsonb_path_query
    jsonb_path_query_array jsonb_path_query_first jsonb_populate_record jsonb_populate_recordset jsonb_pretty jsonb_set
    jsonb_set_lax jsonb_strip_nulls jsonb_to_record jsonb_to_recordset jsonb_typeof justify_days justify_hours
    justify_interval lag last_value lcm lead left length ln log log10 lower lower_inc lower_inf lpad ltrim make_date
    make_interval make_time make_timestamp make_timestamptz masklen max md5 min min_scale mod mode multirange netmask
    network now nth_value ntile num_nonnulls num_nulls nummultirange numrange obj_description octet_length percent_rank
    percentile_cont percentile_disc phraseto_tsquery pi plainto_tsquery pow power quote_ident quote_literal
    quote_nullable radians range_agg range_intersect_agg range_merge rank regexp_count regexp_instr regexp_like
    regexp_match regexp_matches regexp_replace regexp_split_to_array regexp_split_to_table regexp_substr regr_avgx
    regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy repeat replace reverse right round
    row_number row_to_json rpad rtrim scale set_bit set_byte setweight sha224 sha256 sha384 sha512 shobj_description
    sign sin sind sinh split_part sqrt statement_timestamp stddev stddev_pop stddev_samp string_agg string_to_array
    string_to_table strip strpos substr substring sum tan tand tanh timezone to_ascii to_char to_date to_hex to_json
    to_jsonb to_number to_regclass to_regnamespace to_regproc to_regtype to_timestamp to_tsquery to_tsvector
    transaction_timestamp translate trim_array trim_scale trunc ts_rank ts_rank_cd tsmultirange tsrange tstzmultirange
    tstzrange tsvector_to_array unistr unnest upper upper_inc upper_inf var_pop var_samp variance version
    websearch_to_tsquery width_bucket xml_is_well_formed xmlagg xpath xpath_exists
""")
POSTGRES_PURE_VOLATILE = _names("clock_timestamp gen_random_uuid random random_normal timeofday uuidv4 uuidv7")
# What may stand before a parenthesis without being a function: reserved words, types, and functions with a syntax of
# their own. No function can have one of these names unquoted.
POSTGRES_SYNTAX = _names("""
    all and any array as between bigint bit case cast char character coalesce current_time current_timestamp decimal
    distinct else except exists extract float from greatest group grouping having in intersect interval json_exists
    json_query json_value lateral least limit localtime localtimestamp normalize not nullif numeric offset on or order
    overlay position row select some substring then time timestamp timestamptz timetz to trim union using values varbit
    varchar when where with xmlconcat xmlelement xmlexists xmlforest xmlserialize
""")
# Words that a function may be called by too, so what stands before them decides.
POSTGRES_SYNTAX_AFTER = {
    "by": _names("group order partition"),
    "cube": _names("by"),
    "filter": _names(")"),
    "materialized": _names("as not"),
    "over": _names(")"),
    "rollup": _names("by"),
    "sets": _names("grouping"),
    "varying": _names("bit character char"),
}
# Infix words: syntax after an operand, a call of a function where an operand begins.
POSTGRES_INFIX = _names("ilike join like")
POSTGRES_OPERAND_BEGINS = _names("""
    all and any array as between both by case distinct else except from group having in intersect lateral leading like
    limit not offset on or order returning row select some then to trailing union using values when where with
""")

TSQL_FUNCTIONS = _names("""
    app_name approx_count_distinct ascii atn2 binary_checksum bit_count char checksum checksum_agg choose col_length
    col_name columnproperty compress cume_dist current_timezone current_timezone_id databasepropertyex datalength
    date_bucket datefromparts datename datepart datetime2fromparts datetimefromparts datetimeoffsetfromparts db_id
    db_name decompress difference eomonth error_number format formatmessage generate_series get_bit getutcdate
    grouping_id has_perms_by_name hashbytes host_name ident_current index_col indexproperty isdate isjson isnumeric
    json_array json_modify json_object json_path_exists left_shift len nchar newid newsequentialid object_definition
    object_id object_name object_schema_name objectproperty objectpropertyex openjson original_db_name parse parsename
    patindex percentile_cont percentile_disc quotename replicate right_shift rowcount_big schema_id schema_name
    scope_identity serverproperty set_bit smalldatetimefromparts soundex space square stats_date stdevp str
    string_escape string_split suser_name suser_sname switchoffset sysdatetime sysdatetimeoffset sysutcdatetime textptr
    timefromparts todatetimeoffset translate trim try_convert try_parse type_id type_name typeproperty unicode user_name
    var varp xact_state
""")

# Commands that may be named when they are refused.
COMMANDS = _names("""
    ATTACH BACKUP CALL CHECKPOINT CLUSTER COMMENT DENY DETACH DISCARD DO EXCHANGE EXECUTE EXPLAIN GRANT KILL LISTEN LOAD
    LOCK NOTIFY OPTIMIZE PREPARE REASSIGN REFRESH REINDEX RENAME REPLACE RESTORE REVOKE SECURITY SHOW SYSTEM UNDROP
    VACUUM
""")

# Functions of ClickHouse that write, wait, log, or reach out of the server; all others without a table are pure.
CLICKHOUSE_EFFECTS = _names("""
    aiclassify aiembed aiextract aigenerate aigeneratecontent aigeneratesql aitranslate arrowflight azureblobstorage
    azureblobstoragecluster catboostevaluate cluster clusterallreplicas cosn deltalake deltalakeazure deltalakecluster
    deltalakelocal deltalakes3 executable file filecluster flushlogs fuzzjson fuzzquery gcs generateserialid
    generatesnowflakeid hdfs hdfscluster hudi hudicluster iceberg icebergazure icebergcluster iceberghdfs iceberglocal
    icebergs3 input jdbc kafka logtrace mongodb mysql nats odbc oss paimon paimonazure paimoncluster paimonhdfs
    paimonlocal paimons3 postgresql prometheusquery prometheusqueryrange rabbitmq redis remote remotesecure s3 s3cluster
    sleep sleepeachrow sqlite timeseriesdata timeseriesmetrics timeseriestags url urlcluster ytsaurus
""")
CLICKHOUSE_TABLES = _names("""
    dictionary format generate_series generaterandom generateseries merge mergetreeindex mergetreeparts
    mergetreeprojection null numbers numbers_mt primes values view zeros zeros_mt
""")
