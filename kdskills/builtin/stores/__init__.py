"""Shipped session stores."""
