"""All flags of the shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from millrace_proto.flags import read_arguments, refuse
from millrace_shard.config.device import DeviceFlags
from millrace_shard.config.logs import LogFlags
from millrace_shard.config.place import PlaceFlags
from millrace_shard.config.requests import RequestFlags
from millrace_shard.config.weights import WeightFlags


class ShardConfig(
    # The help shows the flags of the last class first.
    LogFlags,
    RequestFlags,
    WeightFlags,
    DeviceFlags,
    PlaceFlags,
    BaseSettings,
):
    """The settings of a shard. Environment variables have the field names in capitals; flags override them."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        # No warning about the name of `model_folder`.
        protected_namespaces=(),
    )

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> Self:
        """Read the command line and the environment; exit 2 with a message when either is wrong."""
        values = read_arguments(
            cls.model_fields,
            argv,
            program="millrace-shard serve",
            description=cls.__doc__,
            positional="model_folder",
        )
        try:
            # An empty value counts as absent.
            return cls(**{name: value for name, value in values.items() if value != ""})
        except ValidationError as error:
            refuse(error.errors())
