"""Findings as a terminal report, JSON, an HTML page, plots and a trace for Perfetto."""
