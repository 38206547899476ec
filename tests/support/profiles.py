"""How long the state machines run: a short while in CI, as long as wanted by hand.

DELTACKPT_STATEFUL=2000 pytest tests/stateful     that many runs of each machine, random seeds
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

LONG = int(os.environ.get("DELTACKPT_STATEFUL", "0"))


def budget(examples: int, steps: int) -> settings:
    """Settings of a machine that does `examples` runs of at most `steps` rules in CI."""
    return settings(
        max_examples=LONG or examples,
        stateful_step_count=2 * steps if LONG else steps,
        derandomize=not LONG,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
        print_blob=True,
    )
