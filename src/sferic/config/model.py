"""What a model is: its shape, its norms and scales, and which slice of a deeper model it is."""

from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from sferic.config.base import Config

Mixer = Literal["lightning", "softmax"]


class BranchScale(Config):
    """One positive factor per kind of residual branch."""

    lightning: PositiveFloat
    softmax: PositiveFloat
    ffn: PositiveFloat

    @classmethod
    def uniform(cls, value: float) -> "BranchScale":
        """The same factor for every kind of branch."""
        return cls(lightning=value, softmax=value, ffn=value)


class DenseFFN(Config):
    """A SwiGLU feed-forward layer of width `size`."""

    kind: Literal["dense"]
    size: PositiveInt


class MoEFFN(Config):
    """A mixture of SwiGLU experts of width `size`, `top_k` of them per token.

    `capacity_factor` bounds the tokens of one expert in training; None drops no token.
    `aux_norm` is the scale of the load-balancing loss: "paper" is arXiv 2501.08313 taken
    literally, "switch" is num_experts²/top_k larger.
    """

    kind: Literal["moe"]
    size: PositiveInt
    num_experts: PositiveInt
    top_k: PositiveInt
    capacity_factor: PositiveFloat | None = None
    aux_coef: NonNegativeFloat = 0.01
    aux_norm: Literal["paper", "switch"] = "switch"

    @model_validator(mode="after")
    def _enough_experts(self) -> "MoEFFN":
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} is more than num_experts {self.num_experts}; "
                f"use at most {self.num_experts}"
            )
        return self


def _residual_scale(data: dict[str, Any]) -> BranchScale:
    return BranchScale.uniform((2 * data["depth"]) ** 0.25 if data["norm"] == "post" else 1.0)


def _init_gain(data: dict[str, Any]) -> float:
    return (8 * data["depth"]) ** -0.25 if data["norm"] == "post" else 1.0


class ModelConfig(Config):
    """A hybrid decoder (arXiv 2501.08313 §2). Every instance holds resolved numbers.

    `layer_pattern` repeats over the absolute layer index. `norm` "post" is DeepNorm: the
    residual is taken from the normed input, scaled by `residual_scale` (2·depth)^0.25, and
    weights start with gain (8·depth)^-0.25; "pre" has 1.0 for both. `branch_scale` multiplies
    a branch's output. `mixer_norm_eps` belongs to the norm on lightning attention's output.
    A slice of a deeper model gives that model's `depth` and its own `first_layer`.
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    layer_pattern: tuple[Mixer, ...] = Field(
        default=("lightning",) * 7 + ("softmax",), min_length=1
    )
    ffn: DenseFFN | MoEFFN = Field(discriminator="kind")
    rope_dim: PositiveInt = Field(default_factory=lambda data: data["head_dim"] // 2)
    rope_base: PositiveFloat = 10_000.0
    norm: Literal["post", "pre"] = "post"
    norm_eps: PositiveFloat = 1e-5
    mixer_norm_eps: PositiveFloat = 1e-6
    depth: PositiveInt = Field(default_factory=lambda data: data["num_layers"])
    first_layer: NonNegativeInt = 0
    residual_scale: BranchScale = Field(default_factory=_residual_scale)
    branch_scale: BranchScale = BranchScale.uniform(1.0)
    init_gain: PositiveFloat = Field(default_factory=_init_gain)

    @model_validator(mode="after")
    def _consistent(self) -> "ModelConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}"
            )
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(
                f"rope_dim {self.rope_dim} must be even and at most head_dim {self.head_dim}"
            )
        if self.first_layer + self.num_layers > self.depth:
            raise ValueError(
                f"first_layer {self.first_layer} + num_layers {self.num_layers} is more than "
                f"depth {self.depth}; depth counts the layers of the whole model"
            )
        if self.ffn.kind == "moe" and (self.hidden_size % 8 or self.ffn.size % 8):
            raise ValueError(
                f"hidden_size {self.hidden_size} and ffn.size {self.ffn.size} must be multiples "
                "of 8 with experts: their grouped product reads rows of 16 bytes"
            )
        return self

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer held here, first to last."""
        first, pattern = self.first_layer, self.layer_pattern
        return tuple(pattern[(first + i) % len(pattern)] for i in range(self.num_layers))

    @property
    def num_lightning(self) -> int:
        """Number of lightning layers held here."""
        return self.mixers.count("lightning")

    @property
    def num_softmax(self) -> int:
        """Number of softmax layers held here."""
        return self.mixers.count("softmax")
