"""A profile that no machine has, for tests of benchmarks and their tables."""

from __future__ import annotations

from forebay.hardware.profile import LinkRates, Machine, Profile, ThreadRate


def a_profile() -> Profile:
    """Round rates on a processor that computes too."""
    return Profile(
        machine=Machine(cpu="a CPU", cpus=2, device="cpu"),
        forebay="0",
        kernel_level="avx2",
        threads=(ThreadRate(threads=1, update=1e10, copy=1e10),),
        link=LinkRates(
            up=1e10,
            down=1e10,
            both=1e10,
            beside_update=5e9,
            update_beside=5e9,
            down_beside_update=5e9,
            update_beside_down=5e9,
        ),
    )
