"""The published experiments: configuration in, records out. One module per table of the book."""
