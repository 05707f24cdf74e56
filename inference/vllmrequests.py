"""Requests as vLLM 0.32 wants them, and its answers and errors in our terms. Imports vllm inside, as `inference.vllm`
does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from inference.engine import EngineError, Finish, Generation, Guide, TokenLogprob
from inference.vllmguides import structured_outputs

log = logging.getLogger(__name__)

_FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


def engine_prompt(generation: Generation, ids: list[int]) -> Any:
    """`ids` are the prompt's."""
    if generation.sampling.guide is None:
        from vllm.inputs.engine import tokens_input

        return tokens_input(ids, cache_salt=generation.cache_salt)
    # A raw prompt is processed in a thread, and so is the guide, whose compilation may take seconds.
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=ids)
    if generation.cache_salt is not None:
        prompt["cache_salt"] = generation.cache_salt
    return prompt


def sampling_params(generation: Generation) -> Any:
    """`SamplingParams` for this request alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = generation.sampling
    guide = sampling.guide
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1e-6,  # 0 means the likeliest token, and vLLM refuses it
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        structured_outputs=None if guide is None else structured_outputs(guide),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,  # made for this request alone
    )


def finish_of(reason: str | None) -> Finish | None:
    """Raises `EngineError` when vLLM gave up on the request."""
    if reason is None:
        return None
    if reason not in _FINISHES:  # "error": vLLM gave up on the request, not on itself
        raise EngineError("unavailable", "The engine failed on this request.")
    return _FINISHES[reason]


def logprobs_of(completion: Any, generation: Generation) -> list[TokenLogprob] | None:
    """Of the ids that a `CompletionOutput` adds; None if the request asked for none."""
    wanted = generation.sampling.logprobs
    if wanted is None or completion.logprobs is None:
        return None
    pairs: Sequence[tuple[int, Mapping[int, Any]]] = list(zip(completion.token_ids, completion.logprobs, strict=True))
    found = []
    for token, entries in pairs:
        # vLLM adds the sampled id to the `wanted` likeliest ones when it is none of them.
        likeliest = sorted(((other, entry.logprob) for other, entry in entries.items()), key=lambda pair: -pair[1])
        found.append(TokenLogprob(token, entries[token].logprob, tuple(likeliest[:wanted])))
    return found


def translated(problem: Exception, guide: Guide | None) -> EngineError:
    """An error of vLLM's in our terms. Nothing of the request gets into the message: vLLM and its grammar libraries put
    what they reject into their own."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(problem, EngineError):
        return problem
    if isinstance(problem, GracefulHTTPError):
        return EngineError("overloaded", "The engine has too much in hand; try again shortly.")
    if isinstance(problem, EngineDeadError):
        return EngineError("unavailable", "The engine died.")
    cause = problem.__cause__
    if isinstance(problem, VLLMClientError | ValueError) or (guide is not None and isinstance(cause, ValueError)):
        return EngineError("invalid", _refusal(problem, guide))
    log.warning("vLLM failed on a request: %s, caused by %s", type(problem).__name__, type(cause).__name__)
    return EngineError("unavailable", "The engine failed on this request.")


def _refusal(problem: BaseException, guide: Guide | None) -> str:
    parameter = getattr(problem, "parameter", None)
    if guide is not None and parameter is None:
        return f"The engine can't use this {guide.kind} constraint: {_reason(problem)}."
    return "The engine refused the request" + (f": bad {parameter}." if parameter else ".")


def _reason(problem: BaseException | None) -> str:
    """What vLLM itself says of a guide it refuses. Its sentences are fixed up to a colon; what follows one is a
    library's, and may quote."""
    from vllm.exceptions import VLLMValidationError

    while problem is not None and not isinstance(problem, VLLMValidationError):
        problem = problem.__cause__
    text = str(problem.args[0]) if problem is not None and problem.args else ""
    said = text.partition(":")[0].partition("\n")[0].strip().rstrip(".")[:200]
    return said if said and not set(said) & set("'\"{}[]") else "it is malformed"
