"""Several processes that train one model: what they agree on, DDP and FSDP2."""
