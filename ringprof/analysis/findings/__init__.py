"""Results derived from the attribution of a run: summary, waterfall, verdict, comparison, and conditions."""
