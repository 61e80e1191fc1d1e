"""What a run comes to: summary, waterfall, verdict, comparison, and conditions on their figures."""
