"""What the IO managers need of the runtime; ``resources.runtime.Runtime`` has it."""

from typing import Protocol

from dpone_dagster.contracts.mart import MartSpec
from dpone_dagster.journal.port import JournalPort
from dpone_dagster.ports import AnalyticsPort, ArtifactStorePort


class MartRuntime(Protocol):
    """The journal, the artifacts, the declared marts and ClickHouse."""

    @property
    def journal(self) -> JournalPort:
        """The authority on what was published."""

    @property
    def artifacts(self) -> ArtifactStorePort:
        """Where sealed artifacts lie."""

    def mart(self, name: str) -> MartSpec:
        """A declared mart by name; DPONE_MART_UNKNOWN for any other name."""

    def analytics(self, prefix: str) -> AnalyticsPort:
        """ClickHouse, with query ids that start with ``prefix``."""
