"""The limits of one request, and the differences between this server's behaviour and TGI's."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from millrace_router.request.request import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Switches that are off in this server's own dialect and on in TGI's, which `--strict-tgi` selects."""

    clamps_new_tokens: bool = False
    """A request whose `max_new_tokens` do not fit gets as many as fit, instead of a refusal."""
    ignores_adapters: bool = False
    """A request for an unknown adapter is answered by the base model, instead of a refusal."""
    needs_properties: bool = False
    """A schema without `properties` at its top is refused."""
    refuses_full_top_p: bool = False
    """OpenAI's `top_p` of 1 is refused, instead of meaning no restriction."""
    has_tgi_penalties: bool = False
    """OpenAI's penalties work as TGI's, over the prompt and the answer."""
    refuses_tools_with_format: bool = False
    """A chat has either `tools` or a `response_format`."""
    takes_all_roles: bool = False
    """A message may have a role that neither clients nor the template know, instead of a refusal."""
    hides_unused_tools: bool = False
    """With `tool_choice` none the prompt of a chat lacks its tools."""
    reads_images: bool = False
    """The model reads images. Not a difference to TGI: it depends on the model."""
    lacks_encoder: bool = False
    """The model would read images, and only the file with their encoder is missing. It depends on the model, too."""
    takes_images: bool = False
    """Images become markdown links in the prompt, instead of a refusal."""
    keeps_stops: bool = False
    """Stop strings stay in the text of OpenAI's answers, which then end with `stop_sequence`."""
    shows_special_tokens: bool = False
    """Streams of text completions contain special tokens."""
    has_tgi_reasons: bool = False
    """Text completions end with TGI's finish reasons, and chunks before the end have an empty one."""
    repeats_role: bool = False
    """Every chunk of a chat has the role, instead of a separate first chunk."""
    numbers_calls: bool = False
    """Calls have numbers as ids."""
    stops_after_calls: bool = False
    """An answer that ends with calls has the finish reason `stop`."""
    hides_ids: bool = False
    """The ids of OpenAI's answers are empty."""
    has_tgi_errors: bool = False
    """OpenAI's routes answer errors in TGI's form; a body that cannot be read gets its error as plain text."""
    opens_failed_streams: bool = False
    """A stream that fails before its first event has status 200 and the error as its only event."""
    counts_chats_twice: bool = False
    """OpenAI's routes and Vertex AI's count a request once more in the metrics."""
    hides_platform_errors: bool = False
    """KServe and Vertex AI answer every failure with one text."""
    ignores_foreign_fields: bool = False
    """Fields of other servers that would change the answer are ignored, instead of a refusal."""
    limits_vertex_parameters: bool = False
    """Vertex AI's texts take only the parameters `max_new_tokens` and `seed`."""


MILLRACE = Dialect()
OF_MODEL = ("reads_images", "lacks_encoder")
TGI = Dialect(
    **dict.fromkeys((each.name for each in fields(Dialect) if each.name not in OF_MODEL), True)
)
NO_ENCODER = "no file with its encoder of images is read; --mmproj FILE names one at the start"


def dialect_of(
    *, strict_tgi: bool, reads_images: bool = False, lacks_encoder: bool = False
) -> Dialect:
    """Return the dialect that the flag selects, for a model that reads images or only text."""
    dialect = TGI if strict_tgi else MILLRACE
    if not (reads_images or lacks_encoder):
        return dialect
    return replace(dialect, reads_images=reads_images, lacks_encoder=lacks_encoder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds of a request, in TGI's names."""

    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int
    """Tokens of the model: ids are smaller than this."""
    default_max_new_tokens: int | None = None
    """Not in TGI: most new tokens of a request that names no limit; None for the route's default."""
    strict_max_tokens: bool = False
    """Not in TGI: whether a chat with more new tokens than fit is refused, instead of getting as many as fit."""
    max_new_tokens_limit: int | None = None
    """Not in TGI: most new tokens that a request may name."""
    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_n: int = 16
    """Not in TGI: choices of one prompt on the OpenAI routes."""
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    prefill_logprobs: bool = False
    """Whether the shards report log probabilities of prompts."""
    grammars: bool = False
    """Whether the shards support grammars and the configuration allows them."""
    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    image_token_id: int | None = None
    """The placeholder of a picture; None for a model that reads only text."""
    whole_prompts: bool = False
    """Whether tokens of a prompt attend to later ones of it, so that blocks are shared only by equal prompts."""
    dialect: Dialect = MILLRACE

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for an answer."""
        return min(self.max_input_tokens, self.max_total_tokens - 1)
