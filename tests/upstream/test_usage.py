"""Usage in each backend's shape: a figure that is there arrives, one that is absent stays absent (O-60, O-61)."""

from __future__ import annotations

from typing import Any

import pytest

from inference.engine import Counted
from inference.upstream.dialects import CEREBRAS, GENERIC, VLLM, Dialect
from inference.upstream.usage import Timings, UsageShape, counted

DEEPSEEK = UsageShape(
    cached=(("usage", "prompt_tokens_details", "cached_tokens"), ("usage", "prompt_cache_hit_tokens"))
)
GROQ = UsageShape(input=(("usage", "prompt_tokens"), ("x_groq", "usage", "prompt_tokens")))


@pytest.mark.parametrize(
    ("dialect", "usage", "expected"),
    [
        (
            VLLM,
            {"prompt_tokens": 150, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 128}},
            Counted(150, 7, 128, None),
        ),
        (VLLM, {"prompt_tokens": 150, "completion_tokens": 7, "prompt_tokens_details": None}, Counted(150, 7)),
        (
            CEREBRAS,
            {
                "prompt_tokens": 150,
                "completion_tokens": 7,
                "total_tokens": 157,
                "image_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {
                    "reasoning_tokens": 3,
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                },
            },
            Counted(150, 7, 0, 3),
        ),
        (GENERIC, {"prompt_tokens": 1, "completion_tokens": 0}, Counted(1, 0)),
        (GENERIC, {"prompt_tokens": 1}, None),
        (GENERIC, {}, None),
        (GENERIC, None, None),
        (GENERIC, {"prompt_tokens": True, "completion_tokens": 2}, None),
        (
            GENERIC,
            {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": -1}},
            Counted(5, 2),
        ),
    ],
)
def test_shapes(dialect: Dialect, usage: Any, expected: Counted | None) -> None:
    assert counted({"usage": usage}, dialect.usage) == expected


def test_a_shape_names_other_places() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 8}
    assert counted({"usage": usage}, DEEPSEEK) == Counted(9, 2, 8)
    assert counted({"usage": {"completion_tokens": 2}, "x_groq": {"usage": {"prompt_tokens": 9}}}, GROQ) == Counted(
        9, 2
    )


def test_timings_split_an_answers_time() -> None:
    timings = Timings()
    info = {"queue_time": 0.5, "prompt_time": 0.25, "completion_time": 1.0, "total_time": 1.75, "created": 1.0}
    timings.add(info, 2.0)
    timings.add({**info, "queue_time": 0.0, "total_time": 1.25}, 1.5)
    timings.add({"queue_time": 9}, 9)
    timings.add(None, 9)
    assert (timings.answers, timings.queue_s, timings.prompt_s, timings.completion_s) == (2, 0.5, 0.5, 2.0)
    assert timings.overhead_s == pytest.approx(0.5)
