"""Configs of models and recipes: what is allowed, how files are loaded, what a model costs."""

from sferic.config.base import Config, ConfigError, build
from sferic.config.loading import (
    apply_set,
    dump,
    load_model,
    load_recipe,
    model_names,
    recipe_names,
)
from sferic.config.model import BranchScale, DenseFFN, ModelConfig, MoEFFN
from sferic.config.recipe import (
    BatchSegment,
    Budget,
    DataConfig,
    LRSegment,
    OptimizerConfig,
    PretrainStage,
    Recipe,
    Stage,
    TokenizerConfig,
)
from sferic.config.schedule import batch_tokens_at, lr_at
from sferic.config.sizes import Sizes, sizes

__all__ = [
    "BatchSegment",
    "BranchScale",
    "Budget",
    "Config",
    "ConfigError",
    "DataConfig",
    "DenseFFN",
    "LRSegment",
    "MoEFFN",
    "ModelConfig",
    "OptimizerConfig",
    "PretrainStage",
    "Recipe",
    "Sizes",
    "Stage",
    "TokenizerConfig",
    "apply_set",
    "batch_tokens_at",
    "build",
    "dump",
    "load_model",
    "load_recipe",
    "lr_at",
    "model_names",
    "recipe_names",
    "sizes",
]
