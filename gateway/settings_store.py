"""The settings of what is kept: the database, how long, how much of it waits or stays in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gateway.settings_sections import MIB, SealingKey, Seconds, Section, decoded

MEMORY = "memory"


class StoreSettings(Section):
    """Stored responses (`store: true`), conversations and the usage ledger."""

    url: str | None = Field(
        default=None,
        max_length=2048,
        repr=False,
        description="Database: `sqlite:////absolute/file.db`, `postgresql://USER:PASSWORD@HOST/DATABASE`, or `memory` "
        "to keep nothing beyond a restart. None is a SQLite file in the state folder where Limpet starts its own Ray, "
        "and memory on a cluster, whose nodes share no file: give a cluster PostgreSQL.",
    )
    durable: bool = Field(
        default=True,
        description="Survive a power cut, not only a crash: SQLite's synchronous FULL, PostgreSQL's synchronous "
        "commit. On: writes are behind the answer, so they cost no client time.",
    )
    ttl_days: Annotated[float, Field(gt=0, le=36_500)] | None = Field(
        default=30.0, description="Days a response is kept. 30, as OpenAI does; null: until it is deleted."
    )
    encryption_keys: tuple[SealingKey, ...] = Field(
        default=(),
        repr=False,
        description="Keys that encrypt stored content at rest, each 32 bytes in base64: `openssl rand -base64 32`. The "
        "first encrypts, all decrypt, so a key is replaced by putting a new one first. None by default: the disk's own "
        "encryption is the usual place.",
    )
    encryption_keys_file: Path | None = Field(
        default=None,
        description="File with one such key a line (`#` starts a comment), added to encryption_keys. None by default.",
    )
    audit: bool = Field(
        default=False,
        description="Log each line of the usage ledger as JSON too (logger limpet.audit). Off: the ledger has it.",
    )
    deadline_s: Seconds = Field(
        default=10.0, description="Longest call of the database, seconds; a write is then tried again. 10 s."
    )
    connections: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="Connections of one session actor to PostgreSQL. 8: calls take a millisecond.",
    )
    room_deadline_s: Seconds = Field(
        default=10.0,
        description="How long a turn waits while as much as may be waits to be written, seconds; then it is refused "
        "with 429 and retry advice. 10 s: a database that restarts is back by then.",
    )
    waiting_jobs: int = Field(
        default=20_000,
        ge=16,
        description="Writes of one session actor that may wait for the database; beyond it turns wait. 20,000 is a "
        "minute without a database at 150 turns a second.",
    )
    waiting_bytes: int = Field(default=256 * MIB, ge=MIB, description="About how many bytes these may hold. 256 MiB.")
    memory_responses: int = Field(
        default=10_000,
        ge=1,
        description="Stored responses one session actor keeps in memory; the least recently used leave it for the "
        "database. 10,000.",
    )
    memory_bytes: int = Field(
        default=256 * MIB, ge=MIB, description="About how many bytes these may hold, contexts shared. 256 MiB."
    )

    def keys(self) -> list[bytes]:
        """The encryption keys, those of the file included: `load_settings` has read it."""
        return decoded(self.encryption_keys)

    @property
    def kind(self) -> Literal["default", "memory", "sqlite", "postgresql", "other"]:
        """What the URL names."""
        if self.url is None:
            return "default"
        if self.url == MEMORY:
            return "memory"
        scheme = self.url.partition(":")[0].partition("+")[0]
        return {"sqlite": "sqlite", "postgresql": "postgresql", "postgres": "postgresql"}.get(scheme, "other")  # type: ignore[return-value]
