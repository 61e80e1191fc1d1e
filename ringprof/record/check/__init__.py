"""Check of a user's distributed attention against dense attention over the whole sequence."""
