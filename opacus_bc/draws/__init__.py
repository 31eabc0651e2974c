"""How a step's samples are drawn, delivered to the user's loop, and used once."""
