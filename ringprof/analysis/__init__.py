"""Analysis of trace columns: attributes the time of a run to its causes. Independent of file formats and terminals."""
