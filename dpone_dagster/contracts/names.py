"""Names derived from identities: scratch relations, sessions, queries; short enough for every engine."""

from dpone_dagster.errors import DponeError

POSTGRES_LIMIT = 63  # longer names are cut without an error, so two could become one
CLICKHOUSE_LIMIT = 150  # a table name becomes a file name with suffixes; file names end at 255 bytes


def short_id(digest: str) -> str:
    """Return the 16 hex digits that stand for a digest in names; the journal keeps the full one."""
    return digest.removeprefix("sha256:")[:16]


def stage_name(table: str, operation_id: str) -> str:
    """Name of the ClickHouse staging table of an operation."""
    return _fit(f"{table}__dpone_stage__{short_id(operation_id)}", CLICKHOUSE_LIMIT)


def shadow_name(table: str, operation_id: str, epoch: int) -> str:
    """Name of the shadow; the epoch makes a late EXCHANGE from an overtaken worker miss."""
    return _fit(f"{table}__dpone_shadow__{short_id(operation_id)}_{epoch}", CLICKHOUSE_LIMIT)


def predecessor_name(table: str, uuid: str) -> str:
    """Name under which a replaced generation is kept."""
    return _fit(f"{table}__dpone_prev__{uuid.replace('-', '')}", CLICKHOUSE_LIMIT)


def image_name(operation_id: str, side: str) -> str:
    """Name of the before or after image in the image schema."""
    return _fit(f"op_{short_id(operation_id)}_{side}", POSTGRES_LIMIT)


def query_prefix(operation_id: str) -> str:
    """What every ClickHouse query id of an operation starts with."""
    return f"dpone-{short_id(operation_id)}-"


def session_tag(worker_id: str) -> str:
    """``application_name`` / ``program_name`` of every SQL session of one worker (a UUID)."""
    return _fit(f"dpone-{worker_id}", POSTGRES_LIMIT)


def _fit(name: str, limit: int) -> str:
    if len(name.encode()) > limit:
        raise DponeError("DPONE_NAME_TOO_LONG", f"A derived name has {len(name.encode())} bytes of {limit}.")
    return name
