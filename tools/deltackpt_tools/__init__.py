"""deltackpt_tools: command line and inspection of a checkpoint store (no torch)."""
