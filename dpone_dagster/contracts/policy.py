"""The platform's policy: every deadline and budget, in one closed document whose digest enters the plan."""

from typing import Annotated

from pydantic import Field

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.model import ClosedModel

Positive = Annotated[int, Field(gt=0)]


class Policy(ClosedModel):
    """Deadlines in seconds, sizes in rows or bytes, counts as they are."""

    lock_wait_seconds: Positive = 900
    statement_seconds: Positive = 3600
    quiet_seconds: Positive = 30
    chunk_rows: Positive = 250_000
    artifact_free_bytes: Positive = 256 * 1024 * 1024
    kept_predecessors: Annotated[int, Field(ge=1)] = 2

    @property
    def sha256(self) -> str:
        """Digest of the policy."""
        return sha256_of({"schema": "dpone.platform-policy.v1", **self.as_json()})
