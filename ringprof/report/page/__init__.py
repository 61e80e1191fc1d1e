"""Reports as one HTML file that needs nothing else: see `document`."""
