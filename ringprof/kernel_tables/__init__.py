"""Printed kernel tables: read, analysed and shown."""
