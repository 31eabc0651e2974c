"""Private optimizers: accumulate, clip, noise, book, step."""
