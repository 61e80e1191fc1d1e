"""Ranks: how they are started, watched and ended, and how their failures reach the user."""
