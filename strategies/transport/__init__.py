"""Communication between ranks: rings, collectives, copy engines, and their handshake."""
