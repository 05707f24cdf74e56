"""Constraints as vLLM 0.32 wants them. Imports vllm inside, as `inference.vllm` does."""

from __future__ import annotations

import json
from typing import Any

from inference.engine import EngineError, Guide


def structured_outputs(guide: Guide) -> Any:
    """`StructuredOutputsParams` for a guide.

    A JSON schema becomes a structural tag that allows one white-space character between tokens: with vLLM's own `json`
    field there is no bound, and small models fill their whole budget with blanks. Schemas with keywords that xgrammar
    lacks keep the field, as vLLM then says that they can't be held.
    """
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    if guide.kind == "json":
        schema = json.loads(guide.value)
        if isinstance(schema, dict) and not has_xgrammar_unsupported_json_features(schema):
            form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
            return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": form}))
    return StructuredOutputsParams(**{guide.kind: guide.value})


class GuideCompiler:
    """Compiles guides in the way of an engine's core, and keeps nothing. For one thread at a time.

    vLLM looks at a guide's form when a request comes in and compiles it in the core, against the vocabulary, where a
    failure is only that request's. Both are done here.
    """

    def __init__(self, vllm_config: Any, tokenizer: Any) -> None:
        self._config = vllm_config
        self._tokenizer = tokenizer
        self._backend: Any = None

    def problem(self, guide: Guide) -> EngineError | None:
        """Why the engine can't use the guide. Blocks, for seconds if it is large."""
        from inference.vllmrequests import translated

        try:
            self._compile(guide)
        except RecursionError:
            return EngineError("invalid", f"This {guide.kind} constraint is nested too deeply.")
        except Exception as problem:  # noqa: BLE001  libraries raise what they like
            return translated(problem, guide)
        return None

    def _compile(self, guide: Guide) -> None:
        from vllm import SamplingParams
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
        from vllm.v1.structured_output.request import get_structured_output_key

        outputs = structured_outputs(guide)
        config = self._config
        params = SamplingParams(structured_outputs=outputs, skip_clone=True)
        params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, self._tokenizer)
        if config.structured_outputs_config.backend != "xgrammar":
            return  # an operator's own choice, which is checked as far as vLLM itself does
        if self._backend is None:
            self._backend = XgrammarBackend(
                config, tokenizer=self._tokenizer, vocab_size=config.model_config.get_vocab_size()
            )
        try:
            self._backend.compile_grammar(*get_structured_output_key(outputs))
        except Exception as problem:
            raise EngineError("invalid", f"The engine can't compile this {guide.kind} constraint.") from problem
        finally:
            self._backend.compiler.clear_cache()
