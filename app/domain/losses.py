"""The losses by name, with the inputs and settings of each, and a custom loss as data. The formulas are in
workers/backends/training/losses/.

workers/backends/training/losses/custom.py runs the operations. Every operation is deterministic, reads only its
inputs (there is no `empty`), never writes in place, and stays in torch. A journalled loss may be replayed much later,
so names are added, never removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
"""Bounds of the probability ratio: settings for all tokens, or inputs [N], which override the settings."""
ENTROPY = "entropy"
"""A setting of every loss. A value other than 0 requests the metric `entropy:sum`, which costs a pass over the
logits."""

FUNCTION, METHOD = "call_function", "call_method"


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The specification of a loss. `inputs` are required per-token inputs, `optional` are optional ones; `config` holds
    the settings with their defaults. A datum without one of `ones` has ones, in the shape of its targets.

    `wide` losses also take [N, K] targets. A `critic` loss uses values instead of logprobs: it has no targets, and a
    forward may leave out any of its inputs, which then count as 0.
    """

    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)
    wide: bool = False
    critic: bool = False
    ones: tuple[str, ...] = ()


CUSTOM = "custom"
"""A loss that the client defines: the Op holds its graph, which names its further inputs."""
VALUE_CLIP = "value_clip"
"""The distance that a critic's value may move from the old value; beyond it the loss gains nothing."""

_ENTROPY = {ENTROPY: 0.0}
_POLICY = ("target_tokens", "logprobs", "advantages")
_PER_TOKEN = (CLIP_LOW, CLIP_HIGH)
_CLIP = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2, **_ENTROPY}
# A geometric mean over a sequence stays far closer to 1 than a token's ratio, so 0.8..1.2 would never clip it. The
# paper's own range is 3e-4 below 1 and 4e-4 above (arXiv 2507.18071 v2, section 5.1); TRL's docs give the same range.
_SEQUENCE_CLIP = {CLIP_LOW: 0.9997, CLIP_HIGH: 1.0004, **_ENTROPY}

LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(("target_tokens",), ("weights",), config=_ENTROPY, wide=True, ones=("weights",)),
    "importance_sampling": LossSpec(_POLICY, config=_ENTROPY),
    "ppo": LossSpec(_POLICY, _PER_TOKEN, config=_CLIP),
    "cispo": LossSpec(_POLICY, _PER_TOKEN, config=_CLIP),
    "dro": LossSpec(_POLICY, config={"beta": 0.05, **_ENTROPY}),
    "gspo": LossSpec((*_POLICY, "sequence_ratio_mask"), _PER_TOKEN, config=_SEQUENCE_CLIP),
    "ppo_critic": LossSpec(("values", "returns", "weights"), config={VALUE_CLIP: 0.2}, critic=True),
    CUSTOM: LossSpec(("target_tokens",), wide=True),
}


def losses_of(critic: bool) -> str:
    """The names of the losses of a critic, or of a policy, as text."""
    return ", ".join(name for name, spec in LOSSES.items() if spec.critic == critic)


NOT_OFFERED: Mapping[str, str] = {
    "stable_reinforce": (
        "its formula is proprietary: neither the SDK nor its documentation contains it, and it reads records that only "
        "the hosted service's sampler makes; set loss_fn=importance_sampling, or cispo or gspo for data from an older "
        "policy"
    )
}
"""Losses of the SDK that this server does not offer, each with the reason and an alternative."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """One input, given for every datum: `rank` 0 is a number, 1 is [T], 2 is [T, K]. `node` is its name in calls."""

    name: str
    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class LossCall:
    """One call in the graph. `kind` is FUNCTION or METHOD; `target` is one of FUNCTIONS or METHODS.

    An argument is None, a bool, int, float or str, a tuple (which represents a list), or a dict of one key: ref (the
    name of an earlier node), tuple, dict, slice, ellipsis, float, dtype, device, layout or memory_format.
    """

    name: str
    kind: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A custom loss. `inputs` starts with logprobs. `loss` and the values of `metrics` name nodes; the keys of
    `metrics` are custom/<name>:sum|mean. `budget` is the version of the costs that bound it (custom_budget.py): a loss
    that was journalled under an earlier one must replay as it ran."""

    name: str
    inputs: tuple[LossInput, ...]
    calls: tuple[LossCall, ...]
    loss: str
    metrics: Mapping[str, str]
    budget: int = 1

    @property
    def columns(self) -> dict[str, int]:
        """The loss_fn_inputs that each datum needs, with their ranks. logprobs have the shape of target_tokens."""
        return {"target_tokens": self.inputs[0].rank} | {given.name: given.rank for given in self.inputs[1:]}


