"""How a recording ends: in good order, by a failure, a signal, a time limit or the death of its parent."""
