"""Analysis of runs with many ranks: a map over ranks and a small reduce, with memory independent of the rank count."""
