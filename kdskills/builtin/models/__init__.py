"""Shipped model providers."""
