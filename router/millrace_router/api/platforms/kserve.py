"""KServe's open inference protocol, version 2: texts are tensors of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from millrace_router.api.body.fields import NullIs, RequestModel
from millrace_router.api.platforms.errors import NotUtf8
from millrace_router.api.tgi.request import GenerateParameters, sampling_parameters

BYTES = "BYTES"
Byte = Annotated[int, Field(ge=0, le=255)]


class KserveInput(RequestModel):
    """Texts as the protocol has them, or one text as the numbers of its UTF-8 bytes, as TGI has it.

    `shape` and `datatype` are ignored, because every tensor holds texts.
    """

    name: str
    shape: Annotated[list[int], Field(fail_fast=True)] | None = None
    datatype: str | None = None
    data: Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Byte], Field(fail_fast=True)]

    def texts(self) -> list[str]:
        """Return the texts; raises NotUtf8."""
        if texts := [text for text in self.data if isinstance(text, str)]:
            return texts
        try:
            return [bytes(byte for byte in self.data if isinstance(byte, int)).decode()]
        except UnicodeDecodeError as error:
            raise NotUtf8(str(error)) from None

    def answered(self, name: str, texts: Sequence[str]) -> KserveAnswerJson:
        """Render answers in the form of the input."""
        if any(isinstance(item, str) for item in self.data):
            shape = [len(texts)]
            return {"name": name, "shape": shape, "datatype": BYTES, "data": list(texts)}
        data = list("".join(texts).encode())
        return {"name": name, "shape": [1, len(data)], "datatype": BYTES, "data": data}


class KserveOutput(RequestModel):
    """The name of the answer to an input."""

    name: str


class KserveRequest(RequestModel):
    """Body of `/v2/models/{model_name}/infer`."""

    id: str | None = None
    parameters: Annotated[GenerateParameters, NullIs(sampling_parameters)] = Field(
        default_factory=sampling_parameters
    )
    inputs: Annotated[list[KserveInput], Field(fail_fast=True)]
    outputs: Annotated[list[KserveOutput], Field(fail_fast=True)] | None = None
    """One for each input; without them the answers have the names of the inputs."""

    def output_names(self) -> list[str]:
        """Return the names of the answers, by input."""
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
    """Answer of `/v2/health/ready` and of a model's `ready`; TGI has `live` there, the protocol `ready`."""

    ready: bool
    name: NotRequired[str]
    """Name of the model in the path."""


class KserveServerJson(TypedDict):
    """Answer of `/v2`."""

    name: str
    version: str
    extensions: list[str]


class KserveTensorJson(TypedDict):
    """Description of a tensor."""

    name: str
    datatype: str
    shape: list[int]


class KserveModelJson(TypedDict):
    """Answer of `/v2/models/{model_name}`; TGI has `name`, `version` and `extensions`, the protocol has the others."""

    name: str
    version: NotRequired[str]
    extensions: list[str]
    versions: list[str]
    platform: str
    inputs: list[KserveTensorJson]
    outputs: list[KserveTensorJson]
