"""Models the experiments train: written here, so that every byte of a step can be accounted for."""

from ackpt.models.transformer import (
    PUBLISHED,
    Block,
    LanguageModel,
    RMSNorm,
    Transformer,
    TransformerConfig,
    attention,
)

__all__ = ["PUBLISHED", "Block", "LanguageModel", "RMSNorm", "Transformer", "TransformerConfig", "attention"]
