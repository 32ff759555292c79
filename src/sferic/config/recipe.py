"""What a run is: a model, its tokenizer and data, and the stages that train it."""

import re
from collections import Counter
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from sferic.config.base import Config
from sferic.config.model import ModelConfig

Unit = Literal["steps", "tokens"]

# what a run writes beside the folders of its stages
RESERVED_NAMES = frozenset(
    {"data", "lock", "model", "profile", "recipe.json", "report.json", "tokenizer.json"}
)


class TokenizerConfig(Config):
    """Exactly one of: `vocab_size`, to train one on the training split, or `path`, to load one.

    `path` names a tokenizer.json.
    """

    vocab_size: PositiveInt | None = None
    path: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "TokenizerConfig":
        if (self.vocab_size is None) == (self.path is None):
            raise ValueError(
                f"vocab_size {self.vocab_size} and path {self.path}: give exactly one of them"
            )
        return self


class DataConfig(Config):
    """`corpus` is "stdlib" (the interpreter's own standard library) or a folder of text.

    `heldout` is the share of documents kept for validation.
    """

    corpus: str = "stdlib"
    heldout: float = Field(default=0.05, gt=0, le=0.5)


class LRSegment(Config):
    """The learning rate goes from the last segment's value (0 before the first) to `to`.

    "constant" jumps to `to` at once. `length` is in `unit`; None lasts to the end of the budget.
    """

    shape: Literal["linear", "cosine", "constant"]
    to: NonNegativeFloat
    length: PositiveInt | None = None
    unit: Unit = "steps"


class BatchSegment(Config):
    """`tokens` per optimizer step, for `length` of `unit` (None: to the end of the budget)."""

    tokens: PositiveInt
    length: PositiveInt | None = None
    unit: Unit = "steps"


class Budget(Config):
    """How long a stage lasts: exactly one of optimizer `steps` and training `tokens`."""

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "Budget":
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(
                f"steps {self.steps} and tokens {self.tokens}: give exactly one of them"
            )
        return self

    def length(self, unit: Unit) -> int | None:
        """The budget in `unit`, or None when it is given in the other one."""
        return self.steps if unit == "steps" else self.tokens


class OptimizerConfig(Config):
    """AdamW; `weight_decay` is for matrices only, `clip_norm` bounds the global gradient norm."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    weight_decay: NonNegativeFloat = 0.1
    eps: PositiveFloat = 1e-8
    clip_norm: PositiveFloat = 1.0


class Stage(Config):
    """What every kind of stage has.

    `seq_len` is the length of one pack in tokens, one micro-batch. `rope_base` overrides the
    model's. `validate_every` and `checkpoint_every` count optimizer steps. The run stops after
    `max_bad_steps` steps in a row whose loss or gradient isn't finite.
    """

    name: str
    seq_len: PositiveInt
    budget: Budget
    rope_base: PositiveFloat | None = None
    lr: tuple[LRSegment, ...] = Field(min_length=1)
    batch: tuple[BatchSegment, ...] = Field(min_length=1)
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    recompute: bool = False
    validate_every: PositiveInt
    checkpoint_every: PositiveInt
    keep_checkpoints: PositiveInt = 2
    max_bad_steps: PositiveInt = 5

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                "must serve as a folder name: a letter or digit, then letters, digits, . _ or -"
            )
        # some file systems take no notice of case; what is half written ends in .tmp
        if name.lower() in RESERVED_NAMES or name.lower().endswith(".tmp"):
            raise ValueError(
                f"a run keeps {', '.join(sorted(RESERVED_NAMES))} and *.tmp for itself; "
                "choose another name"
            )
        return name

    @field_validator("lr", "batch")
    @classmethod
    def _segments(
        cls, segments: tuple[LRSegment | BatchSegment, ...]
    ) -> tuple[LRSegment | BatchSegment, ...]:
        for index, segment in enumerate(segments[:-1]):
            if segment.length is None:
                raise ValueError(f"segment {index} needs a length; only the last may omit it")
        units = sorted({segment.unit for segment in segments})
        if len(units) > 1:
            raise ValueError(f"the segments' units are {' and '.join(units)}; use one for all")
        return segments

    @model_validator(mode="after")
    def _consistent(self) -> "Stage":
        for segment in self.batch:
            if segment.tokens % self.seq_len:
                raise ValueError(
                    f"a batch of {segment.tokens} tokens is not a multiple of seq_len "
                    f"{self.seq_len}; change one of them"
                )
        last = self.lr[-1]
        if (
            last.length is None
            and last.shape != "constant"
            and self.budget.length(last.unit) is None
        ):
            raise ValueError(
                f"the last lr segment lasts to the end of the budget, which is not in "
                f"{last.unit}; give the segment a length or the budget's unit"
            )
        return self


class PretrainStage(Stage):
    """Next-token training on packs of documents; those longer than a pack are cut."""

    kind: Literal["pretrain"]


class Recipe(Config):
    """A whole run. `prompt` is what the trained model continues at the end."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig = DataConfig()
    seed: Annotated[NonNegativeInt, Field(lt=2**63)] = 0
    stages: tuple[PretrainStage, ...] = Field(min_length=1)
    prompt: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        vocab = self.tokenizer.vocab_size
        if vocab is not None and vocab > self.model.vocab_size:
            raise ValueError(
                f"tokenizer.vocab_size {vocab} is more than model.vocab_size "
                f"{self.model.vocab_size}; lower it or raise the model's"
            )
        name, count = Counter(stage.name for stage in self.stages).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{count} stages are named {name!r}; give each its own name")
        return self
