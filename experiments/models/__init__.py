"""The models that only the study trains: ResNet, BERT, the U-Net of Stable Diffusion XL, and their training steps."""

from . import steps as steps  # adds the models to those that the planner knows by name
from .bert import Bert, BertBlock, BertConfig, BertForMaskedLM, bert_base, bert_large
from .resnet import BasicBlock, Bottleneck, ResNet, ResNetConfig, resnet18, resnet50, resnet152
from .unet import UNet, UNetConfig

__all__ = [
    "BasicBlock",
    "Bert",
    "BertBlock",
    "BertConfig",
    "BertForMaskedLM",
    "Bottleneck",
    "ResNet",
    "ResNetConfig",
    "UNet",
    "UNetConfig",
    "bert_base",
    "bert_large",
    "resnet152",
    "resnet18",
    "resnet50",
]
