"""Synthetic probes: small models, trained from scratch on tasks whose every answer stands at a known distance.

`tasks` draws examples, `paths` says which answers a stack of layers can reach at all, `cells` trains and measures one
model, `report` sums models up.
"""
