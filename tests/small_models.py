"""The models that planned steps are tested on, at the smallest sizes that still have every kind of operation."""

import torch
import transformers
from torch import nn

from ackpt.models import LanguageModel, Transformer, TransformerConfig
from experiments.models import BertConfig, BertForMaskedLM, ResNet, ResNetConfig

WORDS, LENGTH = 40, 8
_SIZES = TransformerConfig(dim=16, ff_dim=32, layers=1, head_dim=8, vocab_size=WORDS)
_OFFSETS = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)


def ids(*shape):
    return torch.randint(WORDS, shape or (2, LENGTH))


class Classifier(nn.Module):
    """The Transformer under dropout, with a loss; it takes its input as it comes."""

    def __init__(self):
        super().__init__()
        self.dropout, self.body, self.head = nn.Dropout(0.2), Transformer(_SIZES), nn.Linear(16, 5)
        self.register_buffer("offsets", _OFFSETS.clone(), persistent=False)  # a capture cannot read a constant's values

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.body(self.dropout(x), self.offsets, LENGTH)), labels)


def language_model():
    tokens = ids(2 * LENGTH)
    return LanguageModel(_SIZES), (tokens, _OFFSETS, LENGTH), {"targets": tokens.roll(-1)}


def transformer():
    return Classifier(), (torch.randn(2 * LENGTH, 16), torch.randint(5, (2 * LENGTH,))), {}


def resnet():
    model = ResNet(ResNetConfig("basic", (1, 1, 1, 1), width=4, num_classes=5))
    return model, (torch.randn(2, 3, 32, 32), torch.randint(5, (2,))), {}


def bert():
    config = BertConfig(dim=16, layers=1, heads=2, ff_dim=32, vocab_size=WORDS, positions=LENGTH, dropout=0.1)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return BertForMaskedLM(config), (ids(), mask), {"labels": ids()}


def gpt2():
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    tokens = ids()
    return transformers.GPT2LMHeadModel(config), (), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def hf_resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5, layer_type="basic"
    )
    model = transformers.ResNetForImageClassification(config)
    return model, (), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(5, (2,))}


MODELS = {
    "language model": language_model,
    "transformer": transformer,
    "resnet": resnet,
    "bert": bert,
    "hf gpt2": gpt2,
    "hf resnet": hf_resnet,
}


def build(name):
    """``(model, args, kwargs)`` of a name in `MODELS`, the same ones every time, in training mode."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    return model.train(), args, kwargs


def loss_of(outputs):
    return outputs["loss"] if isinstance(outputs, dict) else outputs
