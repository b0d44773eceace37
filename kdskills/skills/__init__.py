"""Skills as files: model, parsing, companions, validation, roots, discovery, registry, index and selection."""
