"""The durable store: stored responses, conversations and the usage ledger in SQLite or PostgreSQL."""
