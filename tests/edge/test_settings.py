"""Settings: sources, their order, and what is said about a wrong one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from gateway.settings import ModelSettings, Settings, SettingsError, load_settings
from gateway.settings_schema import allowed_at, field_at, keys_of, markdown, model_of

ROOT = Path(__file__).resolve().parents[2]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "limpet.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(*args, **kwargs):
    with pytest.raises(SettingsError) as caught:
        load_settings(*args, **kwargs)
    return {problem.key: problem for problem in caught.value.problems}


# --- sources --------------------------------------------------------------------------------------------------------


def test_without_any_source_the_defaults_hold():
    settings = load_settings(environ={})
    assert (settings.server.host, settings.server.port, settings.server.api_keys) == ("127.0.0.1", 8000, ())
    assert settings.limits.socket_lifetime_s + settings.limits.lifetime_grace_s == settings.ray.hard_stop_s == 3900
    assert settings.models == ()


def test_environment_beats_file_and_command_line_beats_both(tmp_path):
    file = written(tmp_path, "server: {port: 1001, websocket: false}\nlimits: {active_turns: 3}\nlog_level: error\n")
    environ = {"LIMPET_SERVER__PORT": "1002", "LIMPET_LIMITS__NAMED_LANES": "5"}
    settings = load_settings(file, environ, {"server": {"port": 1003}})
    assert settings.server.port == 1003
    assert load_settings(file, environ).server.port == 1002
    assert load_settings(file, {}).server.port == 1001
    assert not settings.server.websocket  # a section is merged, not replaced
    assert (settings.limits.active_turns, settings.limits.named_lanes) == (3, 5)
    assert settings.log_level == "error"


def test_the_file_may_be_named_by_the_environment(tmp_path):
    file = written(tmp_path, "server: {port: 1001}")
    assert load_settings(environ={"LIMPET_CONFIG": str(file)}).server.port == 1001


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "server:\n"])
def test_an_empty_file_or_section(tmp_path, text):
    if text == "server:\n":  # `server:` alone is null, which is no section
        assert "server" in problems(written(tmp_path, text), {})
    else:
        assert load_settings(written(tmp_path, text), {}) == load_settings(environ={})


def test_values_in_the_environment_take_the_form_of_the_field():
    settings = load_settings(
        environ={
            "LIMPET_SERVER__API_KEYS": "one, two",
            "LIMPET_SERVER__WEBSOCKET": "false",
            "LIMPET_MODELS": '[{"name": "m", "engine": "scripted", "aliases": ["n"], "vllm": {"extra": {"seed": 1}}}]',
            "LIMPET_LIMITS__KEEPALIVE_S": "2.5",
            "LIMPET_RAY__ADDRESS": "",
        }
    )
    assert settings.server.api_keys == ("one", "two")
    assert not settings.server.websocket
    assert settings.models[0].vllm.extra == {"seed": 1}
    assert settings.limits.keepalive_s == 2.5
    assert settings.ray.address is None


def test_other_programs_variables_are_left_alone():
    environ = {"LIMPET_GPU": "1", "LIMPET_PYTHON": "python3.11", "LIMPET_WHATEVER": "x", "PATH": "/bin"}
    assert load_settings(environ=environ) == load_settings(environ={})


def test_keys_of_a_file_are_added(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nalpha\n  beta  \nalpha\n", encoding="utf-8")
    settings = load_settings(
        environ={"LIMPET_SERVER__API_KEYS": "gamma"}, overrides={"server": {"host": "0.0.0.0", "api_keys_file": keys}}
    )
    assert sorted(set(settings.server.keys())) == ["alpha", "beta", "gamma"]


def test_a_replica_gets_the_same_from_a_plain_dict_whatever_its_environment(monkeypatch):
    settings = load_settings(environ={}, overrides={"models": [{"name": "m"}], "server": {"api_keys": ["k"]}})
    monkeypatch.setenv("LIMPET_SERVER__PORT", "1234")
    copy = Settings.model_validate(json.loads(json.dumps(settings.model_dump(mode="json"))))
    assert copy == settings
    assert copy.server.api_keys == ("k",)


def test_importing_settings_is_cheap():
    code = "import sys, gateway.settings; print([m for m in ('ray', 'vllm', 'torch', 'starlette') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_wrong_value_names_key_place_value_and_what_is_allowed(tmp_path):
    file = written(tmp_path, "server:\n  port: eighty\n")
    problem = problems(file, {})["server.port"]
    assert problem.origin == f"{file}:2:3"
    assert problem.found == '"eighty"'
    assert problem.allowed == "an integer from 1 to 65535 (default 8000)"
    assert str(problem).splitlines()[0] == "server.port"


def test_the_place_is_that_of_the_value_that_won(tmp_path):
    file = written(tmp_path, "server: {port: 80}")
    assert problems(file, {"LIMPET_SERVER__PORT": "0"})["server.port"].origin == "LIMPET_SERVER__PORT"
    found = problems(file, {}, {"server": {"port": 70000}}, overrides_from="command line (--port)")
    assert found["server.port"].origin == "command line (--port)"


def test_every_wrong_setting_is_named_at_once(tmp_path):
    file = written(
        tmp_path,
        "server: {port: -1}\n"
        "limits: {active_turns: true, keepalive_s: .nan}\n"
        "models:\n  - {name: a, replicas: {min: 3, max: 1}}\n  - {name: 'b c', engine: llama}\n  - {}\n"
        "log_level: loud\n",
    )
    found = problems(file, {})
    assert set(found) == {
        "server.port",
        "limits.active_turns",
        "limits.keepalive_s",
        "models.0.replicas",
        "models.1.name",
        "models.1.engine",
        "models.2.name",
        "log_level",
    }
    assert found["models.1.engine"].allowed == "one of vllm, scripted, cerebras, chat, responses (default vllm)"
    assert found["models.1.engine"].origin.endswith(":5:19")
    assert found["models.0.replicas"].allowed == "min not above max"
    assert found["models.2.name"].found == "nothing"


@pytest.mark.parametrize(
    ("yaml", "key", "hint"),
    [
        ("server: {prot: 1}", "server.prot", "did you mean server.port?"),
        ("port: 1", "port", "did you mean server.port?"),
        ("sever: {}", "sever", "did you mean server?"),
        ("models: [{name: m, vlm: {}}]", "models.0.vlm", "did you mean models.0.vllm?"),
        ("tensor_parallel: 2", "tensor_parallel", "did you mean models[].vllm.tensor_parallel?"),
        ("quux: 1", "quux", None),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(tmp_path, yaml, key, hint):
    problem = problems(written(tmp_path, yaml), {})[key]
    assert problem.hint == hint
    assert "unknown" in problem.found


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LIMPET_PORT", "did you mean LIMPET_SERVER__PORT?"),
        ("LIMPET_SERVER__PROT", "did you mean LIMPET_SERVER__PORT?"),
        ("LIMPET_SEVER__PORT", "did you mean LIMPET_SERVER__PORT?"),
    ],
)
def test_an_unknown_variable_is_an_error_with_a_suggestion(name, hint):
    (problem,) = problems(environ={name: "1"}).values()
    assert (problem.origin, problem.hint) == (name, hint)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("server: {port: 1", ":1:17"),
        ("a: b: c\n", ":1:5"),
        ("server:\n  port: 1\n port: 2\n", ":3:2"),
        ("server: {port: 1}\nserver: {port: 2}\n", ":2:1"),
        ("x: *nowhere\n", ":1:4"),
        ("x: !!python/object:os.system {}\n", ":1:4"),
    ],
)
def test_broken_yaml_says_line_and_column(tmp_path, text, where):
    file = written(tmp_path, text)
    problem = problems(file, {})["settings file"]
    assert problem.origin == f"{file}{where}"
    assert "line" in problem.found
    assert "column" in problem.found


def test_yaml_that_is_no_mapping_or_no_text(tmp_path):
    assert "a list at the top" in problems(written(tmp_path, "- 1\n"), {})["settings file"].found
    assert "YAML" in problems(written(tmp_path, "a: \x07"), {})["settings file"].allowed
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in problems(tmp_path / "binary", {})["settings file"].found
    assert "No such file" in problems(tmp_path / "absent", {})["settings file"].found


def test_yaml_merge_keys_work_and_may_be_overridden(tmp_path):
    text = "models:\n  - &m {name: a, engine: scripted}\n  - {<<: *m, name: b}\n"
    assert [(m.name, m.engine) for m in load_settings(written(tmp_path, text), {}).models] == [
        ("a", "scripted"),
        ("b", "scripted"),
    ]


def test_deep_nesting_is_refused_and_not_a_crash(tmp_path):
    assert "levels" in problems(written(tmp_path, "a: " + "[" * 60 + "]" * 60), {})["settings file"].found


def test_keys_are_never_shown(tmp_path):
    secret = "top secret key"  # a blank is not allowed in a key
    found = problems(environ={"LIMPET_SERVER__API_KEYS": f"{secret},fine"})
    text = "\n".join(map(str, found.values()))
    assert "secret" not in text
    settings = load_settings(environ={"LIMPET_SERVER__API_KEYS": "hidden"})
    assert "hidden" not in repr(settings)
    assert "hidden" not in str(settings)


def test_a_reachable_gateway_needs_a_key():
    problem = problems(environ={"LIMPET_SERVER__HOST": "0.0.0.0"})["server.host"]
    assert problem.origin == "LIMPET_SERVER__HOST"
    assert "server.api_keys" in problem.allowed
    for host in ("localhost", "::1", "127.0.0.2"):
        assert load_settings(environ={"LIMPET_SERVER__HOST": host}).server.host == host


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"limits": {"socket_lifetime_s": 7200}}, "ray.hard_stop_s"),
        ({"limits": {"lifetime_jitter_s": 3600}}, "limits.lifetime_jitter_s"),
        ({"ray": {"min_draining_s": 10}}, "limits.drain_grace_s"),
        ({"server": {"request_max_bytes": 1 << 29}}, "limits.queued_bytes"),
        ({"models": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]}, "models.1.name"),
        ({"models": [{"name": "a"}, {"name": "b", "vllm": {"loras": {"a": "/lora"}}}]}, "models.1.name"),
        ({"models": [{"name": "a", "vllm": {"loras": {"a": "/lora"}}}]}, "models.0.name"),
        ({"models": [{"name": "a/b"}, {"name": "A-b"}]}, "models.1.name"),
        ({"sessions": {"min_replicas": 9}}, "sessions"),
        ({"sessions": {"target_sockets_per_replica": 5000}}, "sessions"),
    ],
)
def test_values_that_contradict_each_other(overrides, key):
    problem = problems(environ={}, overrides=overrides)[key]
    assert "command line" in problem.origin


def test_a_longer_lifetime_is_fine_without_haproxy():
    overrides = {"limits": {"socket_lifetime_s": 7200}, "ray": {"haproxy": False}}
    assert load_settings(environ={}, overrides=overrides).limits.socket_lifetime_s == 7200


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), ("# nothing\n", "no key"), ("a b\n", "key")])
def test_a_key_file_that_is_of_no_use(tmp_path, content, said):
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    found = problems(environ={"LIMPET_SERVER__API_KEYS_FILE": str(path)})
    (problem,) = found.values()
    assert said in str(problem)
    assert "a b" not in problem.found


# --- models ---------------------------------------------------------------------------------------------------------


def test_a_model_knows_its_deployment_gpus_and_names():
    settings = load_settings(
        environ={},
        overrides={
            "models": [
                {"name": "Qwen/Qwen3-4B", "aliases": ["q"], "vllm": {"device": "gpu", "tensor_parallel": 2}},
                {"name": "s", "engine": "scripted", "vllm": {"device": "gpu"}},
            ]
        },
    )
    assert settings.models[0].deployment == "engine-qwen-qwen3-4b"
    assert [model.gpus for model in settings.models] == [2, 0]
    assert ModelSettings(name="m").gpus == 0
    assert settings.model_named("q") is settings.models[0]
    assert settings.model_named("other") is None


def refused(file: Path) -> str | None:
    try:
        load_settings(file, {})
    except SettingsError as error:
        return str(error)
    return None


def test_no_secret_is_shown_whatever_is_wrong_with_it(tmp_path):
    secrets = [key for key in keys_of(Settings) if not field_at(Settings, key).repr]
    assert {key[-1] for key in secrets} >= {"api_keys", "sealing_keys", "encryption_keys", "keys"}
    for *sections, name in secrets:
        for wrong in (["hunter 2"], {"hunter 2": "hunter 2"}, 7, [["hunter 2"]]):
            for key in (name, name.rstrip("s"), name.replace("_", "-")):
                value = {key: wrong if key != "url" else "no://me:hunter 2@x"}
                for section in reversed(sections):
                    value = [{"name": "m", **value}] if section == "*" else {section: value}
                if (said := refused(written(tmp_path, json.dumps(value)))) is not None:
                    assert "hunter 2" not in said, (key, wrong)


def test_nor_those_in_a_section_whose_name_is_wrong(tmp_path):
    given = {"servr": {"api_keys": ["hunter2"]}, "models": ["hunter2", [{"upstream": {"keys": ["hunter2"]}}]]}
    with pytest.raises(SettingsError) as caught:
        load_settings(written(tmp_path, json.dumps({**given, "password": "hunter2"})), {})
    shown = {problem.key: problem.found for problem in caught.value.problems}
    assert shown["servr"] == shown["password"] == "an unknown setting"
    assert (shown["models.0"], shown["models.1"]) == ("a text", "a list")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("", {"LIMPET_SERVER__API_KEYS": '["hunter2"'}),
        ("", {"LIMPET_MODELS": "[{name: m, upstream: {keys: [hunter2}]"}),
        ("", {"LIMPET_SERVER": "hunter2", "LIMPET_SERVER__PORT": "1"}),
        ("server: hunter2", {}),
        ("store: {url: 'postgres//u:hunter2/x@h/d'}", {}),
        ("store: {url: 'mysql://u:hunter2@h/d?password=hunter2'}", {}),
        ("server: {api_keys: [*hunter2]}", {}),
        ("server: {api_keys: !hunter2 [x]}", {}),
        ("server: {api_keys: {hunter2: 1, hunter2: 2}}", {}),
        ("server: {authorization: hunter2}", {}),
        ("server: {api_keys_file: hunter2}", {}),
        ("models: [{name: m, engine: chat, context_length: 99, upstream: hunter2}]", {}),
    ],
)
def test_nor_what_can_not_be_read(tmp_path, text, environ):
    with pytest.raises(SettingsError) as caught:
        load_settings(written(tmp_path, text), environ)
    assert "hunter2" not in str(caught.value)


# --- documentation --------------------------------------------------------------------------------------------------


def test_the_documentation_is_that_of_the_model():
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == markdown(Settings), (
        "run: limpet settings --markdown > docs/settings.md"
    )


def test_every_setting_says_what_it_is_and_why():
    for key in keys_of(Settings):
        field = field_at(Settings, key)
        assert field is not None
        assert field.description, key
        assert len(field.description) > 40, key
        unit = str(key[-1]).rpartition("_")[2]
        names = {"s": "econds", "bytes": "ytes", "gib": "GiB", "mb": "MB"}
        if unit in names:
            assert names[unit] in field.description, key
        assert allowed_at(Settings, key) != "anything", key


def test_sections_forbid_unknown_keys_and_changes():
    def sections(model: type[BaseModel]):
        yield model
        for field in model.model_fields.values():
            if (inner := model_of(field.annotation)) is not None:
                yield from sections(inner)

    for section in sections(Settings):
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]


def test_the_examples_of_the_documentation_are_settings(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("csk-1\n")
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 4
    for number, example in enumerate(examples):
        file = tmp_path / f"{number}.yaml"
        file.write_text(re.sub(r"~/\S+-keys", str(keys), example))
        assert load_settings(file, {}).models
