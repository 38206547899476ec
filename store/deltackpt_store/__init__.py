"""deltackpt_store: the content-addressed checkpoint store (bytes only, no torch)."""