BUDGET = 2
"""The budget of new losses."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPERATORS = _names(
    "abs add and_ eq floordiv ge getitem gt invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor"
)
"""Functions of Python's `operator`."""

MATH = _names("ceil exp expm1 floor log log1p sqrt")
"""Functions of Python's `math`, for numbers such as a size."""

ATTRIBUTES = _names("T device dtype indices mT ndim shape values")
"""Attributes that `getattr` may read."""

_EVERYWHERE = """
    abs add addcdiv addcmul all amax amin any argmax argmin argsort atan bmm ceil clamp clamp_max clamp_min clip cos
    cosh count_nonzero cummax cummin cumprod cumsum diff div divide dot eq erf erfc exp exp2 expm1 flatten flip floor
    fmax fmin fmod frac gather ge greater greater_equal gt hypot index_select isclose isfinite isinf isnan le lerp less
    less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not
    logical_or logical_xor logit logsumexp lt masked_fill matmul max maximum mean median min minimum mm mul multiply mv
    nan_to_num nanmean nansum narrow ne neg negative not_equal numel outer permute pow prod reciprocal relu remainder
    reshape roll round rsqrt scatter scatter_add select sigmoid sign sin sinh softmax sort sqrt square squeeze std sub
    subtract sum t take_along_dim tan tanh tile topk transpose tril triu true_divide trunc unsqueeze var where xlogy
"""

METHODS = _names(
    f"""{_EVERYWHERE}
    bool clone contiguous detach dim double expand expand_as float int long new_full new_ones new_zeros norm repeat
    reshape_as size to type_as view view_as
    """
)
"""Methods of torch.Tensor."""

_TORCH = f"""{_EVERYWHERE}
    arange broadcast_to cat concat concatenate full full_like linspace ones ones_like stack zeros zeros_like
"""

_FUNCTIONAL = """
    binary_cross_entropy binary_cross_entropy_with_logits elu huber_loss kl_div l1_loss leaky_relu log_softmax
    margin_ranking_loss mse_loss normalize pad relu silu smooth_l1_loss softmax softmin softsign
"""

FUNCTIONS = frozenset(
    {
        "getattr",
        "torch.functional.norm",
        *(f"operator.{name}" for name in OPERATORS),
        *(f"math.{name}" for name in MATH),
        *(f"torch.{name}" for name in _names(_TORCH)),
        *(f"torch.nn.functional.{name}" for name in _names(_FUNCTIONAL)),
        *(f"torch._C._nn.{name}" for name in _names("gelu log_sigmoid one_hot softplus")),
        *(f"torch._C._special.special_{name}" for name in _names("entr expit expm1 log1p logit logsumexp xlogy")),
    }
)
"""Functions by their qualified names, as torch.fx writes them: torch.nn.functional.logsigmoid is
torch._C._nn.log_sigmoid there."""

DTYPES = _names("bfloat16 bool float16 float32 float64 int16 int32 int64 int8 uint8")

TEXTS = _names("batchmean circular constant cpu floor fro mean none reflect replicate sum trunc")
"""Texts that an argument may be, in addition to the names in ATTRIBUTES. No other text changes the effect of an
operation here."""
