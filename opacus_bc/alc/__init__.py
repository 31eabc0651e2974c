"""Adaptive layerwise clipping: bounds that follow the layers' gradient norms on public data."""
