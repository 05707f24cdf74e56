"""Names under which Serve knows our parts."""

from __future__ import annotations

APPLICATION = "limpet"
SESSION_DEPLOYMENT = "session"
