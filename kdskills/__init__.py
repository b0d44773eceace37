"""Agent Skills for Python agents that can be trusted in production."""
