"""The descriptor of a bundle, and loading a bundle from its folder."""
