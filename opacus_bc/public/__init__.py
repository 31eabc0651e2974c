"""Public data: checks that they are not private, and running a model on them without a trace."""
