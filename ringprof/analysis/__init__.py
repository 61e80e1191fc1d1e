"""From the columns of traces to where the time went; reads bottom up, and knows nothing of files or terminals."""
