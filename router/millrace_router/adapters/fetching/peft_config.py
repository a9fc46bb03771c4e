"""PEFT's `adapter_config.json`: each field is applied, has no effect here, or is refused by name."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.source_files import CONFIG_FILE, JsonObject, parse_object
from millrace_router.errors import quoted

MAX_PATTERNS = 10_000
MAX_PATTERN_LENGTH = 512
MAX_RANK = 1 << 16
MAX_ALPHA = 1e9
DEFAULT_RANK = 8
DEFAULT_ALPHA = 8

APPLIED = frozenset(
    {
        *("peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern"),
        *("use_rslora", "target_modules", "bias", "init_lora_weights", "lora_bias"),
    }
)
WITHOUT_EFFECT = frozenset(
    {
        # What the base is, and which layers have tensors.
        *("base_model_name_or_path", "revision", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "fan_in_fan_out", "auto_mapping", "peft_version"),
        # How the adapter was trained.
        *("lora_dropout", "inference_mode", "loftq_config", "eva_config", "corda_config"),
        "lora_ga_config",
        # These count only with `megatron_config` and `use_qalora`, and PEFT writes their defaults into every file.
        *("megatron_core", "qalora_group_size"),
    }
)
OTHER_MATHEMATICS = "stands for other mathematics than LoRA's, which is not supported"
REFUSED = {
    "modules_to_save": "replaces whole layers of the model, which is not supported",
    "use_dora": "is set: DoRA is not supported",
    "trainable_token_indices": "changes the embeddings of tokens, which is not supported",
    "ensure_weight_tying": "changes the embeddings of tokens, which is not supported",
    "target_parameters": "changes parameters that are no linear layers, which is not supported",
    "layer_replication": "uses layers of the model twice, which is not supported",
    "alora_invocation_tokens": "is set: activated LoRA is not supported",
    "use_bdlora": "is set: block-diagonal LoRA is not supported",
    **dict.fromkeys(
        (
            *("use_qalora", "arrow_config", "kasa_config", "monteclora_config"),
            *("velora_config", "megatron_config"),
        ),
        OTHER_MATHEMATICS,
    ),
}
UNKNOWN = "is not known, and may change what the weights mean"
HARMLESS_BEGINNINGS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Values of `init_lora_weights` that leave the base as it is."""
CONVERT = (
    "PEFT changed the base model when training began; save the adapter with"
    " path_initial_model_for_weight_conversion"
)


