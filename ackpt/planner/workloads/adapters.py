"""LoRA adapters of peft on a model of transformers, from a rank and targets or from an adapter_config.json."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Lora:
    """The value of ``--lora``: `fields` of peft's ``LoraConfig``; empty for peft's defaults.

    Example:
        >>> Lora.parsed(["r=16", "targets=q_proj,v_proj"]).fields
        {'r': 16, 'target_modules': ['q_proj', 'v_proj']}
    """

    fields: dict[str, Any]

    @classmethod
    def parsed(cls, texts: list[str]) -> Lora:
        """The adapters that the texts of ``--lora`` describe: FIELD=VALUE, or the path of an adapter_config.json."""
        fields: dict[str, Any] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                fields |= _read(Path(text))
            elif name == "targets":
                fields["target_modules"] = value.split(",")
            else:
                try:
                    fields[name] = json.loads(value)
                except json.JSONDecodeError:
                    fields[name] = value
        return cls(fields)

    def added_to(self, model: nn.Module) -> nn.Module:
        """`model`, frozen, with trainable adapters; peft keeps them in float32 if the model is in half precision.

        Raises:
            ValueError: if peft is missing, or refuses the fields or the targets.
        """
        try:
            import peft
        except ImportError as error:
            raise ValueError(
                "--lora needs the package peft, which is not installed: pip install 'ackpt[hf]'"
            ) from error
        known = set(peft.LoraConfig.__dataclass_fields__)
        if unknown := sorted(set(self.fields) - known):
            raise ValueError(
                f"--lora {unknown[0]}: peft's LoraConfig has no such field; it has {', '.join(sorted(known))}"
            )
        config: Any = peft.LoraConfig
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers 5 renames
                return peft.get_peft_model(model, config(**self.fields))  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError) as error:
            raise ValueError(f"peft refuses --lora: {str(error).splitlines()[0]}") from error


def _read(path: Path) -> dict[str, Any]:
    """The fields of a file that ``PeftModel.save_pretrained`` wrote, without those that describe its purpose."""
    try:
        data = json.loads((path / "adapter_config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--lora {path}: write r=16 targets=q_proj,v_proj, or an adapter_config.json ({error})"
        ) from error
    if not isinstance(data, dict) or data.get("peft_type") != "LORA":
        raise ValueError(f"--lora {path} is not the configuration of a LoRA adapter: its peft_type is not LORA")
    left_out = {"peft_type", "auto_mapping", "base_model_name_or_path", "inference_mode", "revision", "peft_version"}
    return {name: value for name, value in data.items() if name not in left_out and value is not None}
