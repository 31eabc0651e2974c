"""Pure functions and frozen values: what is released, how it is clipped and noised, and what it costs."""
