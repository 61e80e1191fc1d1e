"""Context-parallel attention algorithms: one file per strategy."""
