"""One Ray cluster for all tests that need one: real Serve, HAProxy, two engines, started once."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from gateway.local_cluster import free_port
from gateway.model_choice import run_told
from gateway.progress import Progress
from gateway.settings import Settings
from tests.support.cluster import Cluster

SMALL = "smollm2-135m"
SCRIPTED = "scripted"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    checkpoint = run_told([sys.executable, "-m", "inference.checkpoint"], Progress(sys.stderr.write))
    settings = Settings.model_validate(
        {
            "server": {"port": free_port(), "request_max_bytes": 1 << 20},
            "models": [
                {"name": SMALL, "path": checkpoint, "vllm": {"device": "cpu"}},
                {"name": SCRIPTED, "engine": "scripted"},
            ],
            "scripted": {"tokens_per_second": 200},
            "sessions": {
                "min_replicas": 2,
                "max_replicas": 3,
                "target_sockets_per_replica": 8,
                "upscale_delay_s": 1,
            },
            "limits": {"queued_bytes": 1 << 20, "drain_grace_s": 3},
            "ray": {"min_draining_s": 5},
        }
    )
    with Cluster(settings) as running:
        yield running
