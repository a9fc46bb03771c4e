"""KServe's open inference protocol, version 2: texts are tensors of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from millrace_router.api.fields import NullIs, RequestModel
from millrace_router.api.platforms.errors import NotUtf8
from millrace_router.api.tgi.request import GenerateParameters, sampling_parameters

BYTES = "BYTES"
Byte = Annotated[int, Field(ge=0, le=255)]


class KserveInput(RequestModel):
    """Texts: as the protocol has them, or one of them as the numbers of its UTF-8 bytes, as TGI has it.

    What `shape` and `datatype` say is not looked at: there is nothing but texts.
    """

    name: str
    shape: Annotated[list[int], Field(fail_fast=True)] | None = None
    datatype: str | None = None
    data: Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Byte], Field(fail_fast=True)]

    def texts(self) -> list[str]:
        """Raise NotUtf8 for bytes that are no text."""
        if texts := [text for text in self.data if isinstance(text, str)]:
            return texts
        try:
            return [bytes(byte for byte in self.data if isinstance(byte, int)).decode()]
        except UnicodeDecodeError as error:
            raise NotUtf8(str(error)) from None

    def answered(self, name: str, texts: Sequence[str]) -> KserveAnswerJson:
        """Render the answers to `texts` in the form of the questions."""
        if any(isinstance(item, str) for item in self.data):
            shape = [len(texts)]
            return {"name": name, "shape": shape, "datatype": BYTES, "data": list(texts)}
        data = list("".join(texts).encode())
        return {"name": name, "shape": [1, len(data)], "datatype": BYTES, "data": data}


class KserveOutput(RequestModel):
    """What the answer to an input is to be called."""

    name: str


class KserveRequest(RequestModel):
    """Body of `/v2/models/{model_name}/infer`."""

    id: str | None = None
    parameters: Annotated[GenerateParameters, NullIs(sampling_parameters)] = Field(
        default_factory=sampling_parameters
    )
    inputs: Annotated[list[KserveInput], Field(fail_fast=True)]
    outputs: Annotated[list[KserveOutput], Field(fail_fast=True)] | None = None
    """One for each input, if there are any; otherwise answers have the names of what they answer."""

    def output_names(self) -> list[str]:
        """Names of the answers, by input."""
        return [tensor.name for tensor in self.outputs or self.inputs]


class KserveAnswerJson(TypedDict):
    """A tensor of answers."""

    name: str
    shape: list[int]
    datatype: str
    data: list[str] | list[int]


class KserveResponseJson(TypedDict):
    """Answer of `/v2/models/{model_name}/infer`; `id` is the request's."""

    model_name: str
    model_version: NotRequired[str]
    id: NotRequired[str]
    outputs: list[KserveAnswerJson]


class KserveLiveJson(TypedDict):
    """Answer of `/v2/health/live`."""

    live: bool


class KserveReadyJson(KserveLiveJson):
    """Answer of `/v2/health/ready` and of a model's; TGI says `live` there, the protocol `ready`."""

    ready: bool
    name: NotRequired[str]
    """Of the model that was asked about."""


class KserveServerJson(TypedDict):
    """Answer of `/v2`."""

    name: str
    version: str
    extensions: list[str]


class KserveTensorJson(TypedDict):
    """What a tensor is to be."""

    name: str
    datatype: str
    shape: list[int]


class KserveModelJson(TypedDict):
    """Answer of `/v2/models/{model_name}`; TGI's are `name`, `version` and `extensions`, the protocol's the others."""

    name: str
    version: NotRequired[str]
    extensions: list[str]
    versions: list[str]
    platform: str
    inputs: list[KserveTensorJson]
    outputs: list[KserveTensorJson]
