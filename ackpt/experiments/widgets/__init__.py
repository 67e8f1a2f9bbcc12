"""Data of the book's interactive figures."""
