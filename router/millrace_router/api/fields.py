"""What all models of requests are made of: numbers of a fixed width, and strictness."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from millrace_router.float32 import rounded

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1

UInt32 = Annotated[int, Field(ge=0, le=UINT32_MAX)]
UInt64 = Annotated[int, Field(ge=0, le=UINT64_MAX)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Float32 = Annotated[float, Field(allow_inf_nan=False), AfterValidator(rounded)]


class RequestModel(BaseModel):
    """Nothing is coerced, nothing changes later, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())
