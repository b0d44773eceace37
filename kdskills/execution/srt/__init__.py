"""Parts of the srt engine: settings and script of one run, and its handle."""
