"""Settings of hypothesis for the whole tree: no time limits per example, machines are shared and noisy.

"check" is for every day; `pytest --hypothesis-profile thorough` tries twenty times as many examples, also where a test
takes a share of `settings.default.max_examples`.
"""

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("check", max_examples=20, **COMMON)
settings.register_profile("thorough", max_examples=400, **COMMON)
settings.load_profile("check")
