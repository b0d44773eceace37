"""The turn's pool of sources, and citations: extraction, rewriting, rendering, streaming."""
