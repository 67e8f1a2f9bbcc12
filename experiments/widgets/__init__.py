"""Widgets: the data of the book's interactive figures."""
