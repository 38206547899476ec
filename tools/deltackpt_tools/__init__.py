"""Command line of deltackpt: look into a store, check it, take a step out of it. Knows no torch."""
