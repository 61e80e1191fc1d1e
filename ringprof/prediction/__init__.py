"""Performance prediction: dry runs of strategies, timed with the calibration of a machine."""
