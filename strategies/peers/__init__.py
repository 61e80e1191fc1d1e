"""Other people's context-parallel attention as strategies; each module imports its package when a strategy is made."""
