"""Settings of hypothesis for the whole tree: no time limits per example, machines are shared and noisy."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "thinwire", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("thinwire")
