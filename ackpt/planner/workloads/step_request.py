"""`StepRequest`: a model by name, sizes of its batch, dtypes, adapters; `training_step` makes a `TrainingStep` of it.

The models are those of `ackpt.models` by name, and those of transformers from a configuration. `optimizer_kind` finds
an optimizer by its name; `ackpt.planner.capture.optimizer_state` counts its memory.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ackpt.core.errors import did_you_mean
from ackpt.models import LanguageModel, Transformer, TransformerConfig

IMAGE_SIZE = 224
TRANSFORMERS = "hf:"
FROM_FILE = ".py:"  # in the name of a model that a function in a Python file makes
OWN = "for any other model, write a function that returns the model and its inputs: --model FILE.py:FUNCTION"
OF_THE_STUDY = ("resnet18", "resnet50", "resnet152", "bert-base", "bert-large", "sdxl-unet", "torchtitan-llama")
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
    lora: "Lora | None" = None

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
    choices = f"{', '.join(known)}, or {TRANSFORMERS}<configuration class of transformers, or path of a config.json>"
    text = f"unknown model {name!r}{did_you_mean(name, known)}: choose from"
    if name in OF_THE_STUDY:
        command = f"`python -m experiments plan {name}` in a clone of the repository"
        text = f"{name} is not part of the package: run {command}, or choose from"
    return ValueError(f"{text} {choices}; {OWN}")


def no_configuration(library: str, name: str, hint: str = "") -> ValueError:
    """The error for a `name` that is neither a configuration class of the `library` nor a file."""
    return ValueError(
        f"{library} has no configuration class {name!r}{hint}, and there is no such file: write hf:GPT2Config, "
        "hf:LlamaConfig or hf:path/to/config.json. Nothing is downloaded: save the config.json of a model on the Hub "
        f"first; {OWN}"
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
    def parsed(cls, texts: list[str]) -> "Lora":
        """The adapters that the texts of ``--lora`` describe: FIELD=VALUE, or the path of an adapter_config.json."""
        fields: dict[str, Any] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                fields |= _adapters_in(Path(text))
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


def _adapters_in(path: Path) -> dict[str, Any]:
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


SPEECH, SEQ2SEQ, MASKED = "speech to text", "sequence to sequence", "masked language model"
CAUSAL, IMAGES, SEQUENCES = "causal language model", "image classification", "sequence classification"
# Heads with a loss, and the table of transformers with the classes that have each. A configuration without
# architectures gets the first of these heads that it has; encoders have causal ones, too.
TASKS = {
    SPEECH: "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    SEQ2SEQ: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    MASKED: "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    IMAGES: "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    SEQUENCES: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


def transformers_step(request: StepRequest) -> TrainingStep:
    """The model of a configuration, on the meta device, and its inputs; ValueError for what transformers refuses."""
    transformers = _transformers()
    config = _config(transformers, request)
    task, name = _head(config)
    if limit := positions_of(config, task):
        require_positions(request.tokens()[1], *limit)
    inputs = _inputs(config, task, request)
    model = _made(name, lambda: getattr(transformers, name)(config))
    model = model if request.lora is None else request.lora.added_to(model)
    return TrainingStep(model.train(), inputs)


def positions_of(config, task: str) -> tuple[int, str] | None:
    """The longest sequence that a configuration of transformers allows, and its field; None if any length is."""
    field = "max_target_positions" if task == SPEECH else "max_position_embeddings"
    limit = getattr(config, field, None)
    return (limit, field) if task != IMAGES and isinstance(limit, int) and limit > 0 else None


def batches_of(model: nn.Module) -> tuple[Callable[[int, int], dict[str, Any]], tuple[int, str] | None]:
    """A function of batch size and length that returns the arguments of a model of transformers; `positions_of` it."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    kinds = [kind.__name__ for kind in type(base).__mro__ if kind.__module__.startswith("transformers.")]
    tasks = _tasks_by_class() if kinds else {}
    name, task = next(((name, tasks[name]) for name in kinds if name in tasks), ("", None))
    if task in (None, IMAGES):
        raise TypeError(
            f"{type(base).__name__} is not a model of transformers that returns a loss for sequences: give batch=, a "
            "function of the number of sequences and their length that returns the model's arguments, such as "
            'lambda size, length: {"tokens": torch.zeros(size, length, dtype=torch.long)}'
        )

    def batch(size: int, length: int) -> dict[str, Any]:
        inputs = _inputs(base.config, task, StepRequest(f"{TRANSFORMERS}{name}", size, length, dtype=base.dtype))
        return {key: torch.zeros_like(value) if isinstance(value, Tensor) else value for key, value in inputs.items()}

    return batch, positions_of(base.config, task)


def dtype_of_file(model: str) -> str | None:
    """The dtype that a config.json names, if any; ValueError for a file that is no configuration."""
    if not model.startswith(TRANSFORMERS) or (path := _file(model.removeprefix(TRANSFORMERS))) is None:
        return None
    given = _read(path)
    return given.get("dtype") or given.get("torch_dtype")


