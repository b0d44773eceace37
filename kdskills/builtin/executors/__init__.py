"""Shipped execution engines."""
