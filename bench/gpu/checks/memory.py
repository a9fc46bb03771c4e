"""A full KV cache whose rows use every part of sampling: the peak of memory in service against the warm-up's."""

from __future__ import annotations

import torch

from bench.gpu.engine.scale import Scale
from bench.gpu.engine.session import Session, opened
from bench.gpu.figures import check
from bench.gpu.setting import Emit, Setting
from millrace_proto.sampling import Sampling
from millrace_shard.device.failures import is_out_of_memory

EVERYTHING = Sampling(
    temperature=0.9,
    top_p=0.9,
    typical_p=0.95,
    top_k=4000,
    min_p=0.001,
    do_sample=True,
    seed=1,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    presence_penalty=0.1,
)
NUM_STEPS = 8
GIB = 2**30


def run(setting: Setting, emit: Emit) -> None:
    """Emit how often memory ran out, with the peaks; on CPU the peaks are missing."""
    scale = setting.scale
    with opened(scale.model, scale, setting.device, setting.flags) as model:
        if setting.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        session = model.session(max_rows=scale.memory_rows, fill=True)
        detail: dict[str, object] = {"cache_tokens": session.num_blocks * session.block_size}
        if setting.is_cuda:
            detail |= _peaks("warm_up")
            torch.cuda.reset_peak_memory_stats()
        rows, length = filling(session, scale)
        failures = 0
        try:
            session.admit(rows, length, room=NUM_STEPS, parameters=EVERYTHING)
            session.play(rows, NUM_STEPS)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failures = 1
            detail["error"] = str(error).partition("\n")[0]
        if setting.is_cuda:
            detail |= _peaks("service")
        detail |= {"rows": rows, "length": length}
        emit(check("a full cache", failures, "steps out of memory", detail))


def filling(session: Session, scale: Scale) -> tuple[int, int]:
    """Rows and prompt tokens of each that fill the cache: as long as sequences may be, and as many as fit."""
    length = scale.max_tokens - NUM_STEPS - 1
    blocks = -(-(length + NUM_STEPS + 1) // session.block_size)
    if blocks > session.num_blocks:
        raise ValueError(f"a sequence of {length} tokens needs {blocks} blocks")
    return min(scale.memory_rows, session.num_blocks // blocks), length


def _peaks(when: str) -> dict[str, float]:
    free, _ = torch.cuda.mem_get_info()
    return {
        f"{when}_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        f"{when}_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        f"{when}_free_gib": free / GIB,
    }
