"""The publication adapter for ClickHouse: physical design, shadow, proof, exchange."""

from resources.clickhouse.publisher import ClickHousePublisher

__all__ = ["ClickHousePublisher"]
