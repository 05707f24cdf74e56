"""Every model that the settings allow can be opened: engines and a format that fit together."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from gateway.protocol.items import Message
from gateway.settings import ModelSettings
from gateway.settings_engines import DialectName, UpstreamSettings
from inference.engine import Generation, Sampling
from inference.formats.format import Brief
from inference.upstream.dialects import DIALECTS, RESPONSES_DIALECTS
from inference.upstream.engines import TextEngine
from inference.upstream.opening import UpstreamConfig, upstream_engines, upstream_format
from inference.upstream.pool import Deadlines

ALLOWED = [("chat", name) for name in DIALECTS] + [("responses", name) for name in RESPONSES_DIALECTS]


def config(engine: Any, dialect: str) -> UpstreamConfig:
    url, keys, deadlines = "https://api.example/v1", ("a", "b"), Deadlines()
    return UpstreamConfig(engine, url, "m", keys, dialect, "auto", None, None, deadlines, 4)


def model(engine: str, dialect: str) -> ModelSettings:
    fields = {"name": "m", "engine": engine, "context_length": 4096, "upstream": {"dialect": dialect}}
    return ModelSettings.model_validate(fields)


@pytest.mark.parametrize(("engine", "dialect"), ALLOWED)
async def test_engines_take_the_prompts_of_their_format(engine: str, dialect: str) -> None:
    assert model(engine, dialect).upstream_only
    form, engines = upstream_format(config(engine, dialect)), upstream_engines(config(engine, dialect))
    assert list(engines) == ["api.example#0", "api.example#1"]
    parts = (form.body((Message("user", "Hello"),), {}),)
    asked = Generation("r", "m", parts, Sampling(5), parsing=form.opening(Brief()).parsing)
    for each in engines.values():
        assert isinstance(each, TextEngine)
        assert each._options(asked)["model"] == "m"
        assert each.refusal(asked) is None
        await each.close()


def test_the_dialects_of_the_settings_are_all_of_them() -> None:
    assert {dialect for _, dialect in ALLOWED} == set(get_args(DialectName))
    assert UpstreamSettings().dialect in DIALECTS.keys() & RESPONSES_DIALECTS.keys()


@pytest.mark.parametrize(("engine", "dialect"), [("chat", "limpet"), ("responses", "cerebras")])
def test_a_dialect_of_another_api_is_refused(engine: str, dialect: str) -> None:
    with pytest.raises(ValidationError, match=f"an upstream.dialect that engine {engine} has: generic, openai, vllm"):
        model(engine, dialect)
