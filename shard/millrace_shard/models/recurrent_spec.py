"""Values that describe recurrent layers, before they are split over ranks; they compute nothing."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_shard.kernels.states import StateLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """A gated delta net, which ranks share by key heads; each serves as many value heads."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    kernel: int
    """Inputs of the convolution."""
    eps: float
    by_head: bool
    """Whether one module projects to queries, keys, values and gates by key heads; otherwise kind by kind."""
    module: str = "linear_attn"
    out: str = "out_proj"

    @property
    def shared(self) -> str:
        """What ranks share, in words."""
        return f"{self.num_keys} recurrent key heads"

    def splits(self, ranks: int) -> bool:
        return self.num_keys % ranks == 0

    @property
    def outputs(self) -> dict[str, int]:
        """The outputs of each projection, by its module in `module`."""
        keys, values = self.num_keys * self.key_dim, self.num_values * self.value_dim
        if self.by_head:
            return {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * self.num_values}
        small = dict.fromkeys(("in_proj_b", "in_proj_a"), self.num_values)
        return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, **small}

    def rank_outputs(self, ranks: int) -> set[int]:
        """The outputs of a rank's projections."""
        return {count // ranks for count in self.outputs.values()}

    @property
    def inner(self) -> int:
        """Inputs of the output projection."""
        return self.num_values * self.value_dim

    @property
    def biases(self) -> tuple[str, ...]:
        """Ends of the names of its biases in `module`."""
        return ("dt_bias",)

    def state_layer(self, ranks: int) -> StateLayer:
        """The shape of a page on each rank."""
        keys, values = self.num_keys // ranks, self.num_values // ranks
        channels = 2 * keys * self.key_dim + values * self.value_dim
        state = values, self.key_dim, self.value_dim
        return StateLayer(self.kernel - 1, channels, state, 2 * values)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec:
    """Kimi Delta Attention, which ranks share by heads; decays are by channel, and made of few, as gates are."""

    num_heads: int
    head_dim: int
    """Channels of keys and values, and those that decays and gates are made of."""
    kernel: int
    eps: float
    module: str = "self_attn"
    out: str = "o_proj"

    @property
    def shared(self) -> str:
        return f"{self.num_heads} recurrent heads"

    def splits(self, ranks: int) -> bool:
        return self.num_heads % ranks == 0

    @property
    def outputs(self) -> dict[str, int]:
        heads = dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.inner)
        return heads | {
            "f_a_proj": self.head_dim,
            "g_a_proj": self.head_dim,
            "b_proj": self.num_heads,
        }

    @property
    def second_outputs(self) -> dict[str, int]:
        """The outputs of projections of `head_dim` channels, by module."""
        return dict.fromkeys(("f_b_proj", "g_b_proj"), self.inner)

    def rank_outputs(self, ranks: int) -> set[int]:
        return {3 * self.inner // ranks, 2 * self.head_dim, self.num_heads // ranks}

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def biases(self) -> tuple[str, ...]:
        return ("dt_bias",)

    def state_layer(self, ranks: int) -> StateLayer:
        heads, inner = self.num_heads // ranks, self.inner // ranks
        state = heads, self.head_dim, self.head_dim
        return StateLayer(self.kernel - 1, 3 * inner, state, inner + heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A convolution over the products of two gates' inputs, which ranks share by channels, as in LFM2."""

    channels: int
    kernel: int
    bias: bool
    module: str = "conv"
    out: str = "out_proj"

    @property
    def shared(self) -> str:
        return f"{self.channels} channels of convolutions"

    def splits(self, ranks: int) -> bool:
        return self.channels % ranks == 0

    @property
    def outputs(self) -> dict[str, int]:
        return {"in_proj": 3 * self.channels}

    def rank_outputs(self, ranks: int) -> set[int]:
        return {count // ranks for count in self.outputs.values()}

    @property
    def inner(self) -> int:
        return self.channels

    @property
    def biases(self) -> tuple[str, ...]:
        return ("in_proj.", "conv.", "out_proj.") if self.bias else ()

    def state_layer(self, ranks: int) -> StateLayer:
        return StateLayer(self.kernel - 1, self.channels // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNormSpec:
    """The norm of the heads of each group, and a gate."""

    eps: float
    gate_first: bool = True
    """Whether the gate is multiplied before the norm."""
    wide: bool = False
    """Whether weight and gate are multiplied in float32, before the result is rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """A Mamba-2 layer, which ranks share by heads (arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of heads; all heads of a group have the same input and output matrices."""
    state_dim: int
    kernel: int
    norm: GatedNormSpec | None
    """None: the gate only."""
    conv_bias: bool
    bias: bool
    """Of the projection of inputs."""
    out_bias: bool
    limits: tuple[float, float]
    """Of the step sizes."""
    multipliers: tuple[float, ...] = (1.0,) * 5
    """Of what inputs are projected to: gates, values, input matrices, output matrices and step sizes."""
    module: str = "mamba"
    out: str = "out_proj"

    @property
    def shared(self) -> str:
        return f"{self.num_heads} Mamba heads in {self.num_groups} groups"

    def splits(self, ranks: int) -> bool:
        return self.num_heads % ranks == 0 and (
            self.num_groups == 1 or self.num_groups % ranks == 0
        )

    @property
    def outputs(self) -> dict[str, int]:
        width = self.num_groups * self.state_dim
        return {"in_proj": 2 * self.inner + 2 * width + self.num_heads}

    def rank_outputs(self, ranks: int) -> set[int]:
        width = max(1, self.num_groups // ranks) * self.state_dim
        return {(2 * self.inner + self.num_heads) // ranks + 2 * width}

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def biases(self) -> tuple[str, ...]:
        biases = {"in_proj.": self.bias, "out_proj.": self.out_bias, "conv1d.": self.conv_bias}
        return ("dt_bias", *(name for name, is_there in biases.items() if is_there))

    def state_layer(self, ranks: int) -> StateLayer:
        heads, groups = self.num_heads // ranks, max(1, self.num_groups // ranks)
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        state = heads, self.state_dim, self.head_dim
        return StateLayer(self.kernel - 1, channels, state, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Spec:
    """A Mamba layer, which ranks share by channels (arXiv 2312.00752)."""

    channels: int
    state_dim: int
    rank: int
    """Channels that step sizes are made of."""
    kernel: int
    conv_bias: bool
    bias: bool
    """Of the projections of inputs and of results."""
    norm_eps: float | None
    """Of norms without weights over what steps are made of, and over each matrix; None: there are none."""
    module: str = "mixer"
    out: str = "out_proj"

    @property
    def shared(self) -> str:
        return f"{self.channels} Mamba channels"

    def splits(self, ranks: int) -> bool:
        return self.channels % ranks == 0

    @property
    def outputs(self) -> dict[str, int]:
        return {"in_proj": 2 * self.channels}

    @property
    def made(self) -> int:
        """Outputs of the projection of channels: what steps are made of, and two matrices."""
        return self.rank + 2 * self.state_dim

    def rank_outputs(self, ranks: int) -> set[int]:
        return {2 * self.channels // ranks}

    @property
    def inner(self) -> int:
        return self.channels

    @property
    def biases(self) -> tuple[str, ...]:
        biases = {"in_proj.": self.bias, "out_proj.": self.bias, "conv1d.": self.conv_bias}
        return ("dt_proj.", *(name for name, is_there in biases.items() if is_there))

    def state_layer(self, ranks: int) -> StateLayer:
        own = self.channels // ranks
        return StateLayer(self.kernel - 1, own, (self.state_dim, own))


RecurrentSpec = DeltaNetSpec | KimiDeltaSpec | ShortConvSpec | Mamba2Spec | Mamba1Spec
