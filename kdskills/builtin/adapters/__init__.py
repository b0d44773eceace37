"""Skills inside other agent frameworks, one file each; none keeps state or policy of its own."""
