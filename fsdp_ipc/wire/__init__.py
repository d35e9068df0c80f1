"""The wires that a sender can speak: ours, and the dialects of the stock `ipc` backend."""
