"""deltackpt: save training state as often as every step, writing only what changed."""
