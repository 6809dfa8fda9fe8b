"""The commands of `sattn`, a module each. At import they need the standard library alone."""
