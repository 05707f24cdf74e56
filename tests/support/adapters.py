"""Random LoRA adapters in PEFT's layout, and a checkpoint with one merged into it: what the adapter must come to."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 4
ALPHA = 16
MODULES = ("q_proj", "v_proj", "o_proj")


def write_adapter(folder: Path, model: Path, seed: int, rank: int = RANK) -> None:
    """Fill `folder` with an adapter for the tiny random model: one layer, 64 wide, one head of 64. Its weights are
    large, so that it changes what is said."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for module in MODULES:
        name = f"base_model.model.model.layers.0.self_attn.{module}"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, 64, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(64, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def greedy(model: Path, adapter: Path | None, ids: list[int], count: int) -> list[int]:
    """The `count` likeliest ids after these, by transformers, with the adapter's W + (alpha / rank) B A merged in."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    if adapter is not None:
        weights = load_file(adapter / "adapter_model.safetensors")
        for name, module in reference.named_modules():
            key = f"base_model.model.{name}"
            if f"{key}.lora_A.weight" in weights:
                change = weights[f"{key}.lora_B.weight"] @ weights[f"{key}.lora_A.weight"]
                module.weight.data += ALPHA / RANK * change
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=count, do_sample=False
        )
    found: list[int] = out[0, len(ids) :].tolist()
    return found
