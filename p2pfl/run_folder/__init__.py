"""Files of a run, and what they contain. Without torch, so that whatever only reads a run starts at once."""
