"""One page of everything that was measured: records, tables and plots of a folder as self-contained HTML."""
