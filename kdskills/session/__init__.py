"""Loaded skills per conversation, and the runtime tools a model calls."""
