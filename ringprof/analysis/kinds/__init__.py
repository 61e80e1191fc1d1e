"""What each activity is: the rules, the evidence, and the process groups."""
