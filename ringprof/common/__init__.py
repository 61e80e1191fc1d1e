"""Helpers that every layer uses: files, JSON, limits, validation, scratch folders and worker processes."""
