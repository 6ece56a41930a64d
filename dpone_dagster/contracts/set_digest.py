"""The digest of a set of rows: order-free, multiplicity kept, additive, so that it streams and never grows.

Row encoding ``dpone_row_v1``: for each column in contract order, ``<n>:<text>`` where ``text`` is the
value's canonical text and ``n`` the number of its UTF-8 bytes in decimal, or ``~`` for NULL. No two rows
encode alike: a field starts with a digit or with ``~``, and the length says where it ends. Canonical texts:
integers in decimal; bit ``0``/``1``; decimals at full scale (``-0.50``); dates ``YYYY-MM-DD``; datetime2(6)
``YYYY-MM-DDTHH:MM:SS.ffffff``; uniqueidentifier lower-case with dashes; strings as they are, char(n)
without its trailing blanks. A row's digest is SHA-256 of the encoding's UTF-8 bytes, cut into four
big-endian unsigned 64-bit lanes; a set's digest is its row count and the sum of each lane modulo 2**64.

It is sound against accidents, not against somebody who picks rows to collide.
"""

from dataclasses import dataclass

from dpone_dagster.contracts.canonical import sha256_of

LANE_MODULUS = 2**64


@dataclass(frozen=True)
class SetDigest:
    """Row count and four lane sums, each an int in ``[0, 2**64)``."""

    rows: int
    lanes: tuple[int, int, int, int]

    def __add__(self, other: "SetDigest") -> "SetDigest":
        a, b, c, d = ((x + y) % LANE_MODULUS for x, y in zip(self.lanes, other.lanes, strict=True))
        return SetDigest(self.rows + other.rows, (a, b, c, d))

    @property
    def sha256(self) -> str:
        """``sha256:..`` over the canonical JSON of count and lanes; lanes as decimal strings (64 bits)."""
        return sha256_of(
            {
                "schema": "dpone.scope-set-digest.v1",
                "row_encoding": "dpone_row_v1",
                "rows": self.rows,
                "lanes": [str(lane) for lane in self.lanes],
            }
        )


EMPTY = SetDigest(0, (0, 0, 0, 0))
