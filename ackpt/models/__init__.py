"""Models: the Transformer of the experiments, written so that every byte of a step can be accounted for."""

from .transformer import PUBLISHED, Block, LanguageModel, RMSNorm, Transformer, TransformerConfig, attention

__all__ = ["PUBLISHED", "Block", "LanguageModel", "RMSNorm", "Transformer", "TransformerConfig", "attention"]
