"""Timeline of one rank: the analysed part of the trace, and where its time went."""