def _file(name: str) -> Path | None:
    """The config.json that `name` is the path of, or its folder's; None for the name of a class."""
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        return None
    return path / "config.json" if path.is_dir() else path


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{TRANSFORMERS} models need the package transformers, which is not installed: pip install 'ackpt[hf]'"
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers


def _config(transformers, request: StepRequest):
    name = request.model.removeprefix(TRANSFORMERS)
    if (path := _file(name)) is not None:
        given = _read(path)
        kind = given.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(f"{name}: transformers {transformers.__version__} knows no model_type {kind!r}; {OWN}")
        config_class = transformers.CONFIG_MAPPING[kind]
    else:
        given, config_class = {}, getattr(transformers, name, None)
        if not (
            isinstance(config_class, type)
            and issubclass(config_class, transformers.PretrainedConfig)
            and config_class.model_type
        ):
            raise no_configuration(f"transformers {transformers.__version__}", name)
    config = _made(name, lambda: config_class.from_dict(given))
    settable = {key for key, value in inspect.getmembers(config_class) if isinstance(value, property) and value.fset}
    known = {*config.to_dict(), *config_class.attribute_map, *settable, "attn_implementation"}
    require_known(request.fields, {key for key in known if not key.startswith("_")}, name)
    fields = {config_class.attribute_map.get(field, field): value for field, value in request.fields.items()}
    if request.image_size is not None and hasattr(config, "image_size"):
        fields["image_size"] = request.image_size
    return _made(name, lambda: config_class.from_dict({**given, **fields}))


def _read(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): write hf:GPT2Config, or hf: and the path of a config.json"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ValueError(f"{path} is not a configuration of transformers: it has no model_type; {OWN}")
    return data


def _heads(task: str) -> dict[str, list[str]]:
    """The classes of transformers with the head of a task, by the type of the model."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, TASKS[task])
    return {kind: [name] if isinstance(name, str) else [*name] for kind, name in names.items()}


def _tasks_by_class() -> dict[str, str]:
    return {name: task for task in reversed(TASKS) for names in _heads(task).values() for name in names}


def _head(config) -> tuple[str, str]:
    """The task and the name of the class: the one in ``architectures``, else that of the first task."""
    known = f"ackpt plan knows those for {', '.join(TASKS)}; {OWN}"
    if named := (config.architectures or [None])[0]:
        if task := _tasks_by_class().get(named):
            return task, named
        raise ValueError(f"no loss is known for {named}, which the configuration names in architectures: {known}")
    # The other heads of a model with an encoder and a decoder are those of one half of it.
    for task in (SPEECH, SEQ2SEQ) if config.is_encoder_decoder else TASKS:
        if names := _heads(task).get(config.model_type):
            return task, names[0]
    raise ValueError(f"no head with a loss is known for model_type {config.model_type!r}: {known}")


def _inputs(config, task: str, request: StepRequest) -> dict:
    if task == IMAGES:
        size = getattr(config, "image_size", None)
        images = request.images(getattr(config, "num_channels", 3), *([size] if size else []))
        return {"pixel_values": images, "labels": ids(request.batch_size)}
    shape = request.tokens()
    if task == SPEECH:
        frames, bands = (getattr(config, field, None) for field in ("max_source_positions", "num_mel_bins"))
        if not frames or not bands:
            raise ValueError(
                f"of the models from speech to text, ackpt plan knows those that read spectrograms as Whisper does; "
                f"{type(config).__name__} has no max_source_positions or num_mel_bins; {OWN}"
            )
        audio = torch.empty(request.batch_size, bands, 2 * frames, dtype=request.dtype)  # a convolution halves frames
        inputs = {"input_features": audio, "decoder_input_ids": ids(*shape), "labels": ids(*shape)}
        return {**inputs, "use_cache": False}
    if task == SEQUENCES:
        return {"input_ids": ids(*shape), "labels": ids(request.batch_size)}
    if task == SEQ2SEQ:
        return {"input_ids": ids(*shape), "decoder_input_ids": ids(*shape), "labels": ids(*shape), "use_cache": False}
    inputs: dict[str, Any] = {"input_ids": ids(*shape), "labels": ids(*shape)}
    return {**inputs, "use_cache": False} if task == CAUSAL else inputs


def _made(name: str, make):
    """The result of `make`; ValueError for any error, since transformers raises many kinds for wrong values."""
    try:
        return make()
    except Exception as error:
        raise ValueError(f"transformers refuses the configuration of {name}: {error}") from error


def training_step(request: StepRequest, device="meta") -> TrainingStep:
    """The model and its inputs, not filled, on `device`; ValueError for an unknown model or field, or a wrong size."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(request.dtype)
    try:
        with torch.device(device):
            if request.model.startswith(TRANSFORMERS):
                return transformers_step(request)
            if FROM_FILE in request.model:
                return _step_of_function(request)
            if request.model not in BUILT_IN:
                raise unknown_model(request.model, BUILT_IN)
            _, make, inputs = BUILT_IN[request.model]
            model = make(_changed(_published(request.model), request))
            return TrainingStep(model, inputs(model, request))
    finally:
        torch.set_default_dtype(default)


