"""Files of a run and their contents. Imports no torch, so that commands that only read a run start at once."""
