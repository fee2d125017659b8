"""GGUF files: their headers, what their layers cache, and the ladder's shapes as such files."""
