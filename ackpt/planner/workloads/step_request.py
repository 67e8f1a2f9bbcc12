"""`StepRequest`: a model by name, sizes of its batch, dtypes, adapters; and `TrainingStep`, made from it."""

from __future__ import annotations

import contextlib
import difflib
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ackpt.core.planning_errors import did_you_mean

IMAGE_SIZE = 224
TRANSFORMERS = "hf:"
OF_THE_STUDY = ("resnet18", "resnet50", "resnet152", "bert-base", "bert-large", "sdxl-unet")  # models in a checkout
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_called(name: str, option: str = "") -> str:
    """The key of `DTYPES` for `name`, which may be short or begin with ``torch.``; else a ValueError."""
    bare = name.removeprefix("torch.")
    full_name = _SHORT.get(bare, bare)
    if full_name not in DTYPES:
        close = did_you_mean(bare, DTYPES)
        raise ValueError(f"{option}{name!r} is not a dtype{close}: choose from {', '.join(DTYPES)}")
    return full_name


@dataclass(frozen=True)
class StepRequest:
    """The step to build: `model` by name, `fields` of its configuration, sizes of a batch, dtype of the parameters.

    `lora`: adapters that are trained instead of the model.
    """

    model: str
    batch_size: int = 1
    seq_len: int | None = None
    image_size: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    lora: Lora | None = None

    def __post_init__(self):
        if self.lora is not None and not self.model.startswith(TRANSFORMERS):
            raise ValueError(
                f"--lora adds adapters to models of transformers: give {TRANSFORMERS}..., not {self.model}"
            )
        for name in ("batch_size", "seq_len", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    def tokens(self) -> tuple[int, int]:
        """Batch size and sequence length of a model that reads tokens."""
        if self.seq_len is None:
            raise ValueError(f"{self.model} reads tokens: give --seq-len, the tokens of a sequence")
        if self.image_size is not None:
            raise ValueError(f"{self.model} reads tokens, so --image-size says nothing about it: leave it out")
        return self.batch_size, self.seq_len

    def images(self, channels: int, size=IMAGE_SIZE) -> Tensor:
        """A batch of images for a model that reads images; `size` is the default of --image-size."""
        if self.seq_len is not None:
            raise ValueError(f"{self.model} reads images, so --seq-len says nothing about it: give --image-size")
        size = self.image_size or size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return torch.empty(self.batch_size, channels, height, width, dtype=self.dtype)


@dataclass(frozen=True)
class TrainingStep:
    """A model and the arguments of the call that returns its loss, all on one device."""

    model: nn.Module
    inputs: dict[str, Any]

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def unknown_model(name: str, known) -> ValueError:
    """The error for a `name` that is not among the `known` built-in models."""
    configuration = f"{TRANSFORMERS}<configuration class of transformers, or path of a config.json>"
    if name in OF_THE_STUDY:
        return ValueError(
            f"{name} is not part of the package: run `python -m experiments plan {name}` in a clone of the repository, "
            f"or choose from {', '.join(known)}, or {configuration}"
        )
    return ValueError(
        f"unknown model {name!r}{did_you_mean(name, known)}: choose from {', '.join(known)}, or {configuration}"
    )


def no_configuration(library: str, name: str, hint: str = "") -> ValueError:
    """The error for a `name` that is neither a configuration class of the `library` nor a file."""
    return ValueError(
        f"{library} has no configuration class {name!r}{hint}, and there is no such file: write hf:GPT2Config, "
        "hf:LlamaConfig or hf:path/to/config.json. Nothing is downloaded: save the config.json of a model on the Hub "
        "first"
    )


def require_known(fields, names, model: str) -> None:
    """ValueError for the first of `fields` that is not in `names`, with close matches."""
    for name in fields:
        if name not in names:
            close = difflib.get_close_matches(name, names, 3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(names))}"
            raise ValueError(f"--set {name}: the configuration of {model} has no such field; {hint}")


def require_positions(length: int, positions: int, field: str) -> None:
    """ValueError for a sequence that is longer than the positions in `field` of the configuration."""
    if length > positions:
        raise ValueError(
            f"--seq-len {length} is longer than the {positions} positions of this configuration: give "
            f"--set {field}={length}, or a shorter sequence"
        )


def ids(*shape: int) -> Tensor:
    """An uninitialized int64 tensor of `shape` for tokens or classes."""
    return torch.empty(shape, dtype=torch.int64)


def autocast(device_type: str, dtype: str):
    """The context of autocast to `dtype`; for float32 one that does nothing."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, DTYPES[dtype])


@dataclass(frozen=True)
class Lora:
    """The value of ``--lora``: `fields` of peft's ``LoraConfig``; empty for peft's defaults."""

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
        """`model`, frozen, with trainable adapters, which peft keeps in float32; ValueError for what peft refuses."""
        try:
            import peft
        except ImportError as error:
            raise ValueError(
                "--lora needs the package peft, which is not installed: pip install 'ackpt[hf]'"
            ) from error
        fields_of_peft = set(peft.LoraConfig.__dataclass_fields__)
        if unknown := sorted(set(self.fields) - fields_of_peft):
            raise ValueError(
                f"--lora {unknown[0]}: peft's LoraConfig has no such field; it has {', '.join(sorted(fields_of_peft))}"
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
