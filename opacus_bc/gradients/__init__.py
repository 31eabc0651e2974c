"""Who makes the vectors that are clipped."""
