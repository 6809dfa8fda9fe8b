"""Theory and connectomes: what patterns and brains look like as graphs."""
