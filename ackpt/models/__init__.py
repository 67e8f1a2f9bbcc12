"""Models: those that ``ackpt plan`` knows by name, written so that every byte of a step can be accounted for."""

from .bert import Bert, BertBlock, BertConfig, BertForMaskedLM, bert_base, bert_large
from .resnet import BasicBlock, Bottleneck, ResNet, ResNetConfig, resnet18, resnet50, resnet152
from .transformer import PUBLISHED, Block, LanguageModel, RMSNorm, Transformer, TransformerConfig, attention
from .unet import UNet, UNetConfig

__all__ = [
    "PUBLISHED",
    "BasicBlock",
    "Bert",
    "BertBlock",
    "BertConfig",
    "BertForMaskedLM",
    "Block",
    "Bottleneck",
    "LanguageModel",
    "RMSNorm",
    "ResNet",
    "ResNetConfig",
    "Transformer",
    "TransformerConfig",
    "UNet",
    "UNetConfig",
    "attention",
    "bert_base",
    "bert_large",
    "resnet18",
    "resnet50",
    "resnet152",
]
