"""Trains one cell: data, models, methods, the training loop, and where its result is kept."""
