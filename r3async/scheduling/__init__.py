"""Pure: who plays what and when, what is trained next, how old it may be, how much runs at once. Clocks are injected."""
