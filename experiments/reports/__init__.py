"""Reports: records as rows, tables for a terminal, and figures for the book."""
