"""Other people's training loops. Each module needs its own extra; nothing here is imported by the rest."""
