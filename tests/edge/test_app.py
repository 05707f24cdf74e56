"""The same settings make the same application, whoever builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gateway.app import build, build_application, engine_options
from gateway.names import SESSION_DEPLOYMENT
from gateway.settings import Settings
from inference.vllm import VllmConfig

SERVE_YAML = yaml.safe_load(Path("serve.yaml").read_text(encoding="utf-8"))
ARGS: dict[str, Any] = {
    "models": [
        {
            "name": "m",
            "path": "/models/m",
            "vllm": {"device": "gpu", "tensor_parallel": 2, "loras": {"poet": "/loras/poet"}},
            "replicas": {"max": 3},
        },
        {"name": "s", "engine": "scripted"},
    ],
    "sessions": {"min_replicas": 2, "max_replicas": 5, "target_sockets_per_replica": 7},
}


def parts(application: Any) -> dict[str, Any]:
    """All deployments of an application by name."""
    session = application._bound_deployment
    found = {session.name: session}
    for engine in session.init_args[2]:
        bound = engine._bound_deployment
        found[bound.name] = bound
    return found


def test_serve_deploy_and_limpet_build_the_same_application() -> None:
    ours, theirs = parts(build_application(Settings.model_validate(ARGS))), parts(build(ARGS))

    assert list(ours) == list(theirs) == [SESSION_DEPLOYMENT, "engine-m", "engine-s"]
    for name, part in ours.items():
        assert part._deployment_config == theirs[name]._deployment_config
        assert part.ray_actor_options == theirs[name].ray_actor_options
        assert part.init_args[0] == theirs[name].init_args[0]


def test_session_actors_scale_on_open_sockets_and_engines_on_their_turns() -> None:
    found = parts(build(ARGS))
    sessions = found[SESSION_DEPLOYMENT]._deployment_config.autoscaling_config
    engines = found["engine-m"]._deployment_config.autoscaling_config

    assert (sessions.min_replicas, sessions.max_replicas, sessions.target_ongoing_requests) == (2, 5, 7)
    assert (engines.min_replicas, engines.max_replicas) == (1, 3)
    assert engines.policy.policy_function == "inference.scaling:turns_per_replica"


def test_a_replica_gets_as_many_gpus_as_it_computes_on() -> None:
    found = parts(build(ARGS))

    assert found["engine-m"].ray_actor_options["num_gpus"] == 2
    assert "num_gpus" not in found["engine-s"].ray_actor_options


def test_gpus_of_several_nodes_come_from_a_placement_group() -> None:
    vllm = {"device": "gpu", "tensor_parallel": 2, "pipeline_parallel": 2, "nodes": 2, "cpus": 3}
    args = {"models": [{"name": "m", "path": "/models/m", "vllm": vllm}]}
    config = parts(build(args))["engine-m"]._replica_config  # Serve has checked that the replica fits the first bundle

    assert config.placement_group_bundles == [{"CPU": 3, "GPU": 1}, {"GPU": 1}, {"GPU": 1}, {"GPU": 1}]
    assert config.placement_group_strategy == "PACK"
    assert config.ray_actor_options == {"num_cpus": 3}


def test_gpus_of_one_node_need_no_placement_group() -> None:
    config = parts(build(ARGS))["engine-m"]._replica_config

    assert config.placement_group_bundles is None


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        ({"pipeline_parallel": 3, "nodes": 2}, "nodes that divide pipeline_parallel"),
        ({"device": "cpu", "pipeline_parallel": 2, "nodes": 2}, "nodes: 1 on a CPU"),
        ({"loras": {"two words": "/a"}}, "loras"),
        ({"loras": {"a": ""}}, "loras"),
    ],
)
def test_what_no_engine_could_start_with_is_refused(vllm: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Settings.model_validate({"models": [{"name": "m", "vllm": vllm}]})


def test_settings_of_a_model_are_what_the_engine_takes() -> None:
    settings = Settings.model_validate(ARGS)
    config = VllmConfig(**engine_options(settings, settings.models[0]))

    assert (config.model, config.device, config.tensor_parallel) == ("/models/m", "gpu", 2)
    assert config.loras == {"poet": "/loras/poet"}


def test_serve_yaml_names_deployments_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / ".limpet-keys"
    keys.write_text("key\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    (application,) = SERVE_YAML["applications"]
    found = parts(build(application["args"]))

    assert {part["name"] for part in application["deployments"]} == set(found)
