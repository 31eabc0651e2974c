"""`opacus-bc compare`: every method at one budget, in one table."""
