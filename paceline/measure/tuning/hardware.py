"""What a machine can do at best: bytes read and operations done in a second, and how much it remembers.

The named ones are their makers' figures, dense and without a boost of the clock; "this" is measured.
Invariant: a limit is never reached in full, so times computed from it are bounds, and their ratios estimates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options import nearest

GB, TERA = 10**9, 10**12
THIS = "this"


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    bandwidth: float  # bytes a second
    half_flops: (
        float  # operations a second with weights of 16 bits, and of fewer where only the weights are small
    )
    float_flops: float  # with float32
    memory: float  # bytes
    int8_flops: float | None = None  # where activations are int8 too, as on CPUs
    attention_flops: float | None = None  # where attention is done in another precision than the products
    kv_dtype: str = "bfloat16"

    def product_flops(self, dtype: str) -> float:
        if dtype == "float32":
            return self.float_flops
        return (
            self.int8_flops if dtype in ("int8", "int4") and self.int8_flops is not None else self.half_flops
        )

    def ridge(self, dtype: str) -> float:
        """Operations for each byte read from which arithmetic, not memory, sets the pace."""
        return self.product_flops(dtype) / self.bandwidth


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("h200", 4800 * GB, 989 * TERA, 67 * TERA, 141 * GB),
        Hardware("h100", 3350 * GB, 989 * TERA, 67 * TERA, 80 * GB),
        Hardware("a100", 2039 * GB, 312 * TERA, 19.5 * TERA, 80 * GB),
        Hardware("rtx4090", 1008 * GB, 165 * TERA, 82.6 * TERA, 24 * GB),
        Hardware("l4", 300 * GB, 121 * TERA, 30.3 * TERA, 24 * GB),
        Hardware("m2", 100 * GB, 3.6 * TERA, 3.6 * TERA, 24 * GB),
    )
}


def named(name: str) -> Hardware:
    if name == THIS:
        return this()
    if name not in HARDWARE:
        known = [*HARDWARE, THIS]
        raise ConfigError(
            f"--hardware is {name!r}; {nearest(name, known)}, or give --bandwidth, --flops and --memory"
        )
    return HARDWARE[name]


def this() -> Hardware:
    """The CPU this runs on, measured: a few seconds."""
    from paceline.measure.limits import measure

    found = measure()
    floats = 2e9 * found.float32_gmac_s  # a multiply-add is two operations
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Hardware(
        THIS, found.read_gb_s * GB, floats, floats, memory, 2e9 * found.int8_gmac_s, floats, "float32"
    )


def explicit(
    bandwidth: float | None, flops: float | None, memory: float | None, base: Hardware | None
) -> Hardware:
    """From the user's own figures, in GB/s, TFLOP/s and GB; what is not given is taken from `base`."""
    given = {"--bandwidth": bandwidth, "--flops": flops, "--memory": memory}
    for option, value in given.items():
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{option} is {value}; give a positive number (GB/s, TFLOP/s or GB)")
    missing = [option for option, value in given.items() if value is None]
    if base is None and missing:
        raise ConfigError(
            f"{', '.join(missing)} left out; give all of --bandwidth, --flops and --memory, or name --hardware as well"
        )
    changes: dict[str, Any] = {}
    if bandwidth is not None:
        changes["bandwidth"] = bandwidth * GB
    if flops is not None:
        changes |= {
            "half_flops": flops * TERA,
            "float_flops": flops * TERA,
            "int8_flops": None,
            "attention_flops": None,
        }
    if memory is not None:
        changes["memory"] = memory * GB
    start = base or Hardware("given", 0, 0, 0, 0)
    return replace(start, name=f"{base.name}, changed" if base else "given", **changes)
