"""Checkpoints: files, a run's state, and random streams."""
