"""Autoscaling of engines: on the turns they have in hand, which Serve cannot see (they travel on the token link)."""

from __future__ import annotations

import math
from typing import Any

TURNS_PER_REPLICA = 64.0
"""Turns running or waiting per replica that call for another one. Half of vLLM's usual 128 sequences: a replica that is
half full is still fast, and starting another takes minutes."""


def turns_per_replica(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's policy interface: wanted replicas and state. Bounds and delays are applied around it by Serve.

    At least one replica runs always (`models.replicas.min`): replicas count the turns, so none would count none."""
    reported = (context.aggregated_metrics or {}).get("turns", {})
    turns = sum(reported.values())
    wanted = math.ceil(turns / TURNS_PER_REPLICA)
    low = int(context.capacity_adjusted_min_replicas)
    high = int(context.capacity_adjusted_max_replicas)
    return max(low, min(high, wanted)), dict(context.policy_state or {})