TASKS = frozenset((None, "CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM"))
"""Tools write the last two for decoders as well; they change nothing of the tensors."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A key of `rank_pattern` or `alpha_pattern`, and its value."""

    expression: re.Pattern[str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The meaning of the fields for the weights."""

    rank: int
    alpha: float
    rank_pattern: tuple[Pattern, ...] = ()
    alpha_pattern: tuple[Pattern, ...] = ()
    use_rslora: bool = False
    lora_bias: bool = False
    target_names: tuple[str, ...] = ()
    """The list in `target_modules`; empty for a regular expression, where the tensors decide."""

    @classmethod
    def parse(cls, data: bytes) -> PeftConfig:
        """Read the file's text; raises Invalid, naming the field."""
        config = parse_object(data, what=CONFIG_FILE)
        if config.get("peft_type") is None:
            raise Invalid(f"the field peft_type of {CONFIG_FILE} is missing")
        _expect(config, "peft_type", {"LORA"}, "is another method than LoRA")
        _expect(config, "task_type", TASKS, "is another task than CAUSAL_LM")
        _expect(
            config, "bias", {None, "none"}, "replaces biases of the model, which is not supported"
        )
        for field, value in config.items():
            if field not in APPLIED | WITHOUT_EFFECT and not _is_nothing(value):
                raise Invalid(_refusal(field, value))
        _check_beginning(config.get("init_lora_weights"))
        return cls(
            rank=_rank("r", config.get("r", DEFAULT_RANK)),
            alpha=_alpha("lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA)),
            rank_pattern=_patterns(config, "rank_pattern", _rank),
            alpha_pattern=_patterns(config, "alpha_pattern", _alpha),
            use_rslora=_flag(config, "use_rslora"),
            lora_bias=_flag(config, "lora_bias"),
            target_names=_target_names(config.get("target_modules")),
        )

    def rank_of(self, module: str) -> int:
        """Rank of a module by the name that it was trained with."""
        return int(_first_match(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Factor of a module's delta."""
        rank, alpha = self.rank_of(module), _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def missing_targets(self, modules: Iterable[str]) -> list[str]:
        """Names in `target_modules` that no module has or ends with."""
        ends: set[str] = set()
        for module in modules:
            parts = module.split(".")
            ends.update(".".join(parts[start:]) for start in range(len(parts)))
        return [name for name in self.target_names if name not in ends]


def _refusal(field: str, value: object) -> str:
    reason = REFUSED.get(field, UNKNOWN)
    names = value if field == "modules_to_save" and isinstance(value, list) else ()
    listed = f" ({', '.join(quoted(str(name)) for name in names[:8])})" if names else ""
    name = field if field in REFUSED else quoted(field)
    return f"the field {name}{listed} of {CONFIG_FILE} {reason}"


def _is_nothing(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _expect(
    config: JsonObject, field: str, allowed: Collection[str | None], otherwise: str
) -> None:
    value = config.get(field)
    if not isinstance(value, str | None) or value not in allowed:
        raise Invalid(f"the field {field} of {CONFIG_FILE}, {quoted(str(value))}, {otherwise}")


def _check_beginning(value: object) -> None:
    is_harmless = isinstance(value, str) and value in HARMLESS_BEGINNINGS
    if not is_harmless and not isinstance(value, bool | None):
        raise Invalid(
            f"the field init_lora_weights of {CONFIG_FILE}, {quoted(str(value))}, is relative to another model:"
            f" {CONVERT}"
        )


def _flag(config: JsonObject, field: str) -> bool:
    value = config.get(field)
    if not isinstance(value, bool | None):
        raise Invalid(f"the field {field} of {CONFIG_FILE} is neither true nor false")
    return bool(value)


def _rank(field: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise Invalid(f"the field {field} of {CONFIG_FILE} is not a rank from 1 to {MAX_RANK}")
    return value


def _alpha(field: str, value: object) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_ALPHA:  # type: ignore[arg-type]
        raise Invalid(f"the field {field} of {CONFIG_FILE} is not a number up to {MAX_ALPHA:g}")
    return float(value)  # type: ignore[arg-type]


def _target_names(value: object) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Invalid(
            f"the field target_modules of {CONFIG_FILE} is neither text nor a list of texts"
        )
    return tuple(value)


def _patterns(
    config: JsonObject, field: str, read: Callable[[str, object], float]
) -> tuple[Pattern, ...]:
    value = config.get(field)
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise Invalid(f"the field {field} of {CONFIG_FILE} is not an object")
    if len(value) > MAX_PATTERNS:
        raise Invalid(f"the field {field} of {CONFIG_FILE} has more than {MAX_PATTERNS} keys")
    return tuple(
        Pattern(_expression(field, key), read(f"{field}[{quoted(key)}]", number))
        for key, number in value.items()
    )


def _expression(field: str, key: str) -> re.Pattern[str]:
    """PEFT's rule: the key matches a whole name, or the end of one after a dot."""
    if len(key) > MAX_PATTERN_LENGTH:
        raise Invalid(
            f"a key of the field {field} of {CONFIG_FILE} is longer than {MAX_PATTERN_LENGTH}"
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError):
        raise Invalid(
            f"the key {quoted(key)} of the field {field} of {CONFIG_FILE} is no regular expression"
        ) from None


def _first_match(patterns: Iterable[Pattern], module: str, default: float) -> float:
    return next((one.value for one in patterns if one.expression.match(module)), default)
