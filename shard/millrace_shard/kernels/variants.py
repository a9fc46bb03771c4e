"""The variants of the CPU library: the instructions of each, and which of them a CPU runs.

The build hook of the wheels reads this file and `toolchain.py` where neither torch nor other packages are installed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

AVX2, AVX512 = "AVX2", "AVX512"
"""ATen's names of vectors, as in `torch.backends.cpu.get_cpu_capability()`."""
AMX_FLAGS = ("-mamx-tile", "-mamx-bf16")
"""For code that runs only where the system grants tiles, which it is asked at the start. Older compilers lack them."""
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The sources of the CPU library, compiled for CPUs that have a set of instructions."""

    name: str
    capability: str
    """AVX2 or AVX512: the vectors of ATen's headers."""
    instructions: tuple[str, ...]
    """The compiler's names, as in -mavx2; of AMX it may have more."""
    has_amx: bool = False

    @property
    def features(self) -> frozenset[str]:
        """What a CPU must have, by the names of /proc/cpuinfo."""
        return frozenset(_FEATURES.get(name, name) for name in self.instructions)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the compiler, except for AMX."""
        return (
            *(f"-m{name}" for name in self.instructions),
            f"-mtune={_TUNED_FOR[self.capability]}",
            f"-DCPU_CAPABILITY={self.capability}",
            f"-DCPU_CAPABILITY_{self.capability}",
        )


_FEATURES = {
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avxvnni": "avx_vnni",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
}
"""Names in /proc/cpuinfo that differ from the compiler's."""
_TUNED_FOR = {AVX2: "haswell", AVX512: "icelake-server"}
"""Generic tuning of older compilers loads 32 bytes in two halves."""
_AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX512_VNNI = (*_AVX512, "avx512vnni")
VARIANTS = (
    Variant(
        name="avx512-bf16",
        capability=AVX512,
        instructions=(*_AVX512_VNNI, "avx512bf16", "avx512vbmi"),
        has_amx=True,
    ),
    Variant(name="avx512-vnni", capability=AVX512, instructions=_AVX512_VNNI),
    Variant(name="avx512", capability=AVX512, instructions=_AVX512),
    Variant(name="avx2-vnni", capability=AVX2, instructions=(*_AVX2, "avxvnni")),
    Variant(name="avx2", capability=AVX2, instructions=_AVX2),
)
"""The best first: since Zen 4 and Sapphire Rapids, Cascade Lake, Skylake-X, Alder Lake, Haswell and Zen 1."""


def fitting_variants(features: Collection[str], capability: str) -> tuple[Variant, ...]:
    """The variants that a CPU with these features runs, the best first; none above ATen's `capability`."""
    return tuple(
        variant
        for variant in VARIANTS
        if variant.features <= set(features) and capability in (AVX512, variant.capability)
    )


def cpu_features() -> frozenset[str]:
    """The features of this CPU that the system has enabled, by the names of /proc/cpuinfo; empty where it has none."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.split(":")[0].strip() == "flags"), "")
    return frozenset(flags.partition(":")[2].split())
