"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Compilation by numba makes the first example slow; results must not depend on the machine's speed.
settings.register_profile(
    "ecnn", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("ecnn")
