"""Classification of activities into kinds: rules, evidence, and process groups."""
