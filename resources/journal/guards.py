"""The fence: guard rows, locked in sorted order, with an epoch that every admission and takeover raises."""

from collections.abc import Iterable
from datetime import UTC, datetime

import sqlalchemy as sa

from resources.journal import tables as t


def lock_guards(connection: sa.Connection, resources: Iterable[str]) -> dict[str, int]:
    """Lock guards in sorted order; a resource without a guard yet has epoch 0."""
    epochs = dict.fromkeys(sorted(set(resources)), 0)
    guard = t.resource_guard
    rows = connection.execute(
        sa.select(guard.c.resource_id, guard.c.epoch)
        .where(guard.c.resource_id.in_(list(epochs)))
        .order_by(guard.c.resource_id)
        .with_for_update()
        .with_hint(guard, "WITH (UPDLOCK, HOLDLOCK)", "mssql")
    )
    return epochs | {row.resource_id: row.epoch for row in rows}


def raise_guards(
    connection: sa.Connection, epochs: dict[str, int], worker_id: str, owners: dict[str, str]
) -> dict[str, int]:
    """Give locked guards the next epoch and a new owner, making the ones that do not exist yet."""
    guard = t.resource_guard
    for resource, epoch in epochs.items():
        values = {
            "epoch": epoch + 1,
            "worker_id": worker_id,
            "operation_id": owners.get(resource),
            "changed_at": datetime.now(UTC),
        }
        if epoch == 0:
            connection.execute(guard.insert().values(resource_id=resource, **values))
        else:
            connection.execute(guard.update().where(guard.c.resource_id == resource).values(**values))
    return {resource: epoch + 1 for resource, epoch in epochs.items()}
