"""vLLM through `LLM`, its own loop of steps: the CPU build in bench/.peers/vllm, or a GPU's in our own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from bench.peers.worker import Limits, Moments, Request, drive, main

MAX_BATCHED_TOKENS = 4096


class VllmEngine:
    """Steps `LLM.llm_engine` as `LLM.generate` does, and reads each step's output."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._run = 0

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Moments]:
        """See `Engine.run`."""
        self._run += 1
        return drive(self, requests, concurrency)

    def add(self, number: int, request: Request) -> None:
        """See `Stepping.add`."""
        parameters = SamplingParams(
            temperature=0,
            max_tokens=request.new_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=request.ids)
        self._engine.add_request(f"{self._run}/{number}", prompt, parameters)

    def step(self) -> Iterator[tuple[int, int, bool]]:
        """See `Stepping.step`."""
        for output in self._engine.step():
            number = int(output.request_id.partition("/")[2].partition("-")[0])
            yield number, len(output.outputs[0].token_ids), output.finished


def load(model: Path, limits: Limits, *, enforce_eager: bool = True) -> VllmEngine:
    """A model with prefix caching off, because each repetition sends the same prompts.

    `enforce_eager` leaves out graphs and compiled layers.
    """
    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=limits.max_tokens,
        max_num_seqs=limits.max_streams,
        max_num_batched_tokens=max(MAX_BATCHED_TOKENS, limits.max_tokens),
        enable_prefix_caching=False,
        enforce_eager=enforce_eager,
        disable_log_stats=True,
    )
    return VllmEngine(llm)


if __name__ == "__main__":
    main(load)
