"""The op: patterns, routing keys, layouts and backends. Needs torch alone."""
