"""Runs of many ranks: the analysis as a map over ranks and a small reduce, in memory that ranks do not add to."""
