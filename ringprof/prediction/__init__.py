"""Foresight: strategies run on shapes, timed by a calibration of the machine that they would run on."""