def _step_of_function(request: StepRequest) -> TrainingStep:
    """What the function in a file returns for the sizes and fields of a request: a model and its arguments."""
    path, _, name = request.model.rpartition(":")
    file = Path(path)
    spec = importlib.util.spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{request.model}: there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise ValueError(f"{request.model}: the file has no function {name!r}{did_you_mean(name, vars(module))}")
    sizes = {"batch_size": request.batch_size, "seq_len": request.seq_len, "image_size": request.image_size}
    arguments = {key: size for key, size in sizes.items() if size is not None} | request.fields
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{request.model} is called with {', '.join(arguments)} by name, but {error}") from error
    made: Any = function(**arguments)
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not (is_pair and isinstance(made[0], nn.Module) and isinstance(made[1], dict)):
        raise ValueError(
            f"{request.model} must return a model and a dict of the arguments of the call that returns its loss, got "
            f"{type(made).__name__}"
        )
    return TrainingStep(made[0].train(), made[1])


@functools.cache
def _published(name: str):
    """The configuration that --set changes, from a model on the meta device."""
    with unset_fake_temporarily(), torch.device("meta"):
        return BUILT_IN[name][0]().config


def _changed(config, request: StepRequest):
    require_known(request.fields, {item.name for item in dataclasses.fields(config)}, request.model)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in request.fields.items()}
    try:
        return dataclasses.replace(config, **fields)
    except TypeError as error:
        raise ValueError(f"--set: {error}") from error


class Autoencoder(Transformer):
    """The synthetic experiment's step as a call: the mean squared error between output and input."""

    def forward(self, x, cu_seqlens, max_seqlen):
        return F.mse_loss(super().forward(x, cu_seqlens, max_seqlen).float(), x)


def _packed_floats(model, request):
    batch, length = request.tokens()
    x = torch.empty(batch * length, model.config.dim, dtype=request.dtype)
    return {"x": x, "cu_seqlens": torch.empty(batch + 1, dtype=torch.int32), "max_seqlen": length}


def _packed_tokens(model, request):
    batch, length = request.tokens()
    offsets = torch.empty(batch + 1, dtype=torch.int32)
    tokens = {"tokens": ids(batch * length), "cu_seqlens": offsets, "max_seqlen": length}
    return {**tokens, "targets": ids(batch * length)}


# name -> a model with the configuration that --set changes, the model of a configuration, its inputs; the study adds
# its own
BUILT_IN = {
    "transformer": (lambda: Transformer(TransformerConfig()), Autoencoder, _packed_floats),
    "lm": (lambda: LanguageModel(TransformerConfig()), LanguageModel, _packed_tokens),
}

EIGHT_BIT = "adamw-8bit"
OptimizerKind = Callable[[Any], torch.optim.Optimizer]


def _adamw(**settings):
    """AdamW with settings that its constructor refuses for parameters on the meta device."""

    def make(parameters) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        for group in optimizer.param_groups:
            group.update(settings)
        return optimizer

    return make


OPTIMIZERS: dict[str, OptimizerKind | None] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": _adamw(fused=True),
    "adamw-for-loop": _adamw(foreach=False),
    EIGHT_BIT: torch.optim.AdamW,  # `planned_shapes` counts the bytes of its state by `eight_bit_bytes`
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "none": None,
}
UNSHARDED = ("adafactor", EIGHT_BIT)  # FSDP does not shard their state like the parameters


@functools.cache
def optimizer_kind(name: str) -> OptimizerKind | None:
    """The function that makes an optimizer by its name in `OPTIMIZERS` or as ``module:Class``; None for ``"none"``."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        if name not in OPTIMIZERS:
            raise ValueError(
                f"the state of optimizer {name!r} is not known{did_you_mean(name, OPTIMIZERS)}: choose from "
                f"{', '.join(OPTIMIZERS)}, or name a class as module:Class, such as torch.optim:NAdam"
            )
        return OPTIMIZERS[name]
    path = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))  # the module may be in the current folder
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"optimizer {name!r}: the module {module} cannot be imported ({error})") from error
    finally:
        sys.path[:] = path
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"optimizer {name!r}: {module} has no class {attribute} that is a torch.optim.Optimizer")

    def make(parameters) -> torch.optim.Optimizer:
        try:
            return kind(parameters)  # pyright: ignore[reportCallIssue]
        except (TypeError, ValueError) as error:
            raise ValueError(f"optimizer {name!r} cannot be created from parameters alone: {error}") from error

    make.__name__ = attribute
    return make
