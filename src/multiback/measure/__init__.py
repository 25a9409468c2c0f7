"""Clock, memory, statistics, environment, verdicts: numbers only; gradients are unknown here."""
