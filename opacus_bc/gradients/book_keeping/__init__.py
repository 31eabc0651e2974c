"""Book-keeping: every sample's clipped gradient from one ordinary backward pass."""
